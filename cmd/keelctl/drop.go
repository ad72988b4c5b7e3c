package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	keel "github.com/keelstate/keelstate/client"
)

// A plan looks at a state only this far, and for as long as it has patience: it must
// not take as long as a scan, and must not keep a state from being dropped whose
// shards do not answer.
const planKeys = 1000

// dropPlan is what a drop would take away.
type dropPlan struct {
	decl    keel.Declaration
	shards  int
	keys    int  // counted, up to planKeys
	more    bool // there are more than those
	counted bool // false where a shard did not answer in time
}

func (a *app) stateDrop() *cobra.Command {
	var yes, dry bool
	c := &cobra.Command{
		Use: "drop KEYSPACE NAME --yes", Short: "Drop a state and all that it holds", Args: cobra.ExactArgs(2),
		Long: `drop says what it will take away, asks for the name of the state on a terminal, and
drops it. The state is gone at once, and its space is given back in the background.
Nothing brings it back.`,
		Example:           "  keelctl state drop flights last --dry-run\n  keelctl state drop flights last --yes",
		ValidArgsFunction: a.completeStates,
		RunE: func(cmd *cobra.Command, args []string) error {
			plan, err := a.planDrop(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			if dry {
				return a.printOne("DropPlan", plan.record())
			}
			a.prose("%s", plan)
			name := args[0] + "/" + args[1]
			if err := a.confirm(yes, "dropping "+name+" and all that it holds", name); err != nil {
				return err
			}
			ctx, cancel := a.bounded(cmd.Context()) // its own: whoever was asked may have thought for long
			defer cancel()
			if err := a.client.Drop(ctx, args[0], args[1]); err != nil {
				return err
			}
			return a.printDone("Dropped", plan.record())
		},
	}
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	c.Flags().BoolVar(&dry, "dry-run", false, "print what would be dropped, and drop nothing")
	c.MarkFlagsMutuallyExclusive("yes", "dry-run")
	return c
}

// planDrop finds the state and looks how much it holds. It changes nothing.
func (a *app) planDrop(ctx context.Context, keyspace, name string) (*dropPlan, error) {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	t := &target{app: a}
	if err := t.open(ctx, keyspace, name, verb{keyless: true}); err != nil {
		return nil, err
	}
	topo, err := a.topology(ctx)
	if err != nil {
		return nil, err
	}
	p := &dropPlan{decl: t.decl, shards: len(topo.GetShards())}
	look, done := context.WithTimeout(ctx, a.asideFor())
	defer done()
	s, err := t.openAny(look)
	if err != nil {
		return p, nil // not counted, which is no reason to keep the state
	}
	for _, err := range s.ListKeys(look, t.scanOptions(planKeys+1)) {
		if err != nil {
			return p, nil // not counted, which is no reason to keep the state
		}
		if p.more = p.keys == planKeys; p.more {
			break
		}
		p.keys++
	}
	p.counted = true
	return p, nil
}

func (p *dropPlan) record() record {
	keys, more := any(nil), any(nil)
	if p.counted {
		keys, more = p.keys, p.more
	}
	return record{{Name: "keyspace", Value: p.decl.Keyspace}, {Name: "name", Value: p.decl.Name}, {Name: "id", Value: p.decl.ID},
		{Name: "stateKind", Value: string(p.decl.Kind)}, {Name: "shards", Value: p.shards}, {Name: "keys", Value: keys}, {Name: "more", Value: more}}
}

// String is the plan in one line.
func (p *dropPlan) String() string {
	holds := fmt.Sprintf("%d keys", p.keys)
	switch {
	case !p.counted:
		holds = "an unknown number of keys, since not every shard answers,"
	case p.more:
		holds = fmt.Sprintf("more than %d keys", p.keys)
	case p.keys == 1:
		holds = "1 key"
	}
	return fmt.Sprintf("plan: drop state %d, %s/%s (%s), which holds %s in %d shards; its space is given back in the background",
		p.decl.ID, p.decl.Keyspace, p.decl.Name, p.decl.Kind, holds, p.shards)
}
