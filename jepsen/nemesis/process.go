//go:build linux

package nemesis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/keelstate/keelstate/jepsen/host"
)

// chooser draws the nodes that a fault hits.
type chooser func(context.Context, *rand.Rand) ([]*host.Node, error)

func always(draw func(*rand.Rand) []*host.Node) chooser {
	return func(_ context.Context, rnd *rand.Rand) ([]*host.Node, error) { return draw(rnd), nil }
}

func processFaults(e *Env) []*fault {
	one, some, all := always(e.one), always(e.some), always(e.all)
	frozen := &fault{name: "freeze-one", kind: KindPause, inject: e.freeze(one), lacks: e.groupLacks(host.CapFreezer)}
	return []*fault{
		{name: "kill-one", kind: KindKill, inject: e.kill(one)},
		{name: "kill-leader", kind: KindKill, inject: e.kill(e.leader)},
		{name: "kill-minority", kind: KindKill, inject: e.kill(some)},
		{name: "kill-all", kind: KindKill, halts: true, inject: e.kill(all)},
		{name: "restart-one", kind: KindRestart, inject: e.restart(one)},
		{name: "restart-minority", kind: KindRestart, inject: e.restart(some)},
		{name: "restart-all", kind: KindRestart, halts: true, inject: e.restart(all)},
		{name: "pause-one", kind: KindPause, inject: e.pause(one)},
		{name: "pause-leader", kind: KindPause, inject: e.pause(e.leader)},
		{name: "pause-minority", kind: KindPause, inject: e.pause(some)},
		{name: "pause-all", kind: KindPause, halts: true, inject: e.pause(all)},
		frozen,
	}
}

func (e *Env) kill(choose chooser) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
		nodes, err := choose(ctx, rnd)
		if err != nil {
			return nil, err
		}
		release := e.holdDown(nodes)
		var failed error
		for _, n := range nodes {
			failed = errors.Join(failed, n.Kill())
		}
		if failed != nil {
			return nil, errors.Join(failed, release())
		}
		return newInjection(names(nodes), "kill -9 of "+strings.Join(names(nodes), ", "),
			func(context.Context) error { return release() }), nil
	}
}

// restart stops nodes gracefully, one after the other; healing starts them.
func (e *Env) restart(choose chooser) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
		nodes, err := choose(ctx, rnd)
		if err != nil {
			return nil, err
		}
		release := e.holdDown(nodes)
		var killed []string
		var failed error
		for _, n := range nodes {
			ended, err := e.stop(ctx, n)
			failed = errors.Join(failed, err)
			if !ended {
				killed = append(killed, n.ID)
			}
		}
		if failed != nil {
			return nil, errors.Join(failed, release())
		}
		what := "SIGTERM to " + strings.Join(names(nodes), ", ")
		if len(killed) > 0 {
			what += "; killed after " + e.StopLimit.String() + ": " + strings.Join(killed, ", ")
		}
		return newInjection(names(nodes), what, func(context.Context) error { return release() }), nil
	}
}

// stop stops a node gracefully, or else kills it, and says which.
func (e *Env) stop(ctx context.Context, n *host.Node) (graceful bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.StopLimit)
	defer cancel()
	if _, err := n.Stop(ctx); err == nil {
		return true, nil
	}
	return false, n.Kill()
}

func (e *Env) pause(choose chooser) func(context.Context, *rand.Rand) (*Injection, error) {
	return e.each(choose, "SIGSTOP of", (*host.Node).Pause, (*host.Node).Resume)
}

func (e *Env) freeze(choose chooser) func(context.Context, *rand.Rand) (*Injection, error) {
	return e.each(choose, "freezing the control group of",
		func(n *host.Node) error { return n.Group.Freeze(true) }, func(n *host.Node) error { return n.Group.Freeze(false) })
}

// each does something to every chosen node, and undoes it.
func (e *Env) each(choose chooser, what string, do, undo func(*host.Node) error) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
		nodes, err := choose(ctx, rnd)
		if err != nil {
			return nil, err
		}
		return inject(nodes, fmt.Sprintf("%s %s", what, strings.Join(names(nodes), ", ")), do, undo)
	}
}

// inject does something to nodes; if it fails for one it is undone for all.
func inject(nodes []*host.Node, description string, do, undo func(*host.Node) error) (*Injection, error) {
	heal := func(context.Context) error {
		var failed error
		for _, n := range nodes {
			failed = errors.Join(failed, undo(n))
		}
		return failed
	}
	for _, n := range nodes {
		if err := do(n); err != nil {
			return nil, errors.Join(err, heal(context.Background()))
		}
	}
	return newInjection(names(nodes), description, heal), nil
}

// groupLacks says why something of control groups is not possible.
func (e *Env) groupLacks(needs ...host.Capability) error {
	for _, n := range e.Fleet.Nodes {
		if n.Group == nil {
			return errors.New("the fleet was started without control groups")
		}
	}
	return e.Fleet.Caps.Lacks(needs...)
}
