package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/keygroup"
)

// dataset is keys with values that do not compress. A value follows from its key's
// number and the round in which it was written.
type dataset struct {
	client     *keel.Client
	state      *keel.Value[[]byte]
	keys       int
	valueBytes int
}

const (
	dataWriters    = 4
	dataBatchBytes = 1 << 20
	maxDataBatch   = 4000
)

func openDataset(ctx context.Context, f *fleet, keys, valueBytes int) (*dataset, error) {
	client, err := f.open(ctx)
	if err != nil {
		return nil, err
	}
	state, err := values(ctx, client)
	if err != nil {
		return nil, errors.Join(err, closeClient(client))
	}
	return &dataset{client: client, state: state, keys: keys, valueBytes: valueBytes}, nil
}

func (d *dataset) close() error { return closeClient(d.client) }

func (d *dataset) value(i, round int) []byte {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[0:], uint64(i))
	binary.LittleEndian.PutUint64(seed[8:], uint64(round))
	v := make([]byte, d.valueBytes)
	_, _ = rand.NewChaCha8(seed).Read(v) // never fails
	return v
}

// putAll writes every key.
func (d *dataset) putAll(ctx context.Context, round int) error {
	return d.put(ctx, round, d.keys, func(n int) int { return n })
}

// putSpread writes so many keys at equal distances over all of them.
func (d *dataset) putSpread(ctx context.Context, round, count int) error {
	step := max(d.keys/count, 1)
	return d.put(ctx, round, min(count, d.keys), func(n int) int { return n * step })
}

// putClustered writes so many keys that lie next to each other: those of the first
// key groups.
func (d *dataset) putClustered(ctx context.Context, round, count int) error {
	topology, err := d.client.Topology(ctx)
	if err != nil {
		return err
	}
	byGroup := make([][]int, topology.GetKeyGroups())
	for i := range d.keys {
		b, err := keel.String.Encode(fillKey(i))
		if err != nil {
			return err
		}
		g, err := keygroup.GroupOfKey(keel.String.Type(), b, len(byGroup))
		if err != nil {
			return err
		}
		byGroup[g] = append(byGroup[g], i)
	}
	keys := slices.Concat(byGroup...)
	return d.put(ctx, round, min(count, len(keys)), func(n int) int { return keys[n] })
}

// put writes keys, given by a function from 0 to count-1.
func (d *dataset) put(ctx context.Context, round, count int, key func(int) int) error {
	per := min(max(dataBatchBytes/d.valueBytes, 1), maxDataBatch)
	errs := make(chan error, dataWriters)
	var next atomic.Int64
	for range dataWriters {
		go func() {
			for {
				lo := int(next.Add(int64(per))) - per
				if lo >= count {
					errs <- nil
					return
				}
				b := d.client.Batch()
				for n := lo; n < min(lo+per, count); n++ {
					i := key(n)
					b.Add(d.state.SetOp(fillKey(i), d.value(i, round)))
				}
				if _, err := b.Commit(ctx); err != nil {
					errs <- fmt.Errorf("writing from key %d on: %w", lo, err)
					return
				}
			}
		}()
	}
	var err error
	for range dataWriters {
		err = errors.Join(err, <-errs)
	}
	return err
}

// check compares some keys with the round in which they were written last.
func (d *dataset) check(ctx context.Context, round, count int) error {
	step := max(d.keys/count, 1)
	for i := 0; i < d.keys; i += step {
		got, found, err := d.state.Get(ctx, fillKey(i))
		if err != nil {
			return err
		}
		if !found || !bytes.Equal(got, d.value(i, round)) {
			return fmt.Errorf("%s does not have what was written in round %d", fillKey(i), round)
		}
	}
	return nil
}
