package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// The phases that end an operation of any kind.
const (
	phaseDone   = "done"
	phaseFailed = "failed"
)

func (a *app) operationCommand() *cobra.Command {
	c := &cobra.Command{Use: "operation", Short: "Inspect and follow long operations", Example: "  keelctl operation list"}
	c.AddCommand(a.operationList(), a.operationShow(), a.operationWatch())
	return c
}

func (a *app) operationList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the operations of the cluster", Args: cobra.NoArgs, Example: "  keelctl operation list -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			operations, err := a.operations(ctx)
			if err != nil {
				return err
			}
			out := a.list("Operation", "id", "operation", "phase", "done", "error")
			for _, o := range operations {
				if err := out.Add(operationRecord(o)); err != nil {
					return err
				}
			}
			return out.End()
		},
	}
}

func (a *app) operationShow() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one operation", Args: cobra.ExactArgs(1),
		Example:           "  keelctl operation show 1\n  keelctl operation show 1 -o json --columns phase,error",
		ValidArgsFunction: a.completeOperations,
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := operationArg(args[0])
			if err != nil {
				return err
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			o, err := a.operation(ctx, id)
			if err != nil {
				return err
			}
			return a.printOne("Operation", operationRecord(o))
		},
	}
}

func (a *app) operationWatch() *cobra.Command {
	var wait time.Duration
	c := &cobra.Command{
		Use: "watch ID", Short: "Follow an operation until it has ended; exit 6 if it failed or is not done in time",
		Long: `watch follows an operation, whoever started it, until it has ended: its phases and
what it waits for go to stderr, and the operation as it is at the end to stdout.
Ending watch does not end the operation.`,
		Args:              cobra.ExactArgs(1),
		Example:           "  keelctl operation watch 1\n  keelctl operation watch 1 --wait 2m --quiet -o json",
		ValidArgsFunction: a.completeOperations,
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := operationArg(args[0])
			if err != nil {
				return err
			}
			first := a.timeout
			if !a.given(cmd, "timeout") {
				a.timeout = 0
			}
			a.boundBy(cmd, wait)
			return a.watch(cmd.Context(), id, first)
		},
	}
	c.Flags().DurationVar(&wait, "wait", 0, "the longest time to wait, 0 for as long as it takes or a --timeout that is given")
	return c
}

// watch follows an operation. first bounds the first look, so that an unbounded
// wait for a cluster that cannot be reached at all is none.
func (a *app) watch(ctx context.Context, id string, first time.Duration) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	look, done := ctx, context.CancelFunc(func() {})
	if first > 0 {
		look, done = context.WithTimeout(ctx, first)
	}
	o, err := a.operation(look, id)
	done()
	if err != nil {
		return err
	}
	f := follower[*keelstatepb.Operation]{app: a, name: "operation " + id, line: progress, ended: (*keelstatepb.Operation).GetDone,
		meter: func(o *keelstatepb.Operation) meter { return fetchMeter(o.GetFetches()) },
		look: func(ctx context.Context, o *keelstatepb.Operation) (*keelstatepb.Operation, error) {
			return a.operation(ctx, id)
		}}
	last, err := f.follow(ctx, o)
	if err != nil {
		return err
	}
	if err := a.printOne("Operation", operationRecord(last)); err != nil {
		return err
	}
	switch {
	case !last.GetDone():
		return &unhealthy{fmt.Sprintf("the operation goes on; the same command follows it: %s", progress(last))}
	case last.GetPhase() == phaseFailed:
		return &unhealthy{progress(last)}
	}
	return nil
}

// progress is an operation in one line.
func progress(o *keelstatepb.Operation) string {
	line := fmt.Sprintf("operation %s (%s): %s", o.GetId(), o.GetKind(), o.GetPhase())
	if o.GetError() != "" {
		line += ": " + o.GetError()
	}
	if all := o.GetStuck(); len(all) > 0 {
		line += ": " + stuckText(all[0])
	}
	return line
}

// stuckText is what holds a restore up, and what to do about it.
func stuckText(s *keelstatepb.StuckRestore) string {
	return fmt.Sprintf("the restore is stuck: something of the checkpoint is %s (node %s: %s). Put the object back as it was, under the same name; the nodes go on trying",
		s.GetFault(), s.GetNode(), s.GetDetail())
}

func stuckRecords(all []*keelstatepb.StuckRestore) []record {
	out := []record{}
	for _, s := range all {
		out = append(out, record{{Name: "shard", Value: s.GetShard()}, {Name: "node", Value: s.GetNode()}, {Name: "fault", Value: s.GetFault()}, {Name: "detail", Value: s.GetDetail()}})
	}
	return out
}

// operations asks for all operations of the cluster.
func (a *app) operations(ctx context.Context) ([]*keelstatepb.Operation, error) {
	var resp *keelstatepb.ListOperationsResponse
	err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewAdminClient(conn).ListOperations(ctx, &keelstatepb.ListOperationsRequest{})
		return err
	})
	return resp.GetOperations(), err
}

// operation asks for one.
func (a *app) operation(ctx context.Context, id string) (*keelstatepb.Operation, error) {
	all, err := a.operations(ctx)
	if err != nil {
		return nil, err
	}
	for _, o := range all {
		if o.GetId() == id {
			return o, nil
		}
	}
	return nil, keel.NewError(keel.ErrNotFound, keel.OutcomeNotApplied, "operation "+id, "list the operations with: keelctl operation list")
}

// operationArg reads the id of an operation, a number.
func operationArg(text string) (string, error) {
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil || id == 0 {
		return "", usage(fmt.Errorf("%q is not the id of an operation", text))
	}
	return strconv.FormatUint(id, 10), nil
}

func operationRecord(o *keelstatepb.Operation) record {
	return append(record{{Name: "id", Value: o.GetId()}, {Name: "operation", Value: o.GetKind()},
		{Name: "phase", Value: o.GetPhase()}, {Name: "done", Value: o.GetDone()}, {Name: "error", Value: o.GetError()},
		{Name: "startedMs", Value: o.GetStartedMs(), Wide: true}, {Name: "updatedMs", Value: o.GetUpdatedMs(), Wide: true},
		{Name: "stuck", Value: stuckRecords(o.GetStuck()), Wide: true}}, fetchFields(o.GetFetches())...)
}

// fetchFields are how many bytes an operation has replicas bring here, and how many of
// them have come; null where it has them bring none.
func fetchFields(all []*keelstatepb.ShardFetch) []field {
	if len(all) == 0 {
		return []field{{Name: "fetchBytes", Wide: true}, {Name: "fetchedBytes", Wide: true}, {Name: "fetches", Wide: true}}
	}
	m, shards := fetchMeter(all), []record{}
	for _, f := range all {
		shards = append(shards, record{{Name: "shard", Value: f.GetShard()}, {Name: "fetchBytes", Value: f.GetDueBytes()}, {Name: "fetchedBytes", Value: f.GetHereBytes()}})
	}
	return []field{{Name: "fetchBytes", Value: m.of, Wide: true}, {Name: "fetchedBytes", Value: m.done, Wide: true}, {Name: "fetches", Value: shards, Wide: true}}
}
