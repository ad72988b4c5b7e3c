//go:build linux

package runner

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/host"
)

// shard is what the harness knows of one.
type shard struct {
	id       uint64
	replicas int
}

// listShards asks for the shards of the cluster.
func listShards(ctx context.Context, f *host.Fleet) (all []shard, err error) {
	list, err := f.Shards(ctx)
	for _, s := range list {
		all = append(all, shard{uint64(s.ID), len(s.Replicas)})
	}
	return all, err
}

// healing is what was seen of a cluster after it had been healed.
type healing struct {
	limit time.Duration
	mu    sync.Mutex
	since time.Time
	seen  map[uint64]*check.Healed
	// hashes of all replicas, of the last look and of every that did not agree.
	hashes []check.ReplicaHash
	// last says what was in the way at the last look.
	last map[string]string
	// wrong are answers that no correct cluster gives.
	wrong []check.Detail
}

func newHealing(shards []shard) *healing {
	h := &healing{since: time.Now(), seen: map[uint64]*check.Healed{}, last: map[string]string{}}
	for _, s := range shards {
		h.seen[s.id] = &check.Healed{Shard: s.id, Led: -1, Wrote: -1, Read: -1, Replicas: -1}
	}
	return h
}

// note records that something of a shard was seen, for the first time.
func (h *healing) note(shard uint64, what func(*check.Healed) *time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := h.seen[shard]; s != nil && *what(s) < 0 {
		*what(s) = time.Since(h.since)
	}
}

func (h *healing) complain(who string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last[who] = err.Error()
}

// complete says whether something was seen of every shard.
func (h *healing) complete(what func(*check.Healed) *time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.seen {
		if *what(s) < 0 {
			return false
		}
	}
	return true
}

// What is looked for.
func led(s *check.Healed) *time.Duration    { return &s.Led }
func wrote(s *check.Healed) *time.Duration  { return &s.Wrote }
func read(s *check.Healed) *time.Duration   { return &s.Read }
func agreed(s *check.Healed) *time.Duration { return &s.Replicas }

// heal looks until all that RU4 asks for was seen, or lookLimit has passed.
func (e *episode) heal(ctx context.Context) *healing {
	h := newHealing(e.shards)
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	defer e.env.Supervise()()
	var wg sync.WaitGroup
	wg.Go(func() { e.lookForLeaders(ctx, h) })
	wg.Go(func() { e.lookForHashes(ctx, h) })
	wg.Go(func() { e.probe(ctx, h) })
	wg.Wait()
	return h
}

// until repeats a look until it is enough or ctx ends.
func until(ctx context.Context, every time.Duration, look func() (enough bool)) {
	for !look() {
		timer := time.NewTimer(every)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

func (e *episode) lookForLeaders(ctx context.Context, h *healing) {
	until(ctx, 300*time.Millisecond, func() bool {
		leaders, err := e.fleet.Leaders(ctx)
		if err != nil {
			h.complain("leaders", err)
		}
		for id := range leaders {
			h.note(uint64(id), led)
		}
		return h.complete(led)
	})
}

// lookForHashes compares the replicas until all of every shard agree.
func (e *episode) lookForHashes(ctx context.Context, h *healing) {
	until(ctx, 500*time.Millisecond, func() bool {
		for _, s := range e.shards {
			seen, err := hashes(ctx, e.fleet, s.id)
			if err != nil {
				h.complain("hashes", err)
			}
			h.mu.Lock()
			h.hashes = append(h.hashes, seen...)
			h.mu.Unlock()
			switch check.Hashes([]uint64{s.id}, s.replicas, seen).Verdict {
			case check.Pass:
				h.note(s.id, agreed)
			case check.Fail:
				return true // no later look makes that good
			}
		}
		return h.complete(agreed)
	})
}

// hashLimit is how long replicas may take to reach one index and hash their
// content.
const hashLimit = 10 * time.Second

// hashes asks for the hashes of a shard's replicas that answer: of the content,
// and of what sessions have done.
func hashes(ctx context.Context, f *host.Fleet, id uint64) (all []check.ReplicaHash, err error) {
	answered, err := f.Hashes(ctx, int(id), hashLimit)
	for _, h := range answered {
		all = append(all, check.ReplicaHash{Shard: uint64(h.Shard), Node: h.Node, Applied: h.Index, Hash: h.Content + "/" + h.Ops})
	}
	return all, err
}

// probe writes and reads keys with a client of its own until one of every shard
// was written, and read.
func (e *episode) probe(ctx context.Context, h *healing) {
	client, err := keel.Open(ctx, e.fleet.Endpoints(), keel.WithAttemptTimeout(time.Second))
	if err != nil {
		h.complain("probe", err)
		return
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), farewellLimit)
		defer cancel()
		_ = client.Close(ctx) // its session runs out by its lease
	}()
	var values *keel.Value[int64]
	until(ctx, 200*time.Millisecond, func() bool {
		once, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if values, err = keel.DeclareValue(once, client.Keyspace("jepsen-probe", keel.String.Type()), "probe", keel.Int64); err != nil {
			h.complain("probe", err)
		}
		return err == nil
	})
	if values == nil || err != nil {
		return
	}
	// So many writers that a shard which takes none stops only its own keys.
	var wg sync.WaitGroup
	for n := range 4 * len(e.shards) {
		wg.Go(func() { e.probeKeys(ctx, h, values, n) })
	}
	wg.Wait()
}

// probeKeys tries keys, new ones as long as a shard is missing.
func (e *episode) probeKeys(ctx context.Context, h *healing, values *keel.Value[int64], writer int) {
	n := 0
	until(ctx, 20*time.Millisecond, func() bool {
		if h.complete(wrote) && h.complete(read) {
			return true
		}
		n++
		key := fmt.Sprintf("e%d-%d-%d", e.Number, writer, n)
		once, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		t, err := values.Set(once, key, int64(n))
		if err != nil {
			h.complain("write", err)
			return false
		}
		h.note(t.Shard, wrote)
		if got, found, err := values.Get(once, key); err != nil {
			h.complain("read", err)
		} else if !found || got != int64(n) {
			h.mu.Lock()
			h.wrong = append(h.wrong, check.Detail{Verdict: check.Fail, Key: key,
				Text: fmt.Sprintf("it was written as %d in shard %d and then read as %d, found %v", n, t.Shard, got, found)})
			h.mu.Unlock()
		} else {
			h.note(t.Shard, read)
		}
		return false
	})
}

// results are the verdicts on what was seen.
func (h *healing) results(shards []shard) []check.Result {
	h.mu.Lock()
	defer h.mu.Unlock()
	var healed []check.Healed
	var ids []uint64
	want := 0
	for _, s := range shards {
		healed = append(healed, *h.seen[s.id])
		ids = append(ids, s.id)
		want = max(want, s.replicas)
	}
	live := check.Liveness(healed, h.limit)
	if live.Verdict != check.Pass {
		for _, who := range slices.Sorted(maps.Keys(h.last)) {
			live.Text += "; last of " + who + ": " + h.last[who]
		}
	}
	slowest := func(what func(*check.Healed) *time.Duration) time.Duration {
		var d time.Duration
		for i := range healed {
			d = max(d, *what(&healed[i]))
		}
		live.Elapsed = max(live.Elapsed, d)
		return d.Round(time.Millisecond)
	}
	if live.Verdict == check.Pass {
		live.Text = fmt.Sprintf("after healing every shard led in %s, wrote in %s, read in %s, and all replicas agreed in %s",
			slowest(led), slowest(wrote), slowest(read), slowest(agreed))
	}
	if len(h.wrong) > 0 {
		live.Verdict, live.Text = check.Fail, "after healing "+h.wrong[0].Key+": "+h.wrong[0].Text
		live.Details = append(live.Details, h.wrong[:min(len(h.wrong), 20)]...)
	}
	same := check.Hashes(ids, want, h.hashes)
	if same.Verdict == check.Pass {
		same.Text = fmt.Sprintf("all replicas of %d shards agree", len(ids))
	}
	// Safety first: differing replicas are late, too.
	return []check.Result{same, live}
}
