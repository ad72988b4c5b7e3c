package sim

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Config is one run. Draw draws it.
type Config struct {
	Seed uint64
	// Time is the simulated time of the run.
	Time time.Duration
	// Nodes, Shards, KeyGroups and Replication found the cluster.
	Nodes, Shards, KeyGroups, Replication int
	// ElectionTimeout, CheckInterval, BalanceDelay, LogMaxBytes and SegmentBytes
	// are options of the nodes.
	ElectionTimeout, CheckInterval, BalanceDelay time.Duration
	// CommitTimeout and SyncLimit, too; 0 is their default.
	CommitTimeout, SyncLimit time.Duration
	LogMaxBytes              uint64
	SegmentBytes             int64
	// LinkDelay is the delay of each link without faults, and its jitter.
	LinkDelay time.Duration
	// Rate is the operations of each workload in a second; Workers are its
	// clients.
	Rate    float64
	Workers int
	// LostReplies is the share of answers that never reach the client.
	LostReplies float64
	// Round is the time of faults between two times that everything is healed
	// and judged to be alive; MaxHold and MaxGap bound the time of one step's
	// faults and the time between two steps.
	Round, MaxHold, MaxGap time.Duration
	// AtOnce bounds the faults in force at once.
	AtOnce int
	// Look is how often terms and leaders are looked at; 0 is never.
	Look time.Duration
	// Astray is the share of requests that go to any node, not to the believed
	// leader.
	Astray float64
	// Schemes multiplies the weight of the faults that are made of several.
	Schemes int
	// LateCopies is the share of numbered requests of which a copy is still on its
	// way when they have been answered, maybe when their session has ended.
	LateCopies float64
	// LostRequests is the share of numbered requests that are lost on their way,
	// while those that were sent after them arrive.
	LostRequests float64
	// Rollbacks gives the cluster an object store that fails, has checkpoints made, and
	// takes the cluster back to one after each round. LocalLinks and Changelog are
	// options of the nodes.
	Rollbacks, LocalLinks, Changelog bool
}

// A Kind is what a run is like.
type Kind string

const (
	// Storms have faults upon faults, and much load.
	Storms Kind = "storms"
	// Days have a fault now and then, and little load: an hour costs much less.
	Days Kind = "days"
	// Mixed are storms, one in four, and days.
	Mixed Kind = "mixed"
	// Weeks are for many hours: an hour costs far less than one of a day.
	Weeks Kind = "weeks"
)

// Draw draws a run of a kind: its choices follow from the seed alone.
func Draw(kind Kind, seed uint64, simulated time.Duration) (Config, error) {
	switch kind {
	case Storms, Days, Mixed:
		return draw(kind, seed, simulated), nil
	case Weeks:
		return week(seed, simulated), nil
	case Squalls:
		return squall(seed, simulated), nil
	case Rollbacks:
		return rolling(seed, simulated), nil
	}
	return Config{}, fmt.Errorf("sim: there is no kind of run %q", kind)
}

func draw(kind Kind, seed uint64, simulated time.Duration) Config {
	c, r := storm(seed, simulated)
	if day := r.IntN(4) > 0; kind == Days || day && kind == Mixed {
		pick := func(ds ...time.Duration) time.Duration { return ds[r.IntN(len(ds))] }
		c.Rate = []float64{0.1, 0.3, 1}[r.IntN(3)]
		c.ElectionTimeout = pick(500*time.Millisecond, time.Second, 2*time.Second, 4*time.Second)
		c.CheckInterval = pick(time.Second, 5*time.Second)
		c.MaxHold, c.MaxGap = pick(10*time.Second, time.Minute), pick(time.Minute, 3*time.Minute)
		c.Round = min(pick(10*time.Minute, 30*time.Minute), simulated)
		c.Look = time.Second
	}
	if c.Nodes == 5 && r.IntN(2) == 0 {
		c.Replication = 5
	}
	return c
}

// storm draws a storm of faults with much load; what else is drawn comes from the
// source that it returns.
func storm(seed uint64, simulated time.Duration) (Config, *rand.Rand) {
	r := rand.New(rand.NewPCG(seed, 0xc0f))
	pick := func(ds ...time.Duration) time.Duration { return ds[r.IntN(len(ds))] }
	c := Config{Seed: seed, Time: simulated, Nodes: []int{3, 3, 3, 5, 4}[r.IntN(5)], Shards: 1 + r.IntN(2), KeyGroups: 64, Replication: 3,
		ElectionTimeout: pick(500*time.Millisecond, 500*time.Millisecond, time.Second, 2*time.Second),
		CheckInterval:   time.Second, BalanceDelay: pick(10*time.Second, time.Minute),
		LogMaxBytes: []uint64{32 << 10, 128 << 10, 1 << 20}[r.IntN(3)], SegmentBytes: []int64{64 << 10, 256 << 10, 1 << 20}[r.IntN(3)],
		LinkDelay: pick(0, 0, 200*time.Microsecond, 2*time.Millisecond),
		Rate:      []float64{0.5, 2, 8}[r.IntN(3)], Workers: 3, LostReplies: []float64{0, 0.01, 0.1}[r.IntN(3)],
		Round: pick(time.Minute, 3*time.Minute, 10*time.Minute), MaxHold: pick(2*time.Second, 10*time.Second, 40*time.Second),
		MaxGap: pick(time.Second, 10*time.Second, 40*time.Second), AtOnce: 1 + r.IntN(4),
		LateCopies: 0.02, LostRequests: 0.005, Look: 100 * time.Millisecond, Astray: 0.15, Schemes: 1}
	c.Round = min(c.Round, simulated)
	return c, r
}

// week draws a run that is made for many hours: a cluster with long timeouts
// and little load, into which a step of faults comes every few minutes. What
// costs most in a simulated hour without events are heartbeats and looks, so
// these are as rare as healing in time allows.
func week(seed uint64, simulated time.Duration) Config {
	c := draw(Days, seed, simulated)
	r := rand.New(rand.NewPCG(seed, 0x3eec5))
	pick := func(ds ...time.Duration) time.Duration { return ds[r.IntN(len(ds))] }
	c.Nodes, c.Replication, c.Shards = []int{3, 3, 3, 3, 3, 3, 4, 5}[r.IntN(8)], 3, 1+r.IntN(10)/9
	c.ElectionTimeout = pick(4*time.Second, 7*time.Second, 7*time.Second)
	c.CommitTimeout = 1500 * time.Millisecond // who compares hashes waits for twice as long
	c.SyncLimit = pick(3*time.Second, 12*time.Second, 12*time.Second)
	c.CheckInterval = pick(5*time.Second, 10*time.Second, 10*time.Second)
	c.LinkDelay = pick(0, 0, 0, time.Millisecond)
	c.Rate = []float64{0.005, 0.01, 0.02}[r.IntN(3)]
	c.MaxHold, c.MaxGap = pick(30*time.Second, 2*time.Minute), pick(5*time.Minute, 15*time.Minute)
	c.Round = min(pick(time.Hour, 3*time.Hour), simulated)
	c.Look = 0 // but after each start: a look in a week without events costs more than the week
	return c
}
