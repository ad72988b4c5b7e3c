package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// fault is one kind of fault. begin puts it in force and says what it did; undo
// may be nil. begin returns "" if it cannot be done now.
type fault struct {
	kind   string
	weight int
	begin  func(n *nemesis) (what string, undo func())
}

// nemesis makes the faults of a run, on the goroutine that owns the hosts.
type nemesis struct {
	*world
	rng *rand.Rand // its own: the plan depends on the seed alone
	// lost says that a log was lost since everything was last seen whole.
	lost bool
	// late counts orders that did not end with their caller's time.
	late int
	// inForce are the faults of this step that are to be undone.
	inForce int
	// rolling says that the cluster is being rolled back.
	rolling bool
}

func newNemesis(w *world) *nemesis {
	return &nemesis{world: w, rng: rand.New(rand.NewPCG(w.cfg.Seed, 0xe71))}
}

func (n *nemesis) host() int { return n.rng.IntN(n.cfg.Nodes) }

// some are between one and most hosts, at random.
func (n *nemesis) some(most int) []int {
	return n.rng.Perm(n.cfg.Nodes)[:1+n.rng.IntN(most)]
}

func (n *nemesis) between(lo, hi time.Duration) time.Duration {
	return lo + time.Duration(n.rng.Int64N(int64(max(hi-lo, 1))))
}

func names(is []int) string {
	var out []string
	for _, i := range is {
		out = append(out, name(i))
	}
	return strings.Join(out, "+")
}

func allFaults() []fault {
	return []fault{
		{"isolate", 5, (*nemesis).isolate}, {"isolate-leader", 6, (*nemesis).isolateLeader}, {"halves", 4, (*nemesis).halves},
		{"one-way", 5, (*nemesis).oneWay}, {"bridge", 3, (*nemesis).bridge}, {"flapping", 3, (*nemesis).flapping},
		{"slow-link", 3, (*nemesis).slowLink}, {"broken-connections", 4, (*nemesis).brokenConnections}, {"reset", 2, (*nemesis).reset},
		{"crash", 6, (*nemesis).crashSome}, {"crash-all", 1, (*nemesis).crashAll}, {"crash-in-write", 8, (*nemesis).crashInWrite},
		{"graceful-restart", 2, (*nemesis).gracefulRestart}, {"log-lost", 1, (*nemesis).logLost},
		{"slow-disk", 3, (*nemesis).slowDisk}, {"hung-disk", 3, (*nemesis).hungDisk},
		{"clock-step", 4, (*nemesis).clockStep}, {"clock-drift", 2, (*nemesis).clockDrift}, {"transfer", 5, (*nemesis).transfer},
		{"snapshot", 3, (*nemesis).snapshot}, {"late-news", 4, (*nemesis).lateNews}, {"hot-seat", 2, (*nemesis).hotSeat},
		{"log-lost-behind", 1, (*nemesis).lostBehind}, {"hung-leader", 2, (*nemesis).hungLeader}, {"crash-flushed", 2, (*nemesis).crashFlushed},
	}
}

// schemes are the faults that are made of several.
var schemes = []string{"late-news", "hot-seat", "log-lost-behind", "hung-leader", "crash-flushed"}

// step puts some faults in force, holds them and undoes them.
func (n *nemesis) step() {
	faults := allFaults()
	if n.cfg.Rollbacks {
		faults = append(faults, fault{"checkpoint", 25, (*nemesis).checkpoint}, fault{"object-store", 8, (*nemesis).objectStore})
	}
	total := 0
	for k, f := range faults {
		if slices.Contains(schemes, f.kind) {
			faults[k].weight *= n.cfg.Schemes
		}
		total += faults[k].weight
	}
	var undos []func()
	for range 1 + n.rng.IntN(n.cfg.AtOnce) {
		k, at := 0, n.rng.IntN(total)
		for at >= faults[k].weight {
			at -= faults[k].weight
			k++
		}
		what, undo := faults[k].begin(n)
		if what == "" {
			continue
		}
		n.faults[faults[k].kind]++
		n.trace.note("fault %s %s; leaders %s", faults[k].kind, what, n.leaders())
		if undo != nil {
			undos = append(undos, undo)
			n.inForce++
		}
		if n.rng.IntN(3) == 0 {
			n.sleep(n.between(0, time.Second))
		}
	}
	n.sleep(n.between(50*time.Millisecond, n.cfg.MaxHold))
	for _, k := range n.rng.Perm(len(undos)) {
		undos[k]()
	}
	n.inForce = 0
	n.trace.note("undone; leaders %s", n.leaders())
	n.sleep(n.between(0, n.cfg.MaxGap))
}

// heal undoes everything.
func (n *nemesis) heal() {
	n.calm()
	for i, h := range n.hosts {
		h.disk.set(func(l *life) { l.slow = 0; l.countdown = 0; l.wake() })
		n.restart(i)
	}
	if n.objects != nil {
		n.objects.set(0, 0)
	}
}

// ends of a group of hosts and the rest, cut off from each other.
func (n *nemesis) split(side []int) func() {
	in := map[int]bool{}
	for _, i := range side {
		in[i] = true
	}
	for a := range n.hosts {
		for b := range n.hosts {
			if in[a] && !in[b] {
				n.c.Net.Partition(name(a), name(b))
			}
		}
	}
	return func() {
		for a := range n.hosts {
			for b := range n.hosts {
				if in[a] && !in[b] {
					n.c.Net.Heal(name(a), name(b))
				}
			}
		}
	}
}

func (n *nemesis) isolate() (string, func()) {
	i := n.host()
	return name(i), n.split([]int{i})
}

// leader is a node that leads a random group, the system group too; -1 if none.
func (n *nemesis) leader() (int, base.GroupID) {
	g := base.GroupID(n.rng.IntN(n.cfg.Shards + 1))
	for i := range n.hosts {
		if node := n.c.Get(i); node != nil && node.Leads(g) {
			return i, g
		}
	}
	return -1, g
}

func (n *nemesis) isolateLeader() (string, func()) {
	i, g := n.leader()
	if i < 0 {
		return "", nil
	}
	return fmt.Sprintf("%s, leader of %s", name(i), g), n.split([]int{i})
}

func (n *nemesis) halves() (string, func()) {
	side := n.rng.Perm(n.cfg.Nodes)[:max(1, n.cfg.Nodes/2)]
	return names(side), n.split(side)
}

// oneWay blocks one direction: of one link, or of all that leave or reach a host.
func (n *nemesis) oneWay() (string, func()) {
	p := n.rng.Perm(n.cfg.Nodes)
	from, to := p[:1], p[1:2]
	switch n.rng.IntN(3) {
	case 1:
		to = p[1:]
	case 2:
		from, to = p[1:], p[:1]
	}
	each := func(f func(a, b string)) {
		for _, a := range from {
			for _, b := range to {
				f(name(a), name(b))
			}
		}
	}
	each(n.c.Net.Block)
	return names(from) + " to " + names(to), func() { each(n.c.Net.Unblock) }
}

// bridge leaves one host that reaches both sides.
func (n *nemesis) bridge() (string, func()) {
	p := n.rng.Perm(n.cfg.Nodes)
	half := (n.cfg.Nodes - 1) / 2
	left, right := p[1:1+half], p[1+half:]
	each := func(f func(a, b string)) {
		for _, a := range left {
			for _, b := range right {
				f(name(a), name(b))
			}
		}
	}
	each(n.c.Net.Partition)
	return fmt.Sprintf("%s between %s and %s", name(p[0]), names(left), names(right)), func() { each(n.c.Net.Heal) }
}

func (n *nemesis) flapping() (string, func()) {
	i := n.host()
	period := n.between(50*time.Millisecond, 2*n.cfg.ElectionTimeout)
	rounds := 3 + n.rng.IntN(10)
	for range rounds {
		undo := n.split([]int{i})
		n.sleep(period)
		undo()
		n.sleep(period)
	}
	return fmt.Sprintf("%s %d times, every %v", name(i), rounds, period), nil
}

// links calls f for every direction of some pairs of hosts.
func (n *nemesis) links(f func(a, b string)) string {
	p := n.some(n.cfg.Nodes)
	for _, a := range p {
		for b := range n.hosts {
			if a != b {
				f(name(a), name(b))
				f(name(b), name(a))
			}
		}
	}
	return names(p)
}

func (n *nemesis) slowLink() (string, func()) {
	delay := n.between(time.Millisecond, 2*n.cfg.ElectionTimeout)
	jitter := n.between(time.Millisecond, delay+2*time.Millisecond)
	who := n.links(func(a, b string) { n.c.Net.SetDelay(a, b, delay, jitter) })
	return fmt.Sprintf("%s by %v to %v", who, delay, delay+jitter), n.calmDelays
}

func (n *nemesis) calmDelays() {
	for a := range n.hosts {
		for _, b := range n.others(a) {
			n.c.Net.SetDelay(name(a), name(b), n.cfg.LinkDelay, n.cfg.LinkDelay)
		}
	}
}

func (n *nemesis) brokenConnections() (string, func()) {
	in := []int{2, 10, 50, 300}[n.rng.IntN(4)]
	who := n.links(func(a, b string) { n.c.Net.SetCutOneIn(a, b, in) })
	return fmt.Sprintf("%s, one write in %d", who, in), func() {
		for a := range n.hosts {
			for _, b := range n.others(a) {
				n.c.Net.SetCutOneIn(name(a), name(b), 0)
			}
		}
	}
}

func (n *nemesis) reset() (string, func()) {
	return n.links(n.c.Net.Cut), nil
}

func (n *nemesis) revive(side []int) func() {
	return func() {
		for _, i := range side {
			n.restart(i)
			if n.rng.IntN(2) == 0 {
				n.sleep(n.between(0, time.Second))
			}
		}
	}
}

func (n *nemesis) crashSome() (string, func()) {
	side := n.some(n.cfg.Nodes / 2)
	if i, _ := n.leader(); i >= 0 && n.rng.IntN(2) == 0 {
		side = []int{i}
	}
	for _, i := range side {
		n.crash(i)
	}
	if n.rng.IntN(3) == 0 { // it comes back at once
		n.revive(side)()
		return names(side) + ", back at once", nil
	}
	return names(side), n.revive(side)
}

func (n *nemesis) crashAll() (string, func()) {
	side := n.rng.Perm(n.cfg.Nodes)
	for _, i := range side {
		n.crash(i)
	}
	return names(side), n.revive(side)
}

// crashInWrite kills a process at a write or fsync of its log that is drawn.
func (n *nemesis) crashInWrite() (string, func()) {
	i := n.host()
	if l, _ := n.leader(); l >= 0 && n.rng.IntN(2) == 0 {
		i = l
	}
	if !n.up(i) {
		return "", nil
	}
	calls := 1 + n.rng.IntN(12)
	struck := n.hosts[i].disk.arm(calls)
	limit := time.NewTimer(20 * time.Second)
	defer limit.Stop()
	select {
	case <-struck:
	case <-limit.C: // nothing was written
	}
	n.crash(i)
	return fmt.Sprintf("%s at call %d", name(i), calls), n.revive([]int{i})
}

// order gives a node an order as an operator does, who waits no longer than d for
// what comes of it; the order itself may take longer.
func (n *nemesis) order(d time.Duration, f func(ctx context.Context) (string, error)) string {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	said := make(chan string, 1)
	n.background.Go(func() {
		defer cancel()
		what, err := f(ctx)
		said <- fmt.Sprintf("%s %v", what, err)
	})
	select {
	case what := <-said:
		return what
	case <-time.After(d + time.Second):
		n.late++
		return "is late"
	}
}

func (n *nemesis) gracefulRestart() (string, func()) {
	i := n.host()
	node := n.c.Get(i)
	if node == nil {
		return "", nil
	}
	what := n.order(5*time.Second, func(ctx context.Context) (string, error) { return "drained", node.Drain(ctx) })
	n.crash(i)
	return name(i) + " " + what, n.revive([]int{i})
}

// mayLose says that a log may be lost: none was since all was whole, and every
// replica votes (rule R3).
func (n *nemesis) mayLose() bool { return !n.lost && n.everyoneVotes() }

// everyoneVotes says that all nodes are ready and every replica votes. A group that
// has grown to two voters only, or has a learner that is still to be one, loses its
// quorum with one of them.
func (n *nemesis) everyoneVotes() bool {
	for i := range n.hosts {
		node := n.c.Get(i)
		if node == nil {
			return false
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		st, err := node.NodeStatus(ctx)
		cancel()
		if err != nil || !st.Ready {
			return false
		}
		for _, g := range st.Groups {
			if !g.Voter {
				return false
			}
		}
	}
	return true
}

// logLost loses the whole Raft log of one host: its replicas come back under new
// ids (rule R3). Never of a second host before all is whole again.
func (n *nemesis) logLost() (string, func()) {
	i := n.host()
	if !n.mayLose() || !n.up(i) {
		return "", nil
	}
	n.lost = true
	n.crash(i)
	n.hosts[i].disk.lose()
	return name(i), n.revive([]int{i})
}

func (n *nemesis) slowDisk() (string, func()) {
	i, by := n.host(), n.between(time.Millisecond, n.cfg.ElectionTimeout)
	n.hosts[i].disk.set(func(l *life) { l.slow = by })
	return fmt.Sprintf("%s by up to %v", name(i), by), func() { n.hosts[i].disk.set(func(l *life) { l.slow = 0 }) }
}

func (n *nemesis) hungDisk() (string, func()) {
	i := n.host()
	n.hosts[i].disk.set((*life).hang)
	return name(i), func() { n.hosts[i].disk.set((*life).wake) }
}

func (n *nemesis) clockStep() (string, func()) {
	var said []string
	for _, i := range n.some(n.cfg.Nodes) {
		limit := []time.Duration{time.Second, time.Minute, 24 * time.Hour, 10 * 365 * 24 * time.Hour}[n.rng.IntN(4)]
		by := n.between(-limit, limit)
		n.hosts[i].offset.Store(int64(by))
		said = append(said, fmt.Sprintf("%s to %v", name(i), by))
	}
	return strings.Join(said, " "), nil
}

// clockDrift moves a clock step by step.
func (n *nemesis) clockDrift() (string, func()) {
	i := n.host()
	by := n.between(-200*time.Millisecond, 200*time.Millisecond)
	for range 20 {
		n.hosts[i].offset.Add(int64(by))
		n.sleep(100 * time.Millisecond)
	}
	return fmt.Sprintf("%s by %v in 100 ms", name(i), by), nil
}

func (n *nemesis) transfer() (string, func()) {
	from, to := n.host(), n.host()
	g := base.GroupID(1 + n.rng.IntN(n.cfg.Shards))
	node := n.c.Get(from)
	if node == nil {
		return "", nil
	}
	return fmt.Sprintf("%s to %s: %s", g, name(to), n.order(2*time.Second, func(ctx context.Context) (string, error) {
		leader, err := node.TransferLeader(ctx, g, nodeID(to))
		return string(leader), err
	})), nil
}

func (n *nemesis) snapshot() (string, func()) {
	node := n.c.Get(n.host())
	if node == nil {
		return "", nil
	}
	g := base.GroupID(1 + n.rng.IntN(n.cfg.Shards))
	return fmt.Sprintf("%s: %s", g, n.order(5*time.Second, func(ctx context.Context) (string, error) {
		index, _, err := node.SnapshotShard(ctx, g)
		return fmt.Sprint(index), err
	})), nil
}
