package sim

import (
	"math/rand/v2"
	"time"
)

// Config is one run. ForSeed draws it.
type Config struct {
	Seed uint64
	// Time is the simulated time of the run.
	Time time.Duration
	// Nodes, Shards, KeyGroups and Replication found the cluster.
	Nodes, Shards, KeyGroups, Replication int
	// ElectionTimeout, CheckInterval, BalanceDelay, LogMaxBytes and SegmentBytes
	// are options of the nodes.
	ElectionTimeout, CheckInterval, BalanceDelay time.Duration
	LogMaxBytes                                  uint64
	SegmentBytes                                 int64
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
}

// ForSeed draws a run: its choices follow from the seed alone. One run in four is
// a storm of faults with much load, the others are long days with a fault now and
// then, which cost much less for each simulated hour.
func ForSeed(seed uint64, simulated time.Duration) Config {
	r := rand.New(rand.NewPCG(seed, 0xc0f))
	pick := func(ds ...time.Duration) time.Duration { return ds[r.IntN(len(ds))] }
	c := Config{Seed: seed, Time: simulated, Nodes: []int{3, 3, 3, 5, 4}[r.IntN(5)], Shards: 1 + r.IntN(2), KeyGroups: 64, Replication: 3,
		ElectionTimeout: pick(500*time.Millisecond, 500*time.Millisecond, time.Second, 2*time.Second),
		CheckInterval:   time.Second, BalanceDelay: pick(10*time.Second, time.Minute),
		LogMaxBytes: []uint64{32 << 10, 128 << 10, 1 << 20}[r.IntN(3)], SegmentBytes: []int64{64 << 10, 256 << 10, 1 << 20}[r.IntN(3)],
		LinkDelay: pick(0, 0, 200*time.Microsecond, 2*time.Millisecond),
		Rate:      []float64{0.5, 2, 8}[r.IntN(3)], Workers: 3, LostReplies: []float64{0, 0.01, 0.1}[r.IntN(3)],
		Round: pick(time.Minute, 3*time.Minute, 10*time.Minute), MaxHold: pick(2*time.Second, 10*time.Second, 40*time.Second),
		MaxGap: pick(time.Second, 10*time.Second, 40*time.Second), AtOnce: 1 + r.IntN(4)}
	if r.IntN(4) > 0 {
		c.Rate = []float64{0.1, 0.3, 1}[r.IntN(3)]
		c.ElectionTimeout = pick(500*time.Millisecond, time.Second, 2*time.Second, 4*time.Second)
		c.CheckInterval = pick(time.Second, 5*time.Second)
		c.MaxHold, c.MaxGap = pick(10*time.Second, time.Minute), pick(time.Minute, 3*time.Minute)
		c.Round = pick(10*time.Minute, 30*time.Minute)
	}
	if c.Nodes == 5 && r.IntN(2) == 0 {
		c.Replication = 5
	}
	c.Round = min(c.Round, simulated)
	return c
}
