package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

func (a *app) clusterInit() *cobra.Command {
	var nodes []string
	var req keelstatepb.InitClusterRequest
	var wait time.Duration
	c := &cobra.Command{
		Use:   "init --nodes ID=RAFT-ADDRESS,...",
		Short: "Found the cluster of exactly these nodes",
		Long: `init founds the cluster on the node called and admits exactly the nodes listed.
The same init again resumes or shows the founding; another list is refused.

With --restore the cluster begins with a checkpoint that lies in the object store of
the nodes, of whatever cluster and size. Every object of it is looked at before
anything is done. The number of key groups is the checkpoint's. The checkpoint stays
as it is, and is needed until the cluster is founded; with --claim the new cluster
deletes it later. Claim only what no living cluster makes further checkpoints from.`,
		Example: `  keelctl cluster init --nodes n1=127.0.0.1:7411,n2=127.0.0.1:7412,n3=127.0.0.1:7413
  keelctl cluster init --nodes n1=10.0.0.1:7411 --shards 4 --wait=2m -o json
  keelctl cluster init --nodes n1=10.0.0.1:7411 --restore s3://bucket/keel/5c0e.../checkpoints/0000000007 --dry-run`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, n := range nodes {
				id, address, ok := strings.Cut(n, "=")
				if !ok || id == "" || address == "" {
					return usage(fmt.Errorf("--nodes: %q is not ID=RAFT-ADDRESS", n))
				}
				req.Nodes = append(req.Nodes, &keelstatepb.InitNode{Id: id, RaftAddress: address})
			}
			if len(req.Nodes) == 0 {
				return usage(fmt.Errorf("--nodes: list every node as ID=RAFT-ADDRESS"))
			}
			if cmd.Flags().Changed("restore") && req.GetRestore() == "" {
				return usage(fmt.Errorf("--restore: name the checkpoint; to found an empty cluster, leave it out"))
			}
			a.boundBy(cmd, wait)
			if req.GetDryRun() {
				return a.planInit(cmd.Context(), &req)
			}
			return a.initCluster(cmd.Context(), &req)
		},
	}
	f := c.Flags()
	f.StringSliceVar(&nodes, "nodes", nil, "every node of the cluster, ID=RAFT-ADDRESS")
	f.Uint32Var(&req.KeyGroups, "key-groups", 0, "number of key groups for ever, 0 for 128")
	f.Uint32Var(&req.Shards, "shards", 0, "number of shards, 0 for 4/3 of the nodes")
	f.Uint32Var(&req.Replication, "replication", 0, "replicas per shard, 0 for 3 or the number of nodes")
	f.StringVar(&req.Restore, "restore", "", "checkpoint to begin with: its uri as keelctl checkpoint show prints it, CLUSTER/NUMBER, or CLUSTER/latest")
	f.BoolVar(&req.Claim, "claim", false, "the checkpoint is the new cluster's: it deletes it once a checkpoint of its own has completed")
	f.BoolVar(&req.DryRun, "dry-run", false, "print what --restore would do, and do nothing")
	f.DurationVar(&wait, "wait", time.Minute, "the longest time to wait until the cluster serves, 0 for --timeout")
	return c
}

// planInit prints what a restore would do.
func (a *app) planInit(ctx context.Context, req *keelstatepb.InitClusterRequest) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	var p *keelstatepb.RestorePlan
	for {
		step, done := context.WithTimeout(ctx, longStep)
		err := a.call(step, true, func(ctx context.Context, conn grpc.ClientConnInterface) error {
			resp, err := keelstatepb.NewAdminClient(conn).InitCluster(ctx, req)
			p = resp.GetPlan()
			return err
		}, keel.AttemptTimeout(foundAttempt))
		done()
		if err == nil {
			break
		}
		if ctx.Err() != nil || !askAgain(err) {
			return err
		}
		select { // the node looks at the checkpoint still
		case <-ctx.Done():
		case <-time.After(statusPause):
		}
	}
	shards := []record{}
	for _, s := range p.GetShards() {
		sources := []record{}
		for _, f := range s.GetSources() {
			sources = append(sources, record{{Name: "shard", Value: f.GetShard()}, {Name: "lo", Value: f.GetRange().GetLo()}, {Name: "hi", Value: f.GetRange().GetHi()},
				{Name: "bytes", Value: f.GetBytes()}, {Name: "how", Value: f.GetHow()}})
		}
		shards = append(shards, record{{Name: "shard", Value: s.GetShard()}, {Name: "lo", Value: s.GetRange().GetLo()}, {Name: "hi", Value: s.GetRange().GetHi()},
			{Name: "nodes", Value: s.GetNodes()}, {Name: "fetchBytes", Value: s.GetFetchBytes()}, {Name: "sources", Value: sources}})
	}
	return a.printOne("RestorePlan", record{{Name: "checkpoint", Value: p.GetCheckpoint()}, {Name: "from", Value: p.GetClusterId()}, {Name: "number", Value: p.GetNumber()},
		{Name: "created", Value: time.UnixMilli(int64(p.GetCreatedMs())).UTC().Format(time.RFC3339)}, {Name: "keyGroups", Value: p.GetKeyGroups()},
		{Name: "engine", Value: p.GetEngine()}, {Name: "incarnation", Value: p.GetIncarnation()}, {Name: "objects", Value: p.GetObjects()},
		{Name: "bytes", Value: p.GetBytes()}, {Name: "fetchBytes", Value: p.GetFetchBytes()}, {Name: "shards", Value: shards}})
}

// How long one step of an init takes. A node keeps an init nearly for as long as
// it is given, so steps are short, to tell of progress, where the founding has
// been seen. Where it has not, the node called waits for the founder and says
// after a while that it cannot reach it: an attempt must be longer than that (ten
// seconds).
const (
	shortStep    = 2 * time.Second
	longStep     = 15 * time.Second
	foundAttempt = 12 * time.Second
	leastStep    = 100 * time.Millisecond
)

// foundOperation is the kind of the operation that founds a cluster.
const foundOperation = "found"

// founding is an init that is under way, and what is known of it.
type founding struct {
	app *app
	req *keelstatepb.InitClusterRequest
	bar *bar

	cluster, operation string
	phase              string // empty while nothing is known
	problem            string // what the phase waits for
	fetches            []*keelstatepb.ShardFetch
	began              time.Time
	stuck              []*keelstatepb.StuckRestore // since this command began
	resumed            any                         // nil while no node has answered the init itself
	asked              bool
	unknown            bool   // an attempt may have begun to found
	hint               string // the newest that an error had
}

func (a *app) initCluster(ctx context.Context, req *keelstatepb.InitClusterRequest) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	f := &founding{app: a, req: req, bar: a.bar(), began: time.Now()}
	defer f.bar.end()
	for {
		err := f.ask(ctx)
		if err != nil && (ctx.Err() == nil && !askAgain(err) || ctx.Err() != nil && f.phase == "") {
			return f.failed(err)
		}
		if f.ended() || len(f.stuck) > 0 || ctx.Err() != nil {
			return f.report()
		}
		select {
		case <-ctx.Done():
		case <-time.After(statusPause):
		}
	}
}

// ask makes one attempt. A node answers it, done or not, before its time is over;
// where no answer came, the operation is looked at.
func (f *founding) ask(ctx context.Context) error {
	step, cancel := context.WithTimeout(ctx, f.step(ctx))
	defer cancel()
	f.asked = true
	var resp *keelstatepb.InitClusterResponse
	err := f.app.call(step, false, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewAdminClient(conn).InitCluster(ctx, f.req)
		return err
	}, keel.AttemptTimeout(foundAttempt))
	if err == nil {
		f.cluster, f.operation, f.resumed = resp.GetClusterId(), resp.GetOperationId(), resp.GetResumed()
		f.note(resp.GetPhase(), resp.GetProblem(), resp.GetFetches())
		// What was found before is not looked at: it may be mended by now.
		f.stuck = slices.DeleteFunc(resp.GetStuck(), func(s *keelstatepb.StuckRestore) bool {
			return s.GetAgeMs() >= uint64(time.Since(f.began).Milliseconds())
		})
		return nil
	}
	var e *keel.Error
	if errors.As(err, &e) {
		f.unknown = f.unknown || e.Outcome != keel.OutcomeNotApplied
		if e.Hint != "" {
			f.hint = e.Hint
		}
	}
	if askAgain(err) {
		f.look(ctx)
	}
	return err
}

// failed is the error of an init of which nothing better is known, with what
// all its attempts tell.
func (f *founding) failed(err error) error {
	var e *keel.Error
	if !errors.As(err, &e) {
		return err
	}
	out := *e
	if f.unknown {
		out.Outcome = keel.OutcomeUnknown
	}
	if out.Hint == "" {
		out.Hint = f.hint
	}
	return &out
}

// step is at most the half of the time that is left, so that there is time to
// look at what the first half did.
func (f *founding) step(ctx context.Context) time.Duration {
	step := longStep
	if !f.asked || f.phase != "" {
		step = shortStep
	}
	if end, has := ctx.Deadline(); has {
		step = min(step, max(time.Until(end)/2, leastStep))
	}
	return step
}

// askAgain says that an init that failed so may be asked for again.
func askAgain(err error) bool {
	var e *keel.Error
	return errors.As(err, &e) && (e.Retryable || errors.Is(e, keel.ErrDeadline) || errors.Is(e, keel.ErrOutcomeUnknown))
}

// look takes in how far the founding is, if a node of the cluster can be asked.
// That one is done it leaves to the init itself, which also compares the lists.
func (f *founding) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, shortStep)
	defer cancel()
	if t, err := f.app.topology(ctx); err == nil {
		f.cluster = t.GetClusterId()
	} else {
		return
	}
	operations, err := f.app.operations(ctx)
	if err != nil {
		return
	}
	for _, o := range operations {
		if o.GetKind() == foundOperation && !o.GetDone() {
			f.operation = o.GetId()
			f.note(o.GetPhase(), o.GetError(), o.GetFetches())
		}
	}
}

// note says on stderr what has changed.
func (f *founding) note(phase, problem string, fetches []*keelstatepb.ShardFetch) {
	f.phase, f.problem, f.fetches = phase, problem, fetches
	f.bar.say(fmt.Sprintf("founding %s: %s", f.operation, f.text()))
	f.bar.draw(fetchMeter(fetches))
}

func (f *founding) text() string {
	if f.problem == "" {
		return "phase " + f.phase
	}
	return "phase " + f.phase + ": " + f.problem
}

func (f *founding) ended() bool { return f.phase == phaseDone || f.phase == phaseFailed }

func (f *founding) report() error {
	f.bar.end()
	err := f.app.printDone("Founding", append(record{{Name: "cluster", Value: f.cluster}, {Name: "operation", Value: f.operation},
		{Name: "phase", Value: f.phase}, {Name: "problem", Value: f.problem}, {Name: "resumed", Value: f.resumed},
		{Name: "stuck", Value: stuckRecords(f.stuck), Wide: true}}, fetchFields(f.fetches)...))
	switch {
	case err != nil || f.phase == phaseDone:
		return err
	case f.phase == phaseFailed:
		return &unhealthy{"the founding failed: " + f.text()}
	case len(f.stuck) > 0:
		return &unhealthy{stuckText(f.stuck[0]) + ", and the same command follows them. To restore another checkpoint, stop the nodes and begin with empty data directories"}
	}
	return &unhealthy{fmt.Sprintf("the founding goes on (%s); the same command waits for it, and so does: keelctl operation watch %s", f.text(), f.operation)}
}
