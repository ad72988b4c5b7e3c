//go:build linux

package nemesis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/keelstate/keelstate/jepsen/host"
)

func otherFaults(e *Env) []*fault {
	var clockLacks error
	if e.Clock == nil {
		clockLacks = errors.New("the nodes have no control of their clocks")
	}
	return []*fault{
		{name: "cpu-one", kind: KindCPU, inject: e.starve(always(e.one)), lacks: e.groupLacks(host.CapCPU)},
		{name: "cpu-leader", kind: KindCPU, inject: e.starve(e.leader), lacks: e.groupLacks(host.CapCPU)},
		{name: "cpu-all", kind: KindCPU, halts: true, inject: e.starve(always(e.all)), lacks: e.groupLacks(host.CapCPU)},
		{name: "out-of-memory", kind: KindMemory, inject: e.outOfMemory, lacks: e.groupLacks(host.CapMemory)},
		{name: "transfer", kind: KindTransfer, inject: e.transfer},
		{name: "clock-step", kind: KindClock, inject: e.clockStep, lacks: clockLacks},
		{name: "clock-drift", kind: KindClock, inject: e.clockDrift, lacks: clockLacks},
	}
}

func (e *Env) starve(choose chooser) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
		nodes, err := choose(ctx, rnd)
		if err != nil {
			return nil, err
		}
		percent := []int{2, 5, 20}[rnd.IntN(3)]
		return inject(nodes, fmt.Sprintf("%d %% of a CPU for %s", percent, list(names(nodes))),
			func(n *host.Node) error { return n.Group.LimitCPU(percent) }, func(n *host.Node) error { return n.Group.LimitCPU(0) })
	}
}

// outOfMemory gives a node so little memory that the kernel kills it, if it uses
// more than it has now.
func (e *Env) outOfMemory(_ context.Context, rnd *rand.Rand) (*Injection, error) {
	nodes := e.one(rnd)
	limit := int64(32+rnd.IntN(64)) << 20
	return e.thenUp(inject(nodes, fmt.Sprintf("%d MiB of memory for %s", limit>>20, nodes[0].ID), func(n *host.Node) error {
		// A limit below what is in use is refused if nothing can be given back.
		if err := n.Group.LimitMemory(limit); err != nil {
			return fmt.Errorf("%w: %w", ErrNotNow, err)
		}
		return nil
	}, func(n *host.Node) error { return n.Group.LimitMemory(0) }))
}

// transfer moves the leadership of a shard. There is nothing to heal.
func (e *Env) transfer(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
	leaders, err := e.Fleet.Leaders(ctx)
	if err != nil || len(leaders) == 0 {
		return nil, fmt.Errorf("no leader is known: %w", errors.Join(err, ErrNotNow))
	}
	var shards []int
	for shard := range leaders {
		shards = append(shards, shard)
	}
	slices.Sort(shards)
	shard := shards[rnd.IntN(len(shards))]
	others := slices.DeleteFunc(names(e.all(rnd)), func(id string) bool { return id == leaders[shard] })
	if len(others) == 0 {
		return nil, fmt.Errorf("there is nobody to lead but %s: %w", leaders[shard], ErrNotNow)
	}
	outcome, idle := "done", false
	if _, err := e.Fleet.Ctl(ctx, "shard", "transfer", strconv.Itoa(shard), "--to", others[0], "--timeout", "5s"); err != nil {
		// Under other faults this is nothing special.
		outcome, idle = "it failed: "+err.Error(), true
	}
	in := newInjection([]string{leaders[shard], others[0]},
		fmt.Sprintf("transfer of shard %d from %s to %s: %s", shard, leaders[shard], others[0], outcome),
		func(context.Context) error { return nil })
	in.Idle = idle
	return in, nil
}

// committedWithout asks for hashes of all replicas, for which every shard commits
// an entry, and checks that a majority of each shard's replicas answered alike
// without one node, which is down. A shard that has no leader, or is not told of,
// has not. The system group has to commit an entry, too.
func (e *Env) committedWithout(ctx context.Context, down *host.Node, limit time.Duration) error {
	shards, err := e.Fleet.Shards(ctx)
	if err != nil {
		return err
	}
	// Its error tells of the node that is down.
	hashes, hashErr := e.Fleet.Hashes(ctx, host.AllShards, limit)
	if len(shards) == 0 || len(hashes) == 0 {
		return errors.Join(errors.New("no replica answers"), hashErr)
	}
	if err := agreeWithout(down.ID, shards, hashes); err != nil {
		return err
	}
	return e.commitMetadata(ctx, limit)
}

// commitMetadata makes the system group commit an entry: a command that writes
// opens a session, which is one.
func (e *Env) commitMetadata(ctx context.Context, limit time.Duration) error {
	const keyspace, name = "jepsen-proof", "proof"
	for _, args := range [][]string{
		{"state", "declare", keyspace, name, "--kind", "value", "--key-type", "string", "--value-type", "int64"},
		{"value", "set", keyspace, name, "1", "--key", "k"},
	} {
		if _, err := e.Fleet.Ctl(ctx, append(args, "--timeout", limit.String())...); err != nil {
			return fmt.Errorf("committing an entry of the system group: %w", err)
		}
	}
	return nil
}

// agreeWithout says which shard has no majority of replicas that agree at one
// index without a node.
func agreeWithout(down string, shards []host.Shard, hashes []host.ReplicaHash) error {
	agree := make(map[int]map[string]int)
	for _, h := range hashes {
		if h.Node == down {
			continue
		}
		if agree[h.Shard] == nil {
			agree[h.Shard] = make(map[string]int)
		}
		agree[h.Shard][fmt.Sprint(h.Index, h.Content, h.Ops)]++
	}
	for _, s := range shards {
		best := 0
		for _, count := range agree[s.ID] {
			best = max(best, count)
		}
		if best <= len(s.Replicas)/2 {
			return fmt.Errorf("shard %d: only %d of %d replicas agree without %s", s.ID, best, len(s.Replicas), down)
		}
	}
	return nil
}

func (e *Env) clockStep(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
	offset := []time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second, time.Minute, time.Hour, 24 * time.Hour,
		10 * 365 * 24 * time.Hour}[rnd.IntN(7)]
	if rnd.IntN(2) == 0 {
		offset = -offset
	}
	return e.clocks(ctx, rnd, fmt.Sprintf("the clock jumps by %s", offset), offset, 0)
}

func (e *Env) clockDrift(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
	ppm := []int64{1000, 10_000, 100_000, 500_000}[rnd.IntN(4)]
	if rnd.IntN(2) == 0 {
		ppm = -ppm
	}
	return e.clocks(ctx, rnd, fmt.Sprintf("the clock drifts by %d parts per million", ppm), 0, ppm)
}

func (e *Env) clocks(ctx context.Context, rnd *rand.Rand, what string, offset time.Duration, ppm int64) (*Injection, error) {
	nodes := e.some(rnd)
	if rnd.IntN(4) == 0 {
		nodes = e.all(rnd)
	}
	return inject(nodes, what+" on "+list(names(nodes)), func(n *host.Node) error { return e.Clock.Set(ctx, n, offset, ppm) },
		func(n *host.Node) error {
			if !n.Running() {
				return nil // it has the true clock when it starts
			}
			return e.Clock.Set(healContext(ctx), n, 0, 0)
		})
}
