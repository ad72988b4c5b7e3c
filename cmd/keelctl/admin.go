package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// statusPause is the pause between two looks of a command that waits.
const statusPause = 200 * time.Millisecond

// slowCall is for what takes a node as long as its shard is large: only
// --timeout bounds it.
var slowCall = keel.AttemptTimeout(0)

func (a *app) clusterCommand() *cobra.Command {
	c := &cobra.Command{Use: "cluster", Short: "Found and inspect the cluster", Example: "  keelctl cluster status"}
	c.AddCommand(a.clusterInit(), a.clusterStatus())
	return c
}

// boundBy bounds a command by its --wait, unless a --timeout that was given (by
// flag or environment) is shorter or the wait is only the default.
func (a *app) boundBy(cmd *cobra.Command, wait time.Duration) {
	if wait <= 0 {
		return
	}
	shorter := a.timeout == 0 || wait < a.timeout
	if !a.given(cmd, "timeout") || cmd.Flags().Changed("wait") && shorter {
		a.timeout = wait
	}
}

func (a *app) clusterStatus() *cobra.Command {
	var wait time.Duration
	var untilHealthy bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the health of every node; exit 6 if the cluster is not healthy",
		Example: `  keelctl cluster status
  keelctl cluster status --exit-when-healthy --wait 1m --quiet
  keelctl cluster status -o json --columns healthy,problems`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if untilHealthy || cmd.Flags().Changed("wait") {
				a.boundBy(cmd, wait)
				untilHealthy = true
			}
			return a.status(cmd.Context(), untilHealthy)
		},
	}
	c.Flags().BoolVar(&untilHealthy, "exit-when-healthy", false, "wait until the cluster is healthy")
	c.Flags().DurationVar(&wait, "wait", time.Minute, "the longest time to wait, 0 for --timeout; implies --exit-when-healthy")
	return c
}

func (a *app) status(ctx context.Context, untilHealthy bool) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	var last *keelstatepb.StatusResponse
	for {
		var resp *keelstatepb.StatusResponse
		err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
			resp, err = keelstatepb.NewAdminClient(conn).Status(ctx, &keelstatepb.StatusRequest{})
			return err
		})
		switch {
		case err == nil:
			last = resp
		case !untilHealthy, last == nil && ctx.Err() != nil:
			return err
		}
		if err == nil && healthy(resp) || !untilHealthy || ctx.Err() != nil {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(statusPause):
		}
	}
	if err := a.printOne("ClusterStatus", statusRecord(last)); err != nil {
		return err
	}
	if !healthy(last) {
		return &unhealthy{"the cluster is not healthy: " + strings.Join(problems(last), "; ")}
	}
	return nil
}

// healthy holds for a status without problems in which every node answered (KX4).
func healthy(s *keelstatepb.StatusResponse) bool {
	return s.GetHealthy() && len(s.GetUnreachable()) == 0 && len(s.GetProblems()) == 0
}

// problems are those of the status, and every node that did not answer and is
// not named by one of them.
func problems(s *keelstatepb.StatusResponse) []string {
	out := append([]string(nil), s.GetProblems()...)
	for _, u := range s.GetUnreachable() {
		subject := fmt.Sprintf("node %s ", u.GetId())
		if !slices.ContainsFunc(s.GetProblems(), func(p string) bool { return strings.HasPrefix(p, subject) }) {
			out = append(out, fmt.Sprintf("%sis unreachable: %s", subject, u.GetError()))
		}
	}
	if len(out) == 0 && !s.GetHealthy() {
		out = append(out, "a node reports it")
	}
	return out
}

func statusRecord(s *keelstatepb.StatusResponse) record {
	var nodes, unreachable []record
	for _, n := range s.GetNodes() {
		leads := 0
		for _, g := range n.GetGroups() {
			if g.GetState() == "leader" {
				leads++
			}
		}
		nodes = append(nodes, record{
			{Name: "node", Value: n.GetNode().GetId()}, {Name: "ready", Value: n.GetReady()},
			{Name: "groups", Value: len(n.GetGroups())}, {Name: "leads", Value: leads},
			{Name: "reason", Value: n.GetNotReadyReason()},
			{Name: "version", Value: n.GetVersion(), Wide: true}, {Name: "engine", Value: n.GetEngine(), Wide: true},
			{Name: "uptimeMs", Value: n.GetUptimeMs(), Wide: true}, {Name: "revision", Value: n.GetMetadataRevision(), Wide: true},
		})
	}
	for _, u := range s.GetUnreachable() {
		unreachable = append(unreachable, record{{Name: "node", Value: u.GetId()}, {Name: "error", Value: u.GetError()}})
	}
	return record{
		{Name: "cluster", Value: s.GetClusterId()}, {Name: "healthy", Value: healthy(s)},
		{Name: "problems", Value: problemsOrNone(s)},
		{Name: "revision", Value: s.GetTopology().GetRevision(), Wide: true},
		{Name: "incarnation", Value: s.GetTopology().GetIncarnation(), Wide: true},
		{Name: "keyGroups", Value: s.GetTopology().GetKeyGroups()},
		{Name: "shards", Value: len(s.GetTopology().GetShards())},
		{Name: "nodes", Value: nodes}, {Name: "unreachable", Value: unreachable},
	}
}

func problemsOrNone(s *keelstatepb.StatusResponse) []string {
	if healthy(s) {
		return nil
	}
	return problems(s)
}

// topology asks for the topology.
func (a *app) topology(ctx context.Context) (t *keelstatepb.Topology, err error) {
	err = a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		t, err = keelstatepb.NewClusterClient(conn).GetTopology(ctx, &keelstatepb.GetTopologyRequest{})
		return err
	})
	return t, err
}

func (a *app) nodeCommand() *cobra.Command {
	c := &cobra.Command{Use: "node", Short: "Inspect nodes", Example: "  keelctl node list"}
	c.AddCommand(&cobra.Command{
		Use: "list", Short: "List the nodes of the cluster", Args: cobra.NoArgs,
		Example: "  keelctl node list\n  keelctl node list -o jsonl --columns id,grpc",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			t, err := a.topology(ctx)
			if err != nil {
				return err
			}
			out := a.list("Node", "id", "state", "alive", "grpc", "raft")
			for _, n := range t.GetNodes() {
				if err := out.Add(record{{Name: "id", Value: n.GetId()}, {Name: "state", Value: n.GetState()},
					{Name: "alive", Value: n.GetAlive()}, {Name: "grpc", Value: n.GetGrpcAddress()}, {Name: "raft", Value: n.GetRaftAddress()},
					{Name: "http", Value: n.GetHttpAddress(), Wide: true}, {Name: "zone", Value: n.GetZone(), Wide: true}}); err != nil {
					return err
				}
			}
			return out.End()
		},
	})
	return c
}

func (a *app) shardCommand() *cobra.Command {
	c := &cobra.Command{Use: "shard", Short: "Inspect and operate shards", Example: "  keelctl shard list"}
	c.AddCommand(a.shardList(), a.shardTransfer(), a.shardHash(), a.shardScrub(),
		a.shardJob("snapshot", "Take a snapshot of a shard at its leader", "Snapshot", a.snapshot),
		a.shardJob("compact", "Compact a shard's store at every replica", "Compaction", a.compact))
	return c
}

func (a *app) shardList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the shards", Args: cobra.NoArgs,
		Example: "  keelctl shard list\n  keelctl shard list -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			t, err := a.topology(ctx)
			if err != nil {
				return err
			}
			out := a.list("Shard", "id", "lo", "hi", "leader", "replicas")
			for _, s := range t.GetShards() {
				var replicas []string
				for _, r := range s.GetReplicas() {
					replicas = append(replicas, r.GetNode())
				}
				if err := out.Add(record{{Name: "id", Value: s.GetId()}, {Name: "lo", Value: s.GetRange().GetLo()},
					{Name: "hi", Value: s.GetRange().GetHi()}, {Name: "leader", Value: s.GetLeaderHint()}, {Name: "replicas", Value: replicas},
					{Name: "epoch", Value: s.GetEpoch(), Wide: true},
					{Name: "birth", Value: strconv.FormatUint(s.GetBirth(), 16), Wide: true}}); err != nil {
					return err
				}
			}
			return out.End()
		},
	}
}

func shardArg(text string) (uint64, error) {
	id, err := strconv.ParseUint(strings.TrimPrefix(text, "S"), 10, 64)
	if err != nil || id == 0 {
		return 0, usage(fmt.Errorf("%q is not the id of a shard", text))
	}
	return id, nil
}

func (a *app) shardTransfer() *cobra.Command {
	var to string
	c := &cobra.Command{
		Use: "transfer ID --to NODE", Short: "Move a shard's leadership to a node", Args: cobra.ExactArgs(1),
		Example: "  keelctl shard transfer 2 --to n3", ValidArgsFunction: a.completeShards,
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := shardArg(args[0])
			if err != nil {
				return err
			}
			if to == "" {
				return usage(fmt.Errorf("--to: name the node"))
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			var resp *keelstatepb.TransferLeaderResponse
			err = a.call(ctx, false, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
				resp, err = keelstatepb.NewAdminClient(conn).TransferLeader(ctx, &keelstatepb.TransferLeaderRequest{Shard: id, To: to})
				return err
			})
			var e *keel.Error
			if errors.As(err, &e) && errors.Is(err, keel.ErrInvalid) {
				// A node that cannot lead the shard was not made to by an earlier
				// attempt without an answer either.
				e.Outcome = keel.OutcomeNotApplied
			}
			if err != nil {
				return err
			}
			return a.printDone("Transfer", record{{Name: "shard", Value: id}, {Name: "leader", Value: resp.GetLeader()}})
		},
	}
	c.Flags().StringVar(&to, "to", "", "the node that is to lead")
	a.completeFlag(c, "to", a.completeReplicas)
	return c
}

func (a *app) shardHash() *cobra.Command {
	return a.onShards("hash", "Compare the content of the replicas of one shard or of all; exit 6 if they differ", a.hash)
}

func (a *app) shardScrub() *cobra.Command {
	return a.onShards("scrub", "Read and check all files of the replicas of one shard or of all; exit 6 if damage is found", a.scrub)
}

// onShards is a command on one shard, or on all if none is named.
func (a *app) onShards(verb, short string, do func(context.Context, []uint64) error) *cobra.Command {
	return &cobra.Command{
		Use: verb + " [ID]", Short: short,
		Args:              cobra.MaximumNArgs(1),
		Example:           "  keelctl shard " + verb + "\n  keelctl shard " + verb + " 2 -o json",
		ValidArgsFunction: a.completeShards,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			var ids []uint64
			if len(args) == 1 {
				id, err := shardArg(args[0])
				if err != nil {
					return err
				}
				ids = append(ids, id)
			} else {
				t, err := a.topology(ctx)
				if err != nil {
					return err
				}
				for _, s := range t.GetShards() {
					ids = append(ids, s.GetId())
				}
			}
			return do(ctx, ids)
		},
	}
}

// scrub prints a line per replica. What is found is told in the line, and the
// cluster mends it by itself.
func (a *app) scrub(ctx context.Context, ids []uint64) error {
	out := a.list("ReplicaScrub", "shard", "node", "replica", "bytes", "seconds", "findings", "error")
	var dirty []string
	for _, id := range ids {
		var resp *keelstatepb.ScrubShardResponse
		err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
			resp, err = keelstatepb.NewAdminClient(conn).ScrubShard(ctx, &keelstatepb.ScrubShardRequest{Shard: id})
			return err
		}, slowCall)
		if err != nil {
			return err
		}
		if !resp.GetClean() {
			dirty = append(dirty, strconv.FormatUint(id, 10))
		}
		for _, r := range resp.GetReplicas() {
			findings := []string{}
			for _, f := range r.GetFindings() {
				findings = append(findings, f.GetPart()+": "+f.GetDetail())
			}
			if err := out.Add(record{{Name: "shard", Value: id}, {Name: "node", Value: r.GetNode()}, {Name: "replica", Value: r.GetReplica()},
				{Name: "bytes", Value: r.GetBytes()}, {Name: "seconds", Value: float64(r.GetMicros()) / 1e6},
				{Name: "findings", Value: findings}, {Name: "error", Value: r.GetError()}}); err != nil {
				return err
			}
		}
	}
	if err := out.End(); err != nil {
		return err
	}
	if len(dirty) > 0 {
		return &unhealthy{"replicas are damaged, or could not read everything, in shard " + strings.Join(dirty, ", ")}
	}
	return nil
}

func (a *app) hash(ctx context.Context, ids []uint64) error {
	out := a.list("ReplicaHash", "shard", "node", "index", "content", "agree")
	var differ []string
	for _, id := range ids {
		var resp *keelstatepb.HashShardResponse
		err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
			resp, err = keelstatepb.NewAdminClient(conn).HashShard(ctx, &keelstatepb.HashShardRequest{Shard: id})
			return err
		}, slowCall)
		if err != nil {
			return err
		}
		if !resp.GetAgree() {
			differ = append(differ, strconv.FormatUint(id, 10))
		}
		for _, r := range resp.GetReplicas() {
			if err := out.Add(record{{Name: "shard", Value: id}, {Name: "node", Value: r.GetNode()}, {Name: "index", Value: r.GetIndex()},
				{Name: "content", Value: hex.EncodeToString(r.GetContentHash())},
				{Name: "ops", Value: hex.EncodeToString(r.GetOpHash()), Wide: true},
				{Name: "clockMs", Value: r.GetClockMs(), Wide: true},
				{Name: "agree", Value: resp.GetAgree()}, {Name: "error", Value: r.GetError()}}); err != nil {
				return err
			}
		}
	}
	if err := out.End(); err != nil {
		return err
	}
	if len(differ) > 0 {
		return &unhealthy{"replicas do not agree, or did not all answer, in shard " + strings.Join(differ, ", ")}
	}
	return nil
}

// shardJob is a command on one shard.
func (a *app) shardJob(verb, short, kind string, do func(context.Context, uint64) (record, error)) *cobra.Command {
	return &cobra.Command{
		Use: verb + " ID", Short: short, Args: cobra.ExactArgs(1),
		Example: "  keelctl shard " + verb + " 2", ValidArgsFunction: a.completeShards,
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := shardArg(args[0])
			if err != nil {
				return err
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			r, err := do(ctx, id)
			if err != nil {
				return err
			}
			return a.printDone(kind, r)
		},
	}
}

func (a *app) snapshot(ctx context.Context, id uint64) (record, error) {
	var resp *keelstatepb.SnapshotShardResponse
	err := a.call(ctx, false, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewAdminClient(conn).SnapshotShard(ctx, &keelstatepb.SnapshotShardRequest{Shard: id})
		return err
	}, slowCall)
	return record{{Name: "shard", Value: id}, {Name: "index", Value: resp.GetIndex()}, {Name: "bytes", Value: resp.GetBytes()}}, err
}

func (a *app) compact(ctx context.Context, id uint64) (record, error) {
	var resp *keelstatepb.CompactShardResponse
	err := a.call(ctx, false, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewAdminClient(conn).CompactShard(ctx, &keelstatepb.CompactShardRequest{Shard: id})
		return err
	}, slowCall)
	return record{{Name: "shard", Value: id}, {Name: "bytesBefore", Value: resp.GetBytesBefore()}, {Name: "bytesAfter", Value: resp.GetBytesAfter()}}, err
}
