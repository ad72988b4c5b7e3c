//go:build linux

package nemesis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/keelstate/keelstate/jepsen/host"
)

// cuts is a list of faults of the network that make up one of ours.
type cuts struct {
	net *host.Network
	mu  sync.Mutex
	ids []int
}

// between cuts two sets of hosts from each other.
func (c *cuts) between(a, b []string) error {
	return errors.Join(c.add(host.NetFault{From: a, To: b, Drop: 1}), c.add(host.NetFault{From: b, To: a, Drop: 1}))
}

func (c *cuts) add(f host.NetFault) error {
	if len(f.From) == 0 || len(f.To) == 0 {
		return nil
	}
	id, err := c.net.Inject(f)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ids = append(c.ids, id)
	return nil
}

// heal removes all of them, and those that fail again the next time.
func (c *cuts) heal() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var failed error
	c.ids = slices.DeleteFunc(c.ids, func(id int) bool {
		err := c.net.Remove(id)
		failed = errors.Join(failed, err)
		return err == nil
	})
	return failed
}

// shape makes the cuts of a partition among hosts in random order, the client
// being none of them, and says whom it hits and how.
type shape func(ctx context.Context, rnd *rand.Rand, c *cuts, nodes []string) (targets []string, description string, err error)

func networkFaults(e *Env) []*fault {
	var lacks, slowLacks, bandLacks error
	if e.Fleet.Net == nil {
		lacks = errors.New("the nodes are on loopback")
		slowLacks, bandLacks = lacks, lacks
	} else {
		slowLacks, bandLacks = e.Fleet.Caps.Lacks(host.CapTun), e.Fleet.Caps.Lacks(host.CapTC)
	}
	ringLacks := lacks
	if ringLacks == nil && len(e.Fleet.Nodes) < 5 {
		ringLacks = errors.New("it needs 5 nodes")
	}
	partition := func(name string, kind Kind, s shape) *fault {
		return &fault{name: name, kind: kind, inject: e.partition(s), lacks: lacks}
	}
	ring := partition("partition-ring", KindPartition, ringShape)
	ring.lacks = ringLacks
	return []*fault{
		partition("partition-one", KindPartition, isolateShape),
		partition("partition-leader", KindPartition, e.leaderShape(false)),
		partition("partition-leader-with-client", KindPartition, e.leaderShape(true)),
		partition("partition-halves", KindPartition, halvesShape),
		partition("partition-bridge", KindPartition, bridgeShape),
		partition("partition-all", KindPartition, scatterShape),
		ring,
		partition("one-way-in", KindOneWay, oneWayShape(false)),
		partition("one-way-out", KindOneWay, oneWayShape(true)),
		partition("partition-client", KindPartition, clientShape),
		{name: "flap", kind: KindFlap, inject: e.flap, lacks: lacks},
		{name: "swizzle", kind: KindFlap, inject: e.swizzle, lacks: lacks},
		{name: "loss", kind: KindLoss, lacks: lacks, inject: e.everywhere(func(rnd *rand.Rand, f *host.NetFault) string {
			f.Drop = []float64{0.01, 0.05, 0.2, 0.5}[rnd.IntN(4)]
			return fmt.Sprintf("loss of %g %%", 100*f.Drop)
		})},
		{name: "duplicate", kind: KindDuplicate, lacks: lacks, inject: e.everywhere(func(rnd *rand.Rand, f *host.NetFault) string {
			f.Duplicate = []float64{0.1, 0.5, 1}[rnd.IntN(3)]
			return fmt.Sprintf("%g %% of the packets twice", 100*f.Duplicate)
		})},
		{name: "delay", kind: KindDelay, lacks: slowLacks, inject: e.everywhere(func(rnd *rand.Rand, f *host.NetFault) string {
			f.Delay = []time.Duration{5, 50, 200, 1000}[rnd.IntN(4)] * time.Millisecond
			f.Jitter = f.Delay * time.Duration(rnd.IntN(3)) / 2
			return fmt.Sprintf("delay of %s and up to %s more", f.Delay, f.Jitter)
		})},
		{name: "reset", kind: KindReset, lacks: lacks, inject: e.everywhere(func(rnd *rand.Rand, f *host.NetFault) string {
			f.Reset = []float64{0.001, 0.02, 1}[rnd.IntN(3)]
			return fmt.Sprintf("reset of %g %% of the segments", 100*f.Reset)
		})},
		{name: "bandwidth", kind: KindBandwidth, inject: e.bandwidth, lacks: bandLacks},
	}
}

func (e *Env) partition(s shape) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
		c := &cuts{net: e.Fleet.Net}
		targets, description, err := s(ctx, rnd, c, names(e.all(rnd)))
		if err != nil {
			return nil, errors.Join(err, c.heal())
		}
		return newInjection(targets, description, func(context.Context) error { return c.heal() }), nil
	}
}

func list(hosts []string) string { return strings.Join(hosts, ", ") }

func isolateShape(_ context.Context, _ *rand.Rand, c *cuts, nodes []string) ([]string, string, error) {
	return nodes[:1], nodes[0] + " is cut from the other nodes", c.between(nodes[:1], nodes[1:])
}

func halvesShape(_ context.Context, _ *rand.Rand, c *cuts, nodes []string) ([]string, string, error) {
	a, b := nodes[:len(nodes)/2], nodes[len(nodes)/2:]
	return a, fmt.Sprintf("%s | %s", list(a), list(b)), c.between(a, b)
}

// bridgeShape: two halves that do not see each other, and one node that sees both.
func bridgeShape(_ context.Context, _ *rand.Rand, c *cuts, nodes []string) ([]string, string, error) {
	if len(nodes) < 3 {
		return nil, "", fmt.Errorf("a bridge needs 3 nodes: %w", ErrNotNow)
	}
	bridge, rest := nodes[:1], nodes[1:]
	a, b := rest[:len(rest)/2], rest[len(rest)/2:]
	return bridge, fmt.Sprintf("%s | %s | %s, with %s between", list(a), list(bridge), list(b), list(bridge)), c.between(a, b)
}

func scatterShape(_ context.Context, _ *rand.Rand, c *cuts, nodes []string) ([]string, string, error) {
	var failed error
	for i := range nodes {
		failed = errors.Join(failed, c.between(nodes[i:i+1], nodes[i+1:]))
	}
	return nodes, "no node sees another", failed
}

// ringSight is how far a node of a ring sees in either direction, so that with
// itself it sees a majority.
func ringSight(nodes int) int { return (nodes/2 + 1) / 2 }

// ringShape: every node sees a majority, and no two see the same.
func ringShape(_ context.Context, _ *rand.Rand, c *cuts, nodes []string) ([]string, string, error) {
	var failed error
	for i := range nodes {
		for j := i + 1; j < len(nodes); j++ {
			if apart := min(j-i, len(nodes)-j+i); apart > ringSight(len(nodes)) {
				failed = errors.Join(failed, c.between(nodes[i:i+1], nodes[j:j+1]))
			}
		}
	}
	return nodes, "a ring: " + list(nodes), failed
}

func oneWayShape(out bool) shape {
	return func(_ context.Context, _ *rand.Rand, c *cuts, nodes []string) ([]string, string, error) {
		if out {
			return nodes[:1], "what " + nodes[0] + " sends to nodes is lost", c.add(host.NetFault{From: nodes[:1], To: nodes[1:], Drop: 1})
		}
		return nodes[:1], "what nodes send to " + nodes[0] + " is lost", c.add(host.NetFault{From: nodes[1:], To: nodes[:1], Drop: 1})
	}
}

func (e *Env) leaderShape(withClient bool) shape {
	return func(ctx context.Context, rnd *rand.Rand, c *cuts, nodes []string) ([]string, string, error) {
		leader, err := e.leader(ctx, rnd)
		if err != nil {
			return nil, "", err
		}
		side, what := names(leader), leader[0].ID+", a leader, is cut from the other nodes"
		others := slices.DeleteFunc(nodes, func(id string) bool { return id == leader[0].ID })
		if withClient {
			side = append(side, host.Client)
			what += " and alone has the clients"
		}
		return names(leader), what, c.between(side, others)
	}
}

func clientShape(_ context.Context, _ *rand.Rand, c *cuts, nodes []string) ([]string, string, error) {
	some := nodes[:(len(nodes)+1)/2]
	return append([]string{host.Client}, some...), "the clients do not reach " + list(some), c.between([]string{host.Client}, some)
}

// everywhere applies an effect to all links, or to those of one node.
func (e *Env) everywhere(effect func(*rand.Rand, *host.NetFault) string) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(_ context.Context, rnd *rand.Rand) (*Injection, error) {
		nodes := names(e.all(rnd))
		everyone := append([]string{host.Client}, nodes...)
		f := host.NetFault{From: everyone, To: everyone}
		targets, where := everyone, " on all links"
		if rnd.IntN(2) == 0 {
			targets, where = nodes[:1], " on what "+nodes[0]+" sends"
			f.From = nodes[:1]
		}
		description := effect(rnd, &f) + where
		c := &cuts{net: e.Fleet.Net}
		if err := c.add(f); err != nil {
			return nil, errors.Join(err, c.heal())
		}
		return newInjection(targets, description, func(context.Context) error { return c.heal() }), nil
	}
}

func (e *Env) bandwidth(_ context.Context, rnd *rand.Rand) (*Injection, error) {
	nodes := e.one(rnd)
	if rnd.IntN(3) == 0 {
		nodes = e.all(rnd)
	}
	rate := []int64{1_000_000, 5_000_000, 20_000_000}[rnd.IntN(3)]
	return inject(nodes, fmt.Sprintf("%d Mbit/s for %s", rate/1_000_000, list(names(nodes))),
		func(n *host.Node) error { return e.Fleet.Net.Limit(n.ID, rate) }, func(n *host.Node) error { return e.Fleet.Net.Limit(n.ID, 0) })
}

// background runs something until the injection is healed, and waits for its end.
// Its error is the heal's.
func background(targets []string, description string, run func(ctx context.Context) error, heal func() error) *Injection {
	// It lives as long as the injection, not as long as the call that injects.
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	var once sync.Once
	var failed error
	return newInjection(targets, description, func(context.Context) error {
		once.Do(func() {
			cancel()
			failed = <-done
		})
		err := errors.Join(failed, heal())
		failed = nil
		return err
	})
}

// pauseFor is a gap in a schedule; it says whether there is more to come.
func pauseFor(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// flap cuts a node off and connects it, again and again.
func (e *Env) flap(_ context.Context, rnd *rand.Rand) (*Injection, error) {
	nodes := names(e.all(rnd))
	longest := []time.Duration{50, 300, 1500}[rnd.IntN(3)] * time.Millisecond
	seed := rnd.Uint64()
	c := &cuts{net: e.Fleet.Net}
	return background(nodes[:1], fmt.Sprintf("%s is cut off and connected again, for up to %s each", nodes[0], longest), func(ctx context.Context) error {
		rnd := rand.New(rand.NewPCG(seed, 1))
		for {
			if err := c.between(nodes[:1], nodes[1:]); err != nil {
				return err
			}
			more := pauseFor(ctx, rndDuration(rnd, longest))
			if err := c.heal(); err != nil || !more {
				return err
			}
			if !pauseFor(ctx, rndDuration(rnd, longest)) {
				return nil
			}
		}
	}, c.heal), nil
}

func rndDuration(rnd *rand.Rand, below time.Duration) time.Duration {
	return time.Duration(rnd.Int64N(int64(below)))
}

// swizzle cuts nodes off one by one, and connects them one by one in another
// order.
func (e *Env) swizzle(_ context.Context, rnd *rand.Rand) (*Injection, error) {
	nodes := names(e.all(rnd))
	back := shuffled(rnd, nodes)
	step := time.Duration(50+rnd.IntN(500)) * time.Millisecond
	each := make(map[string]*cuts)
	for _, id := range nodes {
		each[id] = &cuts{net: e.Fleet.Net}
	}
	heal := func() error {
		var failed error
		for _, c := range each {
			failed = errors.Join(failed, c.heal())
		}
		return failed
	}
	return background(nodes, fmt.Sprintf("cut off one by one every %s: %s; connected: %s", step, list(nodes), list(back)), func(ctx context.Context) error {
		for {
			for _, id := range nodes {
				others := slices.DeleteFunc(slices.Clone(nodes), func(o string) bool { return o == id })
				if err := each[id].between([]string{id}, others); err != nil {
					return err
				}
				if !pauseFor(ctx, step) {
					return nil
				}
			}
			for _, id := range back {
				if err := each[id].heal(); err != nil {
					return err
				}
				if !pauseFor(ctx, step) {
					return nil
				}
			}
		}
	}, heal), nil
}
