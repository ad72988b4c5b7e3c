package sim

import (
	"context"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// Faults that are made of several, for states of a cluster that single ones come
// to by chance only.

// shardLeader is a node that leads a random shard; -1 if none.
func (n *nemesis) shardLeader() (int, base.GroupID) {
	g := base.GroupID(1 + n.rng.IntN(n.cfg.Shards))
	for i := range n.hosts {
		if node := n.c.Get(i); node != nil && n.up(i) && node.Leads(g) {
			return i, g
		}
	}
	return -1, g
}

// other is a random host that is none of these.
func (n *nemesis) other(not ...int) int {
	for {
		i, taken := n.host(), false
		for _, k := range not {
			taken = taken || k == i
		}
		if !taken {
			return i
		}
	}
}

// handOver gives a shard to another node, as its leader is told to.
func (n *nemesis) handOver(from, to int, g base.GroupID, limit time.Duration) string {
	node := n.c.Get(from)
	if node == nil {
		return "is gone"
	}
	return n.order(limit, func(ctx context.Context) (string, error) {
		leader, err := node.TransferLeader(ctx, g, nodeID(to))
		return string(leader), err
	})
}

// lateNews hands an office over while all that reaches the old leader, or the
// new one, is slow: the old one is the last to hear that it was deposed, or the
// new one learns late what had been committed.
func (n *nemesis) lateNews() (string, func()) {
	from, g := n.shardLeader()
	if from < 0 {
		return "", nil
	}
	to := n.other(from)
	far := from
	if n.rng.IntN(3) == 0 {
		far = to
	}
	delay := n.between(n.cfg.ElectionTimeout/8, n.cfg.ElectionTimeout)
	for _, a := range n.others(far) {
		n.c.Net.SetDelay(name(a), name(far), delay, 0)
	}
	n.sleep(2*delay + n.between(0, n.cfg.ElectionTimeout))
	what := n.handOver(from, to, g, 2*time.Second)
	return fmt.Sprintf("%s from %s to %s: %s; what reaches %s takes %v", g, name(from), name(to), what, name(far), delay), n.calmDelays
}

// hotSeat hands an office round while the disk of one host is slow, which writes
// terms and votes later than they come.
func (n *nemesis) hotSeat() (string, func()) {
	from, g := n.shardLeader()
	if from < 0 {
		return "", nil
	}
	to := n.other(from)
	slow := n.other(from, to)
	by := n.between(n.cfg.ElectionTimeout/8, n.cfg.ElectionTimeout)
	n.hosts[slow].disk.set(func(l *life) { l.slow = by })
	rounds := 3 + n.rng.IntN(6)
	for range rounds {
		n.handOver(from, to, g, time.Second)
		from, to = to, from
		n.sleep(n.between(0, by))
	}
	return fmt.Sprintf("%s %d times between %s and %s; the disk of %s is slow by up to %v", g, rounds, name(from), name(to), name(slow), by),
		func() { n.hosts[slow].disk.set(func(l *life) { l.slow = 0 }) }
}

// lostBehind loses the log of a follower when another follower is behind and the
// leader is cut off: if what forgot its log votes, what only it and the leader had
// is lost.
func (n *nemesis) lostBehind() (string, func()) {
	leader, g := n.shardLeader()
	if leader < 0 || !n.mayLose() {
		return "", nil
	}
	amnesiac := n.other(leader)
	behind := n.other(leader, amnesiac)
	if !n.up(amnesiac) {
		return "", nil
	}
	n.lost = true
	join := n.split([]int{behind})
	n.sleep(n.between(200*time.Millisecond, 3*time.Second))
	n.crash(amnesiac)
	n.hosts[amnesiac].disk.lose()
	undo := n.split([]int{leader})
	join()
	n.split([]int{leader}) // join healed its link to the one that was behind
	n.restart(amnesiac)
	n.sleep(n.between(2*n.cfg.ElectionTimeout, 8*n.cfg.ElectionTimeout))
	return fmt.Sprintf("%s of %s, with %s behind and the leader %s cut off", name(amnesiac), g, name(behind), name(leader)), undo
}

// crashFlushed has all stores of a shard flushed, as an operator does who compacts
// them, and as RocksDB does by itself whenever its memory is full; then it kills
// one, whose store holds more than its newest snapshot.
func (n *nemesis) crashFlushed() (string, func()) {
	at, g := n.shardLeader()
	if at < 0 {
		return "", nil
	}
	node, who := n.c.Get(at), n.host()
	said := n.order(5*time.Second, func(ctx context.Context) (string, error) {
		_, _, err := node.CompactShard(ctx, g)
		return "compacted", err
	})
	n.sleep(n.between(0, 300*time.Millisecond))
	n.crash(who)
	return fmt.Sprintf("%s of %s: %s", name(who), g, said), n.revive([]int{who})
}

// serviceLimit is how long a shard may be without service when the disk of its
// leader hangs and nothing else is wrong: until the node notices and is silent,
// and the others have elected.
func (c *Config) serviceLimit() time.Duration {
	limit := c.SyncLimit
	if limit == 0 {
		limit = 3 * time.Second // the default of the nodes
	}
	return 2*limit + 10*c.ElectionTimeout + 5*time.Second
}

// hungLeader makes the disk of a leader hang, and asks for service meanwhile. It
// is for a cluster that is well in all else.
func (n *nemesis) hungLeader() (string, func()) {
	if n.inForce > 0 || n.rolling || !n.everyoneVotes() {
		return "", nil
	}
	c := newClient(n.world, false)
	leader, g := n.shardLeader()
	if leader < 0 || !n.serves(c, g, 2*time.Second) {
		return "", nil
	}
	undo := func() { n.hosts[leader].disk.set((*life).wake) }
	n.hosts[leader].disk.set((*life).hang)
	began := time.Now()
	if !n.serves(c, g, n.cfg.serviceLimit()) {
		n.finding("%s takes no write for %v while the disk of its leader %s hangs and nothing else is wrong", g, time.Since(began), name(leader))
		n.dump()
	}
	return fmt.Sprintf("%s, leader of %s, which serves after %v", name(leader), g, time.Since(began).Round(time.Millisecond)), undo
}

// serves says whether a shard takes a write within a limit.
func (n *nemesis) serves(c *client, g base.GroupID, limit time.Duration) bool {
	for end := time.Now().Add(limit); time.Now().Before(end); n.sleep(50 * time.Millisecond) {
		if c.probe(context.Background(), g, true) == nil {
			return true
		}
	}
	return false
}
