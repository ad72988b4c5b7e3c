package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

const (
	checkpointShards = "4"
	// bigValue is the size of the values where the state is given in bytes.
	bigValue = 1000
	// changedBytes are written between two checkpoints in part modes.
	changedBytes = 10_000_000
)

// measureCheckpoints is part checkpoint: many small values over four shards.
func (o *checkpointOptions) measureCheckpoints(ctx context.Context) error {
	for _, store := range strings.Split(o.stores, ",") {
		err := o.with(ctx, store, func(f *fleet) error { return o.checkpointsOn(ctx, f) })
		if err != nil {
			return fmt.Errorf("store %s: %w", store, err)
		}
	}
	return nil
}

func (o *checkpointOptions) checkpointsOn(ctx context.Context, f *fleet) (err error) {
	if err := errors.Join(f.start(ctx, 3), f.found(ctx, "--shards", checkpointShards)); err != nil {
		return err
	}
	d, err := openDataset(ctx, f, o.keys, o.valueBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	if err := d.putAll(ctx, 0); err != nil {
		return err
	}
	if err := f.compact(ctx, d.client); err != nil {
		return err
	}
	if _, err := o.takeCheckpoint(ctx, d.client, "checkpoint", f.store+", first"); err != nil {
		return err
	}
	round, share := 0, o.keys/100
	for _, c := range []struct {
		name string
		put  func(context.Context, int, int) error
	}{{"1 % changed, spread", d.putSpread}, {"1 % changed, clustered", d.putClustered}} {
		for range o.rounds {
			// Settled: what was changed before has been compacted, and stored.
			if err := f.compact(ctx, d.client); err != nil {
				return err
			}
			if _, _, err := checkpoint(ctx, d.client); err != nil {
				return err
			}
			round++
			if err := c.put(ctx, round, share); err != nil {
				return err
			}
			if _, err := o.takeCheckpoint(ctx, d.client, "checkpoint", f.store+", "+c.name); err != nil {
				return err
			}
		}
	}
	if err := o.writesDuringCheckpoints(ctx, f, d, "followers upload"); err != nil {
		return err
	}
	if err := o.afterTransfer(ctx, f, d, round+1); err != nil {
		return err
	}
	return o.writesDuringCheckpoints(ctx, f, d, "leaders upload")
}

// afterTransfer makes the node that uploads a shard its leader, everywhere.
func (o *checkpointOptions) afterTransfer(ctx context.Context, f *fleet, d *dataset, round int) error {
	if err := f.compact(ctx, d.client); err != nil {
		return err
	}
	before, _, err := checkpoint(ctx, d.client)
	if err != nil {
		return err
	}
	moved, err := moveLeaders(ctx, d, before)
	if err != nil {
		return err
	}
	if err := d.putSpread(ctx, round, o.keys/100); err != nil {
		return err
	}
	_, err = o.takeCheckpoint(ctx, d.client, "checkpoint", fmt.Sprintf("%s, 1 %% changed, leaders of %d shards moved", f.store, moved))
	return err
}

// moveLeaders makes the node that uploaded a shard its leader, and says of how many
// it was not.
func moveLeaders(ctx context.Context, d *dataset, last *keelstatepb.Checkpoint) (moved int, err error) {
	topology, err := d.client.Topology(ctx)
	if err != nil {
		return 0, err
	}
	for _, s := range topology.GetShards() {
		for _, c := range last.GetShards() {
			if c.GetShard() != s.GetId() || c.GetUploader() == s.GetLeaderHint() {
				continue
			}
			moved++
			err := d.client.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
				_, err := keelstatepb.NewAdminClient(conn).TransferLeader(ctx, &keelstatepb.TransferLeaderRequest{Shard: s.GetId(), To: c.GetUploader()})
				return err
			})
			if err != nil {
				return moved, err
			}
		}
	}
	return moved, nil
}

// quietTime is the time in which nothing but writes goes on, behind a warm-up.
func (o *checkpointOptions) quietTime(ctx context.Context) (span, error) {
	if err := wait(ctx, time.Second); err != nil {
		return span{}, err
	}
	quiet := span{from: time.Now()}
	err := wait(ctx, o.quiet)
	quiet.to = time.Now()
	return quiet, err
}

// writesDuringCheckpoints compares the latency of writes in the time of checkpoints
// with that before.
func (o *checkpointOptions) writesDuringCheckpoints(ctx context.Context, f *fleet, d *dataset, who string) error {
	p := &pacer{perSecond: o.rate, call: d.randomWrite(100_000)}
	writing, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.run(writing)
	}()
	load := loadAverage()
	quiet, err := o.quietTime(ctx)
	if err != nil {
		return err
	}
	var during []span
	for range 2 * o.rounds {
		s := span{from: time.Now()}
		if _, _, err := checkpoint(ctx, d.client); err != nil {
			return err
		}
		s.to = time.Now()
		during = append(during, s)
		if err := wait(ctx, 500*time.Millisecond); err != nil {
			return err
		}
	}
	stop()
	<-ended
	if o.verbose {
		p.printSlow(during)
	}
	q, c := p.within(quiet), p.within(during...)
	if err := errors.Join(q.first, c.first); err != nil {
		return fmt.Errorf("%d of the writes failed, the first: %w", q.errors+c.errors, err)
	}
	return o.show("checkpoint", fmt.Sprintf("%s, %d writes/s, %s", f.store, o.rate, who), load, figure{"without_p50_ms", q.p50}, figure{"without_p99_ms", q.p99},
		figure{"without_max_ms", q.max}, figure{"during_calls", float64(c.calls)}, figure{"during_p50_ms", c.p50}, figure{"during_p99_ms", c.p99},
		figure{"during_max_ms", c.max}, figure{"p99_above_ms", c.p99 - q.p99})
}

// randomWrite is a call that writes one of so many keys.
func (d *dataset) randomWrite(keys int) func(context.Context, int) error {
	return func(ctx context.Context, n int) error {
		i := rand.IntN(min(keys, d.keys))
		_, err := d.state.Set(ctx, fillKey(i), d.value(i, n))
		return err
	}
}

// measureModes is part modes: how long checkpoints take by the size of the state
// and the way in which they are made.
func (o *checkpointOptions) measureModes(ctx context.Context) error {
	modes := strings.Split(o.modes, ",")
	if !o.knowsModes(ctx) {
		modes = []string{"incremental"}
	}
	for _, size := range strings.Split(o.sizes, ",") {
		bytes, err := bytesOf(size)
		if err != nil {
			return err
		}
		for _, mode := range modes {
			for _, store := range strings.Split(o.stores, ",") {
				err := o.with(ctx, store, func(f *fleet) error { return o.modeOn(ctx, f, mode, size, bytes) })
				if err != nil {
					return fmt.Errorf("%s, %s, store %s: %w", mode, size, store, err)
				}
			}
		}
	}
	return nil
}

func (o *checkpointOptions) modeOn(ctx context.Context, f *fleet, mode, size string, bytes int64) error {
	var flags []string
	if o.knowsModes(ctx) {
		flags = []string{"--checkpoint-mode", mode}
	}
	d, err := o.bigState(ctx, f, bytes, checkpointShards, flags...)
	if err != nil {
		return err
	}
	of := fmt.Sprintf("%s, %s, %s", f.store, mode, size)
	if _, err = o.takeCheckpoint(ctx, d.client, "modes", of+", first"); err != nil {
		return errors.Join(err, d.close())
	}
	for round := range o.rounds {
		if err = d.putSpread(ctx, round+1, changedBytes/bigValue); err != nil {
			break
		}
		if _, err = o.takeCheckpoint(ctx, d.client, "modes", of+", after 10 MB of writes"); err != nil {
			break
		}
	}
	return errors.Join(err, d.close())
}

// bigState founds three nodes with so many bytes of state, compacted.
func (o *checkpointOptions) bigState(ctx context.Context, f *fleet, bytes int64, shards string, flags ...string) (*dataset, error) {
	if err := f.start(ctx, 3, flags...); err != nil {
		return nil, err
	}
	if err := f.found(ctx, "--shards", shards); err != nil {
		return nil, err
	}
	d, err := openDataset(ctx, f, int(bytes/bigValue), bigValue)
	if err != nil {
		return nil, err
	}
	if err := d.putAll(ctx, 0); err != nil {
		return nil, errors.Join(err, d.close())
	}
	if err := f.compact(ctx, d.client); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

// writers are one prober for each shard, which go on whatever a write says.
type writers struct {
	probers []*prober
	stop    func()
}

func startWriters(ctx context.Context, d *dataset) (*writers, error) {
	topology, err := d.client.Topology(ctx)
	if err != nil {
		return nil, err
	}
	probers, err := newProbers(topology)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{}, len(probers))
	for _, p := range probers {
		go func() {
			for ctx.Err() == nil {
				if p.write(ctx, d.state) != nil {
					_ = wait(ctx, time.Millisecond) // refused: again
				}
			}
			ended <- struct{}{}
		}()
	}
	return &writers{probers: probers, stop: func() {
		cancel()
		for range probers {
			<-ended
		}
	}}, nil
}

// pause is the longest time from a moment on in which a shard answered no write.
func (w *writers) pause(from time.Time) time.Duration {
	longest := time.Duration(0)
	for _, p := range w.probers {
		longest = max(longest, longestPause(p.seen(), from))
	}
	return longest
}

// rolledBack is how long a rollback took.
type rolledBack struct {
	total  time.Duration
	phases map[string]time.Duration // by phase, from its first message to the next phase's
}

func rollBack(ctx context.Context, client *keel.Client, number uint64) (*rolledBack, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	start := time.Now()
	out := &rolledBack{phases: map[string]time.Duration{}}
	var last *keelstatepb.Rollback
	err := client.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		stream, err := keelstatepb.NewCheckpointsClient(conn).RollBack(ctx, &keelstatepb.RollBackRequest{Number: number})
		since := start
		for err == nil {
			var next *keelstatepb.Rollback
			if next, err = stream.Recv(); err != nil {
				break
			}
			if last != nil && next.GetPhase() != last.GetPhase() {
				out.phases[last.GetPhase()] += time.Since(since)
				since = time.Now()
			}
			if last = next; last.GetEnded() {
				return nil
			}
		}
		return err
	}, keel.AttemptTimeout(0))
	out.total = time.Since(start)
	if err == nil && last.GetPhase() != "done" {
		err = fmt.Errorf("the rollback is %s: %s", last.GetPhase(), last.GetError())
	}
	return out, err
}
