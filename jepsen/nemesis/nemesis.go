//go:build linux

package nemesis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/keelstate/keelstate/jepsen/host"
)

// Kind groups faults for counting.
type Kind string

// The kinds of faults.
const (
	KindKill       Kind = "kill"
	KindRestart    Kind = "restart"
	KindPause      Kind = "pause"
	KindPartition  Kind = "partition"
	KindOneWay     Kind = "one-way"
	KindFlap       Kind = "flap"
	KindLoss       Kind = "loss"
	KindDuplicate  Kind = "duplicate"
	KindDelay      Kind = "delay"
	KindReset      Kind = "reset"
	KindBandwidth  Kind = "bandwidth"
	KindCPU        Kind = "cpu"
	KindMemory     Kind = "memory"
	KindSlowDisk   Kind = "slow-disk"
	KindHungDisk   Kind = "hung-disk"
	KindFullDisk   Kind = "full-disk"
	KindFsyncError Kind = "fsync-error"
	KindReadError  Kind = "read-error"
	KindPowerLoss  Kind = "power-loss"
	KindLyingFsync Kind = "lying-fsync"
	KindBitFlip    Kind = "bit-flip"
	KindTransfer   Kind = "transfer"
	KindClock      Kind = "clock"
)

// ErrNotNow is returned when a fault makes no sense at the moment, for example
// because no leader is known. Nothing was injected.
var ErrNotNow = errors.New("not possible now")

// Injection is a fault in force.
type Injection struct {
	// Targets are hosts.
	Targets     []string
	Description string
	// Heal undoes it, also after a failure and more than once.
	Heal func(context.Context) error
	// Outcome is set by Heal where only then something can be told.
	Outcome string
	// Idle is set where nothing met the fault: no call came to the disk that would
	// have failed, or the order was refused. It does not count as injected.
	Idle bool
}

// add appends to the outcome.
func (in *Injection) add(outcome string) {
	if in.Outcome != "" {
		outcome = in.Outcome + "; " + outcome
	}
	in.Outcome = outcome
}

func newInjection(targets []string, description string, heal func(context.Context) error) *Injection {
	return &Injection{Targets: targets, Description: description, Heal: heal}
}

// Fault can be injected.
type Fault interface {
	// Name is unique in a catalogue.
	Name() string
	Kind() Kind
	// Alone says that no other fault may be in force at the same time.
	Alone() bool
	// Halts says that nobody is served while it is in force: it then lasts a
	// quarter of the time, for the rest would show nothing new.
	Halts() bool
	// Inject injects it as rnd says. With an error nothing is left in force.
	Inject(ctx context.Context, rnd *rand.Rand) (*Injection, error)
}

// Clock sets the clock that a node sees, which exists under the node's flag
// --fault-injection only. Offset is added to the wall clock, and it runs faster by
// so many parts per million (slower if negative). Zero and zero is the truth.
type Clock interface {
	Set(ctx context.Context, n *host.Node, offset time.Duration, driftPPM int64) error
}

// Env is what faults work on.
type Env struct {
	Fleet *host.Fleet
	// Clock is nil where nodes have no control of their clock.
	Clock Clock
	// StoreLacks says why there is no object store, if there is none.
	StoreLacks error
	// StopLimit bounds a graceful stop, after which the node is killed; default
	// 40 s.
	StopLimit time.Duration

	victims []string

	mu struct {
		sync.Mutex
		// down counts, by node, the faults that want it down (NE4).
		down map[string]int
	}
}

// Deaths are the ends of processes that nobody asked for, so far.
func (e *Env) Deaths() []host.Death {
	var all []host.Death
	for _, n := range e.Fleet.Nodes {
		all = append(all, n.Deaths()...)
	}
	return all
}

// NewEnv chooses the victims of a run by its seed (NE6).
func NewEnv(f *host.Fleet, seed uint64) *Env {
	e := &Env{Fleet: f, StopLimit: 40 * time.Second}
	e.mu.down = make(map[string]int)
	rnd := rand.New(rand.NewPCG(seed, 0x76696374696d7321))
	for _, n := range shuffled(rnd, f.Nodes)[:minority(len(f.Nodes))] {
		e.victims = append(e.victims, n.ID)
	}
	return e
}

// Victims are the nodes whose disks may be damaged.
func (e *Env) Victims() []string { return slices.Clone(e.victims) }

// minority is the largest number of nodes that are no majority with one more: f
// of 2f+1 or 2f+2.
func minority(nodes int) int { return (nodes - 1) / 2 }

func shuffled[T any](rnd *rand.Rand, list []T) []T {
	list = slices.Clone(list)
	rnd.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}

func names(nodes []*host.Node) []string {
	var ids []string
	for _, n := range nodes {
		ids = append(ids, n.ID)
	}
	return ids
}

// one draws a node.
func (e *Env) one(rnd *rand.Rand) []*host.Node { return shuffled(rnd, e.Fleet.Nodes)[:1] }

// some draws a minority of at least one node.
func (e *Env) some(rnd *rand.Rand) []*host.Node {
	return shuffled(rnd, e.Fleet.Nodes)[:max(1, minority(len(e.Fleet.Nodes)))]
}

// all draws every node, in random order.
func (e *Env) all(rnd *rand.Rand) []*host.Node { return shuffled(rnd, e.Fleet.Nodes) }

// victim draws a node whose disk may be damaged.
func (e *Env) victim(rnd *rand.Rand) ([]*host.Node, error) {
	if len(e.victims) == 0 {
		return nil, fmt.Errorf("no disk may be damaged in a cluster of %d: %w", len(e.Fleet.Nodes), ErrNotNow)
	}
	return []*host.Node{e.Fleet.Node(e.victims[rnd.IntN(len(e.victims))])}, nil
}

// leader draws the leader of a shard.
func (e *Env) leader(ctx context.Context, rnd *rand.Rand) ([]*host.Node, error) {
	leaders, err := e.Fleet.Leaders(ctx)
	if err != nil || len(leaders) == 0 {
		return nil, fmt.Errorf("no leader is known: %w", errors.Join(err, ErrNotNow))
	}
	var shards []int
	for shard := range leaders {
		shards = append(shards, shard)
	}
	slices.Sort(shards)
	n := e.Fleet.Node(leaders[shards[rnd.IntN(len(shards))]])
	if n == nil {
		return nil, fmt.Errorf("the leader is none of us: %w", ErrNotNow)
	}
	return []*host.Node{n}, nil
}

// holdDown notes that a fault wants nodes down; the function that it returns lets
// them start again, once (NE4).
func (e *Env) holdDown(nodes []*host.Node) (release func() error) {
	e.mu.Lock()
	for _, n := range nodes {
		e.mu.down[n.ID]++
	}
	e.mu.Unlock()
	held := slices.Clone(nodes)
	return func() error {
		e.mu.Lock()
		defer e.mu.Unlock()
		var failed error
		for _, n := range nodes {
			if i := slices.Index(held, n); i >= 0 {
				held = slices.Delete(held, i, i+1)
				e.mu.down[n.ID]--
			}
			failed = errors.Join(failed, e.upLocked(n))
		}
		return failed
	}
}

// up starts a node that is down though no fault wants it so, for example because
// its disk failed.
func (e *Env) up(n *host.Node) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.upLocked(n)
}

func (e *Env) upLocked(n *host.Node) error {
	if e.mu.down[n.ID] > 0 || n.Running() {
		return nil
	}
	return n.Start()
}

// upAll starts every node that is down though no fault wants it so.
func (e *Env) upAll() error {
	var failed error
	for _, n := range e.Fleet.Nodes {
		failed = errors.Join(failed, e.up(n))
	}
	return failed
}

// superviseEvery is how often Supervise looks.
const superviseEvery = 200 * time.Millisecond

// Supervise starts every node that ends though no fault wants it down, as whoever runs
// a node would, until stop is called: what a fault has done to a disk may end a node a
// moment after it was healed. Whether the node had a reason to end is for who looks at
// Deaths.
func (e *Env) Supervise() (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(superviseEvery)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				_ = e.upAll() // it looks again, and a node that stays down is seen
			}
		}
	}()
	return sync.OnceFunc(func() { close(done); <-ended })
}

// HealAll ends every fault, also such as nobody remembers, and starts all nodes.
// It is for the end of an episode, when no injection is left.
func (e *Env) HealAll(ctx context.Context) error {
	e.mu.Lock()
	clear(e.mu.down)
	e.mu.Unlock()
	failed := e.Fleet.Heal()
	if e.Clock != nil {
		for _, n := range e.Fleet.Nodes {
			failed = errors.Join(failed, e.Clock.Set(ctx, n, 0, 0))
		}
	}
	return failed
}

// fault is a Fault from its parts.
type fault struct {
	name   string
	kind   Kind
	alone  bool
	halts  bool
	inject func(ctx context.Context, rnd *rand.Rand) (*Injection, error)
	// lacks is why it cannot be injected here, nil if it can.
	lacks error
}

// Name implements Fault.
func (f *fault) Name() string { return f.name }

// Kind implements Fault.
func (f *fault) Kind() Kind { return f.kind }

// Alone implements Fault.
func (f *fault) Alone() bool { return f.alone }

// Halts implements Fault.
func (f *fault) Halts() bool { return f.halts }

// Inject implements Fault.
func (f *fault) Inject(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
	in, err := f.inject(ctx, rnd)
	if err != nil {
		return nil, fmt.Errorf("injecting %s: %w", f.name, err)
	}
	return in, nil
}

func allFaults(e *Env) []*fault {
	return slices.Concat(processFaults(e), networkFaults(e), diskFaults(e), otherFaults(e), storeFaults(e))
}

// CheckNames says which of some names and kinds no fault has, here or elsewhere,
// and lists those that there are.
func CheckNames(e *Env, names []string) error {
	var kinds, all, wrong []string
	for _, f := range allFaults(e) {
		kinds, all = append(kinds, string(f.kind)), append(all, f.name)
	}
	for _, name := range names {
		if !slices.Contains(kinds, name) && !slices.Contains(all, name) {
			wrong = append(wrong, strconv.Quote(name))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	slices.Sort(kinds)
	return fmt.Errorf("no fault is called %s; the kinds are %s; the names are %s", strings.Join(wrong, " or "),
		strings.Join(slices.Compact(kinds), ", "), strings.Join(all, ", "))
}

// Lacks is why no fault of a name or kind can be injected here, nil if one can.
func Lacks(e *Env, name string) error {
	var lacks error
	for _, f := range allFaults(e) {
		if f.name != name && string(f.kind) != name {
			continue
		}
		if f.lacks == nil {
			return nil
		}
		lacks = f.lacks
	}
	return lacks
}

// Catalogue lists the faults that can be injected into a fleet on this machine,
// and why the others cannot (NE5).
func Catalogue(e *Env) (faults []Fault, missing []string) {
	for _, f := range allFaults(e) {
		if f.lacks != nil {
			missing = append(missing, fmt.Sprintf("%s: %v", f.name, f.lacks))
			continue
		}
		faults = append(faults, f)
	}
	return faults, missing
}

// Select keeps the faults whose name or kind is listed; with an empty list, all.
func Select(faults []Fault, wanted []string) ([]Fault, error) {
	if len(wanted) == 0 {
		return faults, nil
	}
	var chosen []Fault
	for _, w := range wanted {
		found := false
		for _, f := range faults {
			if f.Name() != w && string(f.Kind()) != w {
				continue
			}
			if found = true; !slices.Contains(chosen, f) {
				chosen = append(chosen, f)
			}
		}
		if !found {
			return nil, fmt.Errorf("no fault here is called %q", w)
		}
	}
	return chosen, nil
}
