package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// rollbackFlags are those of checkpoint rollback.
type rollbackFlags struct {
	yes, dryRun, abort, force bool
	wait, giveUp              time.Duration
}

func (a *app) checkpointRollback() *cobra.Command {
	var f rollbackFlags
	c := &cobra.Command{
		Use: "rollback NUMBER --yes | --dry-run, or rollback --abort", Short: "Take the live cluster back to a checkpoint; exit 1 if it is given up, 6 if it is not done in time",
		Args: cobra.MaximumNArgs(1), Aliases: []string{"restore"},
		Long: `rollback (or restore) takes the whole cluster back to a completed checkpoint. What was written since
is gone; declared states, nodes and checkpoints stay. First replicas fetch what their
shards had, beside what they serve. Then all shards stop their writes, go back, and
open together in a new incarnation: sessions, tokens and requests of the old one are
refused as rolled back. Reads go on until a shard goes back. A new cluster begins with a
checkpoint by keelctl cluster init --restore.

A checkpoint that may hold writes of a registered participant and has no position of it
is refused: that job could not go on. --dry-run shows it, --force goes back nevertheless.

Until the shards stop their writes the rollback can be given up, with --abort, and is
by itself after --give-up-after; then nothing has changed. Ending the command does not
end the rollback; the same command follows it again.`,
		Example:           "  keelctl checkpoint rollback 3 --dry-run\n  keelctl checkpoint rollback 3 --yes\n  keelctl checkpoint rollback --abort",
		ValidArgsFunction: a.completeCheckpoints,
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.abort {
				if len(args) > 0 || f.dryRun || f.yes || f.force {
					return usage(errors.New("--abort stands alone"))
				}
				return a.abortRollback(cmd.Context())
			}
			if len(args) != 1 || f.yes && f.dryRun {
				return usage(errors.New("give the number of a checkpoint, and --yes or --dry-run"))
			}
			number, err := checkpointArg(args[0])
			if err != nil {
				return err
			}
			req := &keelstatepb.RollBackRequest{Number: number, DryRun: f.dryRun, TimeoutMs: uint64(max(f.giveUp, 0).Milliseconds()), Force: f.force}
			if f.dryRun {
				return a.planRollback(cmd.Context(), req)
			}
			if err := a.confirm(f.yes, fmt.Sprintf("rolling the cluster back to checkpoint %d", number), args[0]); err != nil {
				return err
			}
			look := a.timeout
			if !a.given(cmd, "timeout") {
				a.timeout = 0
			}
			a.boundBy(cmd, f.wait)
			return a.rollBack(cmd.Context(), req, look)
		},
	}
	c.Flags().BoolVar(&f.yes, "yes", false, "do not ask")
	c.Flags().BoolVar(&f.dryRun, "dry-run", false, "print what would be done, and do nothing")
	c.Flags().BoolVar(&f.force, "force", false, "go back though a registered participant has no position in the checkpoint, and is given nothing back")
	c.Flags().BoolVar(&f.abort, "abort", false, "give up the rollback that runs, while it can be")
	c.Flags().DurationVar(&f.wait, "wait", 0, "the longest time to wait, 0 for as long as it takes or a --timeout that is given")
	c.Flags().DurationVar(&f.giveUp, "give-up-after", 0, "give up if the shards are not prepared by then; 0 for 30m")
	return c
}

// startRollback sends the request and takes the first message.
func (a *app) startRollback(ctx context.Context, req *keelstatepb.RollBackRequest) (*keelstatepb.Rollback, error) {
	var first *keelstatepb.Rollback
	err := a.call(ctx, req.GetDryRun(), func(ctx context.Context, conn grpc.ClientConnInterface) error {
		ctx, stop := context.WithCancel(ctx)
		defer stop() // the rollback goes on, and is followed by its operation
		stream, err := keelstatepb.NewCheckpointsClient(conn).RollBack(ctx, req)
		if err == nil {
			first, err = stream.Recv()
		}
		return err
	}, slowCall)
	return first, err
}

func (a *app) planRollback(ctx context.Context, req *keelstatepb.RollBackRequest) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	plan, err := a.startRollback(ctx, req)
	if err != nil {
		return err
	}
	if n := len(plan.GetLacked()); n > 0 && !req.GetForce() {
		a.prose("%d participants have no position in checkpoint %d, which may hold their writes: without --force it is refused", n, plan.GetNumber())
	}
	return a.printOne("RollbackPlan", rollbackRecord(plan))
}

func (a *app) abortRollback(ctx context.Context) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	var last *keelstatepb.Rollback
	err := a.call(ctx, false, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		last, err = keelstatepb.NewCheckpointsClient(conn).AbortRollback(ctx, &keelstatepb.AbortRollbackRequest{})
		return err
	})
	if err != nil {
		return err
	}
	return a.printDone("Rollback", rollbackRecord(last))
}

// rollBack starts or joins a rollback and follows it to its end. look bounds each
// look.
func (a *app) rollBack(ctx context.Context, req *keelstatepb.RollBackRequest, look time.Duration) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	first, err := a.startRollback(ctx, req)
	if err != nil {
		return err
	}
	f := follower[*keelstatepb.Rollback]{app: a, bound: look, name: fmt.Sprintf("rollback to checkpoint %d", first.GetNumber()),
		line: rollbackProgress, meter: rollbackMeter, ended: (*keelstatepb.Rollback).GetEnded,
		look: func(ctx context.Context, r *keelstatepb.Rollback) (*keelstatepb.Rollback, error) {
			return a.rollback(ctx, r.GetOperation())
		}}
	last, err := f.follow(ctx, first)
	if err != nil {
		return err
	}
	if err := a.printDone("Rollback", rollbackRecord(last)); err != nil {
		return err
	}
	switch {
	case !last.GetEnded():
		return &unhealthy{fmt.Sprintf("the rollback goes on; follow it with: keelctl checkpoint rollback %d --yes", last.GetNumber())}
	case last.GetPhase() != "done":
		return keel.NewError(keel.ErrCheckpoint, keel.OutcomeNotApplied, fmt.Sprintf("rollback to checkpoint %d", last.GetNumber()), last.GetError())
	}
	return nil
}

func (a *app) rollback(ctx context.Context, operation uint64) (*keelstatepb.Rollback, error) {
	var resp *keelstatepb.Rollback
	err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewCheckpointsClient(conn).GetRollback(ctx, &keelstatepb.GetRollbackRequest{Operation: operation})
		return err
	})
	return resp, err
}

// rollbackProgress is a rollback in one line.
func rollbackProgress(r *keelstatepb.Rollback) string {
	line := fmt.Sprintf("rollback to checkpoint %d: %s", r.GetNumber(), r.GetPhase())
	states := map[string]int{}
	prepared, problem := 0, ""
	for _, s := range r.GetShards() {
		states[s.GetState()]++
		prepared += len(s.GetPrepared())
		if s.GetProblem() != "" && problem == "" {
			problem = fmt.Sprintf("; shard %d waits: %s", s.GetShard(), s.GetProblem())
		}
	}
	all := len(r.GetShards())
	switch r.GetPhase() {
	case "prepare":
		line += fmt.Sprintf(", %d replicas of %d shards are prepared", prepared, all)
	case "fence":
		line += fmt.Sprintf(", %d of %d shards have stopped their writes", states["fenced"], all)
	case "swap":
		line += fmt.Sprintf(", %d of %d shards are back", states["swapped"], all)
	case "open":
		line += fmt.Sprintf(", %d of %d shards are open", states["open"], all)
	case "done":
		line += fmt.Sprintf(", the cluster has incarnation %d", r.GetIncarnation())
	}
	if r.GetError() != "" {
		line += ": " + r.GetError()
	}
	return line + problem
}

// rollbackMeter is how many bytes have come, while replicas are prepared.
func rollbackMeter(r *keelstatepb.Rollback) meter {
	if r.GetPhase() != "prepare" {
		return meter{}
	}
	return allFetched(r)
}

func allFetched(r *keelstatepb.Rollback) meter {
	var done, of uint64
	for _, s := range r.GetShards() {
		done, of = done+s.GetHereBytes(), of+s.GetDueBytes()
	}
	return bytesMeter(done, of)
}

func rollbackRecord(r *keelstatepb.Rollback) record {
	shards := []record{}
	var bytes uint64
	for _, s := range r.GetShards() {
		bytes += s.GetBytes()
		shards = append(shards, record{{Name: "shard", Value: s.GetShard()}, {Name: "lo", Value: s.GetRange().GetLo()}, {Name: "hi", Value: s.GetRange().GetHi()},
			{Name: "bytes", Value: s.GetBytes()}, {Name: "state", Value: s.GetState()}, {Name: "replicas", Value: s.GetReplicas()},
			{Name: "prepared", Value: s.GetPrepared()}, {Name: "leader", Value: s.GetLeader()}, {Name: "problem", Value: s.GetProblem()},
			{Name: "fetchBytes", Value: s.GetDueBytes()}, {Name: "fetchedBytes", Value: s.GetHereBytes()}})
	}
	lacked := []record{}
	for _, p := range r.GetLacked() {
		lacked = append(lacked, record{{Name: "participant", Value: p.GetParticipant()}, {Name: "alive", Value: p.GetAlive()}, {Name: "newest", Value: p.GetNewest()}})
	}
	m := allFetched(r)
	var total any = bytes
	if r.GetEnded() { // the shards are forgotten
		total = nil
	}
	return record{{Name: "number", Value: r.GetNumber()}, {Name: "operation", Value: r.GetOperation()}, {Name: "phase", Value: r.GetPhase()},
		{Name: "incarnation", Value: r.GetIncarnation()}, {Name: "error", Value: r.GetError()}, {Name: "bytes", Value: total},
		{Name: "fetchBytes", Value: m.of, Wide: true}, {Name: "fetchedBytes", Value: m.done, Wide: true}, {Name: "shards", Value: shards}, {Name: "lacked", Value: lacked, Wide: r.GetLacked() == nil}}
}
