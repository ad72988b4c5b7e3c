package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// phaseCompleted is that of a checkpoint which is whole and kept.
const phaseCompleted = "completed"

func (a *app) checkpointCommand() *cobra.Command {
	c := &cobra.Command{Use: "checkpoint", Short: "Make and keep checkpoints of the cluster in its object store",
		Example: "  keelctl checkpoint create\n  keelctl checkpoint list"}
	c.AddCommand(a.checkpointCreate(), a.checkpointList(), a.checkpointShow(), a.checkpointVerify(), a.checkpointRollback(), a.checkpointDelete())
	return c
}

// savepointCommand has a savepoint made under its own name; it is a checkpoint for
// everything else.
func (a *app) savepointCommand() *cobra.Command {
	c := &cobra.Command{Use: "savepoint", Short: "Make savepoints: checkpoints that are yours to keep, copy and delete",
		Example: "  keelctl savepoint create\n  keelctl checkpoint list"}
	create := a.checkpointCreation(func() bool { return true })
	create.Short = "Make a savepoint of the whole cluster; exit 1 if it fails, 6 if it is not done in time"
	create.Long = `create makes a savepoint, as keelctl checkpoint create --savepoint does, and follows it
until it has completed. It is uploaded as a whole into a folder of the cluster's object
store that may be copied elsewhere, and is kept, uncounted, until it is deleted with
keelctl checkpoint delete NUMBER --savepoint, or you delete the folder. Its number is
one of the checkpoints': show, verify and rollback take it.`
	create.Example = "  keelctl savepoint create\n  keelctl savepoint create -o json --columns number,uri"
	c.AddCommand(create)
	return c
}

func (a *app) checkpointCreate() *cobra.Command {
	var savepoint bool
	c := a.checkpointCreation(func() bool { return savepoint })
	c.Short = "Make a checkpoint of the whole cluster; exit 1 if it fails, 6 if it is not done in time"
	c.Long = `create makes a checkpoint and follows it until it has completed. It holds every write
that was acknowledged before the command, and none that is sent after its end. What
was uploaded for earlier checkpoints is not uploaded again. Ending the command does
not end the checkpoint.

A savepoint (--savepoint) is yours: it is uploaded as a whole into a folder that may
be copied elsewhere, and is kept, uncounted, until it is deleted with --savepoint or
you delete the folder.`
	c.Example = "  keelctl checkpoint create --savepoint\n  keelctl checkpoint create\n  keelctl checkpoint create --start-only -o json --columns number"
	c.Flags().BoolVar(&savepoint, "savepoint", false, "make a savepoint: self-contained, and kept until you delete it")
	return c
}

// checkpointCreation is what both commands do.
func (a *app) checkpointCreation(savepoint func() bool) *cobra.Command {
	var wait time.Duration
	var start bool
	c := &cobra.Command{
		Use: "create", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			first := a.timeout
			if !start && !a.given(cmd, "timeout") {
				a.timeout = 0
			}
			a.boundBy(cmd, wait)
			return a.createCheckpoint(cmd.Context(), &keelstatepb.CreateCheckpointRequest{Savepoint: savepoint()}, start, first)
		},
	}
	c.Flags().BoolVar(&start, "start-only", false, "return as soon as the checkpoint is announced")
	c.Flags().DurationVar(&wait, "wait", 0, "the longest time to wait, 0 for as long as it takes or a --timeout that is given")
	return c
}

func (a *app) createCheckpoint(ctx context.Context, req *keelstatepb.CreateCheckpointRequest, start bool, first time.Duration) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	var last *keelstatepb.Checkpoint
	err := a.call(ctx, false, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		ctx, stop := context.WithCancel(ctx)
		defer stop() // the checkpoint goes on, and is followed by its number
		stream, err := keelstatepb.NewCheckpointsClient(conn).CreateCheckpoint(ctx, req)
		if err == nil {
			last, err = stream.Recv()
		}
		return err
	}, slowCall)
	if err != nil {
		return err
	}
	if start {
		return a.printDone("Checkpoint", checkpointRecord(last, true))
	}
	return a.followCheckpoint(ctx, last, first)
}

// followCheckpoint looks at a checkpoint until it has ended. look bounds each look.
func (a *app) followCheckpoint(ctx context.Context, first *keelstatepb.Checkpoint, look time.Duration) error {
	f := follower[*keelstatepb.Checkpoint]{app: a, bound: look, name: fmt.Sprintf("checkpoint %d", first.GetNumber()),
		line: checkpointProgress, meter: uploadMeter, ended: (*keelstatepb.Checkpoint).GetEnded,
		look: func(ctx context.Context, c *keelstatepb.Checkpoint) (*keelstatepb.Checkpoint, error) {
			return a.checkpoint(ctx, c.GetNumber())
		}}
	last, err := f.follow(ctx, first)
	if err != nil {
		return err
	}
	if err := a.printDone("Checkpoint", checkpointRecord(last, true)); err != nil {
		return err
	}
	switch {
	case !last.GetEnded():
		return &unhealthy{fmt.Sprintf("checkpoint %d goes on; follow it with: keelctl checkpoint show %d", last.GetNumber(), last.GetNumber())}
	case last.GetPhase() != phaseCompleted:
		return keel.NewError(keel.ErrCheckpoint, keel.OutcomeNotApplied, fmt.Sprintf("checkpoint %d", last.GetNumber()), last.GetError())
	}
	return nil
}

// checkpointProgress is a checkpoint in one line.
func checkpointProgress(c *keelstatepb.Checkpoint) string {
	line := fmt.Sprintf("checkpoint %d: %s", c.GetNumber(), c.GetPhase())
	switch {
	case c.GetError() != "":
		line += ": " + c.GetError()
	case c.GetPhase() == phaseCompleted:
		line += fmt.Sprintf(", %d bytes, %d of them new", c.GetFullBytes(), c.GetNewBytes())
	case len(c.GetShards()) > 0:
		m := uploadMeter(c)
		line += fmt.Sprintf(", %d of %d shards uploaded", m.done, m.of)
	}
	return line
}

// uploadMeter is how many shards have uploaded; nothing once it has ended.
func uploadMeter(c *keelstatepb.Checkpoint) meter {
	if c.GetEnded() {
		return meter{}
	}
	m := meter{of: uint64(len(c.GetShards())), unit: "shards"}
	for _, s := range c.GetShards() {
		if s.GetFullBytes() > 0 || s.GetState() == "uploaded" {
			m.done++
		}
	}
	return m
}

func (a *app) checkpointList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the checkpoints that are kept", Args: cobra.NoArgs, Example: "  keelctl checkpoint list -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			resp, err := a.checkpoints(ctx)
			if err != nil {
				return err
			}
			out := a.list("Checkpoint", "number", "phase", "automatic", "savepoint", "created", "seconds", "fullBytes", "newBytes", "objects", "error")
			for _, c := range resp.GetCheckpoints() {
				if err := out.Add(checkpointRecord(c, false)); err != nil {
					return err
				}
			}
			if err := out.End(); err != nil {
				return err
			}
			a.prose("%d objects of %d bytes are kept; %d are being deleted", resp.GetObjects(), resp.GetObjectBytes(), resp.GetPendingDeletions())
			return nil
		},
	}
}

func (a *app) checkpointShow() *cobra.Command {
	return &cobra.Command{
		Use: "show NUMBER", Short: "Show one checkpoint, with the place of the cut in each shard", Args: cobra.ExactArgs(1),
		Example:           "  keelctl checkpoint show 3\n  keelctl checkpoint show 3 -o json --columns uri,shards",
		ValidArgsFunction: a.completeCheckpoints,
		RunE: func(cmd *cobra.Command, args []string) error {
			number, err := checkpointArg(args[0])
			if err != nil {
				return err
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			c, err := a.checkpoint(ctx, number)
			if err != nil {
				return err
			}
			return a.printOne("Checkpoint", checkpointRecord(c, true))
		},
	}
}

func (a *app) checkpointVerify() *cobra.Command {
	var quick bool
	c := &cobra.Command{
		Use: "verify NUMBER", Short: "Read every object of a checkpoint and check it; exit 6 if one is bad", Args: cobra.ExactArgs(1),
		Example:           "  keelctl checkpoint verify 3\n  keelctl checkpoint verify 3 --quick",
		ValidArgsFunction: a.completeCheckpoints,
		RunE: func(cmd *cobra.Command, args []string) error {
			number, err := checkpointArg(args[0])
			if err != nil {
				return err
			}
			if !a.given(cmd, "timeout") {
				a.timeout = 0
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			return a.verifyCheckpoint(ctx, number, quick)
		},
	}
	c.Flags().BoolVar(&quick, "quick", false, "only look whether every object is there with its size")
	return c
}

// proseEvery is how often progress is told where there is no terminal.
const proseEvery = 10 * time.Second

func (a *app) verifyCheckpoint(ctx context.Context, number uint64, quick bool) error {
	var last *keelstatepb.VerifyCheckpointProgress
	said := time.Now()
	err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		stream, err := keelstatepb.NewCheckpointsClient(conn).VerifyCheckpoint(ctx, &keelstatepb.VerifyCheckpointRequest{Number: number, Quick: quick})
		if err != nil {
			return err
		}
		for {
			p, err := stream.Recv()
			if err != nil {
				if errors.Is(err, io.EOF) && last.GetDone() {
					return nil
				}
				return err
			}
			if last = p; !p.GetDone() && time.Since(said) >= proseEvery {
				a.prose("checkpoint %d: %d of %d objects", number, p.GetObjects(), p.GetTotal())
				said = time.Now()
			}
		}
	}, slowCall)
	if err != nil {
		return err
	}
	findings := []record{}
	var bad []string
	for _, f := range last.GetFindings() {
		findings = append(findings, record{{Name: "object", Value: f.GetObject()}, {Name: "fault", Value: f.GetFault()},
			{Name: "shard", Value: f.GetShard()}, {Name: "detail", Value: f.GetDetail()}})
		bad = append(bad, fmt.Sprintf("%s is %s", f.GetObject(), f.GetFault()))
	}
	if err := a.printOne("CheckpointVerification", record{{Name: "number", Value: number}, {Name: "sound", Value: len(bad) == 0},
		{Name: "objects", Value: last.GetObjects()}, {Name: "bytes", Value: last.GetBytes()}, {Name: "files", Value: last.GetFiles()},
		{Name: "findings", Value: findings}}); err != nil {
		return err
	}
	if len(bad) > 0 {
		return &unhealthy{fmt.Sprintf("checkpoint %d cannot be relied on: %s", number, strings.Join(bad, "; "))}
	}
	return nil
}

func (a *app) checkpointDelete() *cobra.Command {
	var yes, savepoint bool
	c := &cobra.Command{
		Use: "delete NUMBER --yes", Short: "Delete a checkpoint, and the objects that no other needs", Args: cobra.ExactArgs(1),
		Example:           "  keelctl checkpoint delete 3 --yes\n  keelctl checkpoint delete 4 --savepoint --yes",
		ValidArgsFunction: a.completeCheckpoints,
		RunE: func(cmd *cobra.Command, args []string) error {
			number, err := checkpointArg(args[0])
			if err != nil {
				return err
			}
			if err := a.confirm(yes, fmt.Sprintf("deleting checkpoint %d", number), args[0]); err != nil {
				return err
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			err = a.call(ctx, false, func(ctx context.Context, conn grpc.ClientConnInterface) error {
				_, err := keelstatepb.NewCheckpointsClient(conn).DeleteCheckpoint(ctx, &keelstatepb.DeleteCheckpointRequest{Number: number, Savepoint: savepoint})
				return err
			})
			if err != nil {
				return err
			}
			return a.printDone("Deleted", record{{Name: "number", Value: number}})
		},
	}
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	c.Flags().BoolVar(&savepoint, "savepoint", false, "it is a savepoint, which is not deleted without this")
	return c
}

func (a *app) checkpoints(ctx context.Context) (*keelstatepb.ListCheckpointsResponse, error) {
	var resp *keelstatepb.ListCheckpointsResponse
	err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewCheckpointsClient(conn).ListCheckpoints(ctx, &keelstatepb.ListCheckpointsRequest{})
		return err
	})
	return resp, err
}

func (a *app) checkpoint(ctx context.Context, number uint64) (*keelstatepb.Checkpoint, error) {
	var resp *keelstatepb.Checkpoint
	err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewCheckpointsClient(conn).GetCheckpoint(ctx, &keelstatepb.GetCheckpointRequest{Number: number})
		return err
	})
	return resp, err
}

// checkpointArg reads the number of a checkpoint.
func checkpointArg(text string) (uint64, error) {
	number, err := strconv.ParseUint(text, 10, 64)
	if err != nil || number == 0 {
		return 0, usage(fmt.Errorf("%q is not the number of a checkpoint", text))
	}
	return number, nil
}

func (a *app) completeCheckpoints(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.fromCluster(cmd, typed, func(ctx context.Context) (out []string, err error) {
		resp, err := a.checkpoints(ctx)
		for _, c := range resp.GetCheckpoints() {
			out = append(out, described(strconv.FormatUint(c.GetNumber(), 10), "%s", c.GetPhase()))
		}
		return out, err
	})
}

func checkpointRecord(c *keelstatepb.Checkpoint, whole bool) record {
	seconds := any(nil)
	if c.GetEndedMs() >= c.GetCreatedMs() && c.GetEndedMs() > 0 {
		seconds = float64(c.GetEndedMs()-c.GetCreatedMs()) / 1000
	}
	r := record{{Name: "number", Value: c.GetNumber()}, {Name: "phase", Value: c.GetPhase()}, {Name: "automatic", Value: c.GetAutomatic()},
		{Name: "savepoint", Value: c.GetSavepoint()},
		{Name: "created", Value: time.UnixMilli(int64(c.GetCreatedMs())).UTC().Format(time.RFC3339)}, {Name: "seconds", Value: seconds},
		{Name: "fullBytes", Value: c.GetFullBytes()}, {Name: "newBytes", Value: c.GetNewBytes()}, {Name: "objects", Value: c.GetObjects()},
		{Name: "error", Value: c.GetError()},
		{Name: "uri", Value: c.GetUri(), Wide: !whole}, {Name: "files", Value: c.GetFiles(), Wide: true}, {Name: "newFiles", Value: c.GetNewFiles(), Wide: true},
		{Name: "requests", Value: c.GetRequests(), Wide: true}, {Name: "syncMs", Value: c.GetSyncMs(), Wide: true}, {Name: "asyncMs", Value: c.GetAsyncMs(), Wide: true},
		{Name: "createdMs", Value: c.GetCreatedMs(), Wide: true}, {Name: "endedMs", Value: c.GetEndedMs(), Wide: true},
		{Name: "incarnation", Value: c.GetIncarnation(), Wide: true}, {Name: "keyGroups", Value: c.GetKeyGroups(), Wide: true},
		{Name: "mode", Value: c.GetMode(), Wide: true}}
	if !whole {
		return r
	}
	shards := []record{}
	for _, s := range c.GetShards() {
		shards = append(shards, record{{Name: "shard", Value: s.GetShard()}, {Name: "lo", Value: s.GetRange().GetLo()}, {Name: "hi", Value: s.GetRange().GetHi()},
			{Name: "state", Value: s.GetState()}, {Name: "uploader", Value: s.GetUploader()}, {Name: "sequence", Value: s.GetSequence()},
			{Name: "fullBytes", Value: s.GetFullBytes()}, {Name: "newBytes", Value: s.GetNewBytes()}, {Name: "objects", Value: s.GetObjects()},
			{Name: "index", Value: s.GetIndex(), Wide: true}, {Name: "epoch", Value: s.GetEpoch(), Wide: true}, {Name: "clockMs", Value: s.GetClockMs(), Wide: true},
			{Name: "files", Value: s.GetFiles(), Wide: true}, {Name: "newFiles", Value: s.GetNewFiles(), Wide: true}, {Name: "requests", Value: s.GetRequests(), Wide: true},
			{Name: "syncMs", Value: s.GetSyncMs(), Wide: true}, {Name: "asyncMs", Value: s.GetAsyncMs(), Wide: true},
			{Name: "attempt", Value: s.GetAttempt(), Wide: true}, {Name: "manifest", Value: s.GetManifest(), Wide: true},
			{Name: "baseIndex", Value: s.GetBaseIndex(), Wide: true}, {Name: "logBytes", Value: s.GetLogBytes(), Wide: true}, {Name: "segments", Value: s.GetSegments(), Wide: true}})
	}
	participants := []record{}
	for _, p := range c.GetParticipants() {
		participants = append(participants, record{{Name: "participant", Value: p.GetParticipant()}, {Name: "given", Value: p.GetGiven()},
			{Name: "bytes", Value: len(p.GetPosition())}, {Name: "position", Value: base64.StdEncoding.EncodeToString(p.GetPosition()), Wide: true}})
	}
	return append(r, field{Name: "shards", Value: shards}, field{Name: "participants", Value: participants})
}
