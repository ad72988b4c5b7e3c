package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/objectstore/s3"
	"github.com/keelstate/keelstate/snapshot"
)

// fetchedBytes are what nodes have read from the object store since they started.
func (f *fleet) fetchedBytes(ctx context.Context, nodes ...*fleetNode) (float64, error) {
	return sumOver(ctx, nodes, "keelstate_object_store_bytes_total", `op="get"`)
}

// measureRollback is part rollback: with what the nodes have kept, and from the
// store.
func (o *checkpointOptions) measureRollback(ctx context.Context) error {
	return o.with(ctx, storeFile, func(f *fleet) (err error) {
		d, err := o.bigState(ctx, f, o.big, checkpointShards, "--checkpoint-local-links")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, d.close()) }()
		c, err := o.takeCheckpoint(ctx, d.client, "rollback", "the checkpoint")
		if err != nil {
			return err
		}
		for round := range o.rounds {
			if err := o.rollBackOnce(ctx, f, d, c.GetNumber(), round+1, "local links"); err != nil {
				return err
			}
		}
		// Without what was kept.
		if err := f.restart(ctx); err != nil {
			return err
		}
		for round := range o.rounds {
			// New files, so that nothing of the checkpoint is in the live stores.
			if err := f.compact(ctx, d.client); err != nil {
				return err
			}
			if err := o.rollBackOnce(ctx, f, d, c.GetNumber(), o.rounds+round+1, "from the store"); err != nil {
				return err
			}
		}
		return nil
	})
}

// rollBackOnce changes a tenth of the state and rolls it back.
func (o *checkpointOptions) rollBackOnce(ctx context.Context, f *fleet, d *dataset, number uint64, round int, how string) error {
	if err := d.putSpread(ctx, round, d.keys/10); err != nil {
		return err
	}
	w, err := startWriters(ctx, d)
	if err != nil {
		return err
	}
	defer w.stop()
	if err := wait(ctx, time.Second); err != nil {
		return err
	}
	load := loadAverage()
	fetched, err := f.fetchedBytes(ctx, f.nodes...)
	if err != nil {
		return err
	}
	start := time.Now()
	r, err := rollBack(ctx, d.client, number)
	if err != nil {
		return err
	}
	if err := wait(ctx, time.Second); err != nil { // all shards answer again
		return err
	}
	after, err := f.fetchedBytes(ctx, f.nodes...)
	if err != nil {
		return err
	}
	if err := d.check(ctx, 0, 1000); err != nil {
		return err
	}
	return o.show("rollback", how, load, figure{"s", r.total.Seconds()}, figure{"writes_stood_ms", ms(w.pause(start))},
		figure{"prepare_ms", ms(r.phases["prepare"])}, figure{"fence_ms", ms(r.phases["fence"])}, figure{"swap_ms", ms(r.phases["swap"])},
		figure{"open_ms", ms(r.phases["open"])}, figure{"fetched_bytes", after - fetched})
}

// measureRestore is part restore: new clusters from a service that speaks S3,
// beside cp of the same files.
func (o *checkpointOptions) measureRestore(ctx context.Context) error {
	return o.with(ctx, storeS3, func(f *fleet) error {
		d, err := o.bigState(ctx, f, o.big, checkpointShards)
		if err != nil {
			return err
		}
		c, err := o.takeCheckpoint(ctx, d.client, "restore", "the checkpoint")
		if err := errors.Join(err, d.close()); err != nil {
			return err
		}
		f.dropNodes()
		for range o.rounds {
			if err := errors.Join(o.copyFiles(ctx, f), o.fetchFiles(ctx, f, c)); err != nil {
				return err
			}
		}
		for _, nodes := range []int{1, 3} {
			for range o.rounds {
				if err := o.restoreOnce(ctx, f, c, nodes); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// copyFiles measures cp of what the store holds, without and with making it durable.
func (o *checkpointOptions) copyFiles(ctx context.Context, f *fleet) error {
	from, to := filepath.Join(f.objects(), gatewayBucket), filepath.Join(f.dir, "copy")
	size, _, err := sizeOf(from)
	if err != nil {
		return err
	}
	load, start := loadAverage(), time.Now()
	if out, err := exec.CommandContext(ctx, "cp", "-r", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("cp: %w: %s", err, bytes.TrimSpace(out))
	}
	copied := time.Since(start)
	if out, err := exec.CommandContext(ctx, "sync", "-f", to).CombinedOutput(); err != nil {
		return fmt.Errorf("sync: %w: %s", err, bytes.TrimSpace(out))
	}
	durable := time.Since(start)
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	return o.show("restore", "cp -r of the same files", load, figure{"s", copied.Seconds()}, figure{"MB/s", perSecond(size, copied)},
		figure{"with_sync_s", durable.Seconds()}, figure{"with_sync_MB/s", perSecond(size, durable)})
}

func perSecond(n int64, d time.Duration) float64 { return float64(n) / 1e6 / d.Seconds() }

// fetchFiles measures what a node does first: it brings the files of all shards here,
// compared and durable.
func (o *checkpointOptions) fetchFiles(ctx context.Context, f *fleet, c *keelstatepb.Checkpoint) error {
	store, err := s3.Open(s3.Options{Endpoint: f.gatewayAddress, Bucket: gatewayBucket, Region: "us-east-1", Insecure: true,
		Addressing: s3.AddressPath, AccessKey: gatewayKey, SecretKey: gatewaySecret})
	if err != nil {
		return err
	}
	key := strings.TrimPrefix(c.GetUri(), "s3://"+gatewayBucket+"/")
	key = strings.TrimSuffix(key, "/_metadata") + "/_metadata"
	read, _, err := snapshot.ReadCheckpoint(ctx, store, key, [32]byte{})
	if err != nil {
		return errors.Join(err, store.Close())
	}
	to := filepath.Join(f.dir, "fetched")
	load, start := loadAverage(), time.Now()
	var size atomic.Int64
	g, gctx := errgroup.WithContext(ctx) // a node makes its replicas beside each other
	for i := range read.Shards {
		g.Go(func() error {
			m, err := read.ReadManifest(gctx, store, &read.Shards[i])
			if err != nil {
				return err
			}
			size.Add(m.Bytes())
			return snapshot.Fetch(gctx, snapshot.StoreSource(store, m), m, filepath.Join(to, m.Group.String()), snapshot.FetchOptions{Parallel: 8})
		})
	}
	if err := g.Wait(); err != nil {
		return errors.Join(err, store.Close())
	}
	took := time.Since(start)
	if err := errors.Join(os.RemoveAll(to), store.Close()); err != nil {
		return err
	}
	return o.show("restore", "fetch of all files, one process", load, figure{"s", took.Seconds()}, figure{"MB/s", perSecond(size.Load(), took)})
}

// restoreOnce founds a new cluster with the checkpoint.
func (o *checkpointOptions) restoreOnce(ctx context.Context, f *fleet, c *keelstatepb.Checkpoint, nodes int) error {
	if err := f.start(ctx, nodes); err != nil {
		return err
	}
	load, start := loadAverage(), time.Now()
	if err := f.found(ctx, "--shards", checkpointShards, "--restore", c.GetUri()); err != nil {
		return err
	}
	took := time.Since(start)
	fetched, err := f.fetchedBytes(ctx, f.nodes...)
	if err != nil {
		return err
	}
	d, err := openDataset(ctx, f, int(o.big/bigValue), bigValue)
	if err != nil {
		return err
	}
	if err := errors.Join(d.check(ctx, 0, 1000), d.close()); err != nil {
		return err
	}
	f.dropNodes()
	return o.show("restore", fmt.Sprintf("init --restore, %d nodes", nodes), load, figure{"s", took.Seconds()},
		figure{"MB/s", perSecond(int64(fetched), took)}, figure{"fetched_bytes", fetched})
}

// measureCatchUp is part catchup: a replica of one large shard is rebuilt.
func (o *checkpointOptions) measureCatchUp(ctx context.Context) error {
	return o.with(ctx, storeFile, func(f *fleet) (err error) {
		d, err := o.bigState(ctx, f, o.big, "1")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, d.close()) }()
		if _, err := o.takeCheckpoint(ctx, d.client, "catchup", "a checkpoint"); err != nil {
			return err
		}
		for range o.rounds {
			if err := o.catchUpOnce(ctx, f, d, "from a peer", nil); err != nil {
				return err
			}
		}
		for range o.rounds {
			if err := o.catchUpOnce(ctx, f, d, "from the store", o.leadFromUploader, "--rebuild-from", "store"); err != nil {
				return err
			}
		}
		return nil
	})
}

// leadFromUploader makes the node that uploads the shard its leader, with a new
// snapshot, whose files the store has: others' differ.
func (o *checkpointOptions) leadFromUploader(ctx context.Context, d *dataset) error {
	c, _, err := checkpoint(ctx, d.client)
	if err != nil {
		return err
	}
	if _, err := moveLeaders(ctx, d, c); err != nil {
		return err
	}
	return d.client.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := keelstatepb.NewAdminClient(conn).SnapshotShard(ctx, &keelstatepb.SnapshotShardRequest{Shard: c.GetShards()[0].GetShard()})
		return err
	}, keel.AttemptTimeout(time.Minute))
}

// catchUpOnce has a follower's replica rebuilt while writes go on.
// before, if not nil, is done first, when the writes have begun.
func (o *checkpointOptions) catchUpOnce(ctx context.Context, f *fleet, d *dataset, how string, before func(context.Context, *dataset) error, flags ...string) error {
	p := &pacer{perSecond: o.catchUpRate, call: d.randomWrite(d.keys)}
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
	if before != nil {
		if err := before(ctx, d); err != nil {
			return err
		}
	}
	topology, err := d.client.Topology(ctx)
	if err != nil {
		return err
	}
	shard := topology.GetShards()[0]
	victim := f.nodes[0]
	for _, n := range f.nodes {
		if n.id != shard.GetLeaderHint() && n.id != topology.GetSystemLeaderHint() {
			victim = n
		}
	}
	rebuild, err := f.damage(ctx, victim, shard.GetId(), flags...)
	if err != nil {
		return err
	}
	if err := f.rebuilt(ctx, victim, shard.GetId()); err != nil {
		return err
	}
	rebuild.to = time.Now()
	stop()
	<-ended
	fetched, err := f.fetchedBytes(ctx, victim)
	if err != nil {
		return err
	}
	q, c := p.within(quiet), p.within(rebuild)
	if err := errors.Join(q.first, c.first); err != nil {
		return fmt.Errorf("%d of the writes failed, the first: %w", q.errors+c.errors, err)
	}
	return o.show("catchup", fmt.Sprintf("%s, %d writes/s", how, o.catchUpRate), load, figure{"s", rebuild.to.Sub(rebuild.from).Seconds()},
		figure{"writes/s", c.perSecond}, figure{"p50_ms", c.p50}, figure{"p99_ms", c.p99}, figure{"max_ms", c.max}, figure{"before_writes/s", q.perSecond},
		figure{"before_p99_ms", q.p99}, figure{"from_store_bytes", fetched})
}

// damage kills a node, marks its replica as damaged, and starts it again: the
// replica is rebuilt under rule R3. The span begins with the start.
func (f *fleet) damage(ctx context.Context, n *fleetNode, shard uint64, flags ...string) (span, error) {
	n.process.signal(syscall.SIGKILL)
	<-n.process.gone
	generations, err := filepath.Glob(filepath.Join(f.data(n), "groups", fmt.Sprint(shard), "[0-9]*"))
	if err != nil || len(generations) == 0 {
		return span{}, fmt.Errorf("%s has no replica of shard %d: %w", n.id, shard, errors.Join(err, os.ErrNotExist))
	}
	for _, g := range generations {
		if err := os.WriteFile(filepath.Join(g, "DAMAGED"), []byte("a measurement wants it to be rebuilt\n"), 0o640); err != nil {
			return span{}, err
		}
	}
	s := span{from: time.Now()}
	return s, f.startNode(ctx, n, flags...)
}

// rebuilt waits until the node's replica of the shard is a member that votes, which
// under R3 means that it has all that was committed when it came.
func (f *fleet) rebuilt(ctx context.Context, n *fleetNode, shard uint64) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///"+n.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	state := "it has not answered"
	for {
		r, err := keelstatepb.NewAdminClient(conn).NodeStatus(ctx, &keelstatepb.NodeStatusRequest{})
		for _, g := range r.GetGroups() {
			if g.GetGroup() != shard {
				continue
			}
			if g.GetVoter() && g.GetReady() && g.GetDamage() == "" {
				return nil
			}
			state = fmt.Sprintf("it is %s, damage %q, index %d", g.GetState(), g.GetDamage(), g.GetAppliedIndex())
		}
		if e := wait(ctx, 20*time.Millisecond); e != nil {
			return fmt.Errorf("the replica of shard %d on %s was not rebuilt: %s: %w", shard, n.id, state, errors.Join(e, err))
		}
	}
}
