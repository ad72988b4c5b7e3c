package sim

import "time"

// Squalls are short: small clusters, quick faults one after the other, and many
// operations meanwhile. They find a planted bug soonest (jepsen/mutants).
const Squalls Kind = "squalls"

// squall draws a run with as many faults, and operations during them, as a second
// of real time can hold.
func squall(seed uint64, simulated time.Duration) Config {
	c, r := storm(seed, simulated)
	pick := func(ds ...time.Duration) time.Duration { return ds[r.IntN(len(ds))] }
	c.Nodes, c.Replication, c.Shards, c.ElectionTimeout = 3, 3, 1, pick(500*time.Millisecond, time.Second)
	c.Rate, c.LogMaxBytes = []float64{15, 30}[r.IntN(2)], []uint64{32 << 10, 128 << 10}[r.IntN(2)]
	c.Round, c.MaxHold, c.MaxGap = min(30*time.Second, simulated), pick(time.Second, 3*time.Second), pick(time.Second, 2*time.Second)
	c.AtOnce, c.LateCopies, c.LostRequests = 1+r.IntN(2), 0.05, 0.02
	c.Look, c.Astray, c.Schemes = 50*time.Millisecond, 0.4, 4
	return c
}

// Rollbacks are storms over a cluster that makes checkpoints, into an object store
// that fails, and goes back to one of them again and again.
const Rollbacks Kind = "rollbacks"

// rolling draws such a run. Seeds of their own begin at 70000.
func rolling(seed uint64, simulated time.Duration) Config {
	c, r := storm(seed, simulated)
	pick := func(ds ...time.Duration) time.Duration { return ds[r.IntN(len(ds))] }
	c.Rollbacks, c.LocalLinks, c.Changelog = true, r.IntN(3) == 0, r.IntN(3) == 0
	c.Rate, c.LogMaxBytes = []float64{1, 3, 8}[r.IntN(3)], []uint64{32 << 10, 128 << 10, 1 << 20}[r.IntN(3)]
	c.Round, c.MaxHold, c.MaxGap = min(pick(30*time.Second, time.Minute, 3*time.Minute), simulated), pick(2*time.Second, 10*time.Second), pick(time.Second, 10*time.Second)
	return c
}
