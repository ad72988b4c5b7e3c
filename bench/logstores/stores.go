package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/raft"
	raftwal "github.com/hashicorp/raft-wal"

	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/internal/base"
)

// nodeStore is the log store of one node for all its groups.
type nodeStore interface {
	group(g int) (raft.LogStore, raft.StableStore)
	// syncs is the number of fsyncs so far, 0 where the store does not say.
	syncs() int64
	close()
}

// cached puts raft's own cache before stores that have none.
func cached(s raft.LogStore) raft.LogStore {
	c, err := raft.NewLogCache(512, s)
	check(err)
	return c
}

func openStore(kind, dir string, groups int) (nodeStore, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	switch kind {
	case "raftlog":
		s := &raftlogStore{}
		var err error
		s.log, err = raftlog.Open(dir, raftlog.Options{Metrics: raftlog.Metrics{SyncSeconds: func(float64) { s.n.Add(1) }}})
		return s, err
	case "raftwal":
		s := &walStore{}
		for g := range groups {
			sub := fmt.Sprintf("%s/g%d", dir, g)
			if err := os.MkdirAll(sub, 0o755); err != nil {
				return nil, err
			}
			w, err := raftwal.Open(sub)
			if err != nil {
				return nil, err
			}
			s.wals = append(s.wals, w)
		}
		return s, nil
	case "pebble":
		db, err := pebble.Open(dir, &pebble.Options{MemTableSize: 64 << 20, Logger: quiet{}})
		return &pebbleStore{db: db}, err
	case "mem":
		s := &memStore{}
		for range groups {
			s.stores = append(s.stores, raft.NewInmemStore())
		}
		return s, nil
	}
	return nil, fmt.Errorf("no store %q", kind)
}

type raftlogStore struct {
	log *raftlog.Log
	n   atomic.Int64
}

func (s *raftlogStore) group(g int) (raft.LogStore, raft.StableStore) {
	l := s.log.Group(base.GroupID(g))
	return l, l
}
func (s *raftlogStore) syncs() int64 { return s.n.Load() }
func (s *raftlogStore) close()       { check(s.log.Close()) }

type walStore struct{ wals []*raftwal.WAL }

func (s *walStore) group(g int) (raft.LogStore, raft.StableStore) {
	return cached(s.wals[g]), s.wals[g]
}
func (s *walStore) syncs() int64 { return 0 }
func (s *walStore) close() {
	for _, w := range s.wals {
		check(w.Close())
	}
}

type memStore struct{ stores []*raft.InmemStore }

func (s *memStore) group(g int) (raft.LogStore, raft.StableStore) { return s.stores[g], s.stores[g] }
func (s *memStore) syncs() int64                                  { return 0 }
func (s *memStore) close()                                        {}

// quiet drops Pebble's log.
type quiet struct{}

func (quiet) Infof(string, ...any)         {}
func (quiet) Errorf(string, ...any)        {}
func (quiet) Fatalf(f string, args ...any) { check(fmt.Errorf(f, args...)) }

// pebbleStore keeps all groups of a node in one Pebble, which group-commits.
type pebbleStore struct{ db *pebble.DB }

func (s *pebbleStore) group(g int) (raft.LogStore, raft.StableStore) {
	p := &pebbleGroup{db: s.db, g: uint64(g)}
	return cached(p), p
}
func (s *pebbleStore) syncs() int64 { return 0 }
func (s *pebbleStore) close()       { check(s.db.Close()) }

type pebbleGroup struct {
	db *pebble.DB
	g  uint64
}

func (p *pebbleGroup) logKey(i uint64) []byte {
	b := binary.BigEndian.AppendUint64(nil, p.g)
	return binary.BigEndian.AppendUint64(append(b, 'l'), i)
}

func (p *pebbleGroup) stableKey(k []byte) []byte {
	return append(append(binary.BigEndian.AppendUint64(nil, p.g), 's'), k...)
}

func (p *pebbleGroup) bound(last bool) (uint64, error) {
	it, err := p.db.NewIter(&pebble.IterOptions{LowerBound: p.logKey(0), UpperBound: p.stableKey(nil)})
	if err != nil {
		return 0, err
	}
	found := false
	if last {
		found = it.Last()
	} else {
		found = it.First()
	}
	i := uint64(0)
	if found {
		i = binary.BigEndian.Uint64(it.Key()[9:])
	}
	return i, it.Close()
}

func (p *pebbleGroup) FirstIndex() (uint64, error) { return p.bound(false) }
func (p *pebbleGroup) LastIndex() (uint64, error)  { return p.bound(true) }
func (p *pebbleGroup) StoreLog(e *raft.Log) error  { return p.StoreLogs([]*raft.Log{e}) }
func (p *pebbleGroup) get(k []byte) ([]byte, error) {
	v, c, err := p.db.Get(k)
	if err != nil {
		return nil, err
	}
	return append([]byte{}, v...), c.Close()
}

func (p *pebbleGroup) GetLog(i uint64, out *raft.Log) error {
	v, err := p.get(p.logKey(i))
	if errors.Is(err, pebble.ErrNotFound) {
		return raft.ErrLogNotFound
	}
	if err != nil {
		return err
	}
	*out = raft.Log{Index: i, Term: binary.BigEndian.Uint64(v), Type: raft.LogType(v[8]), Data: v[9:]}
	return nil
}

func (p *pebbleGroup) StoreLogs(logs []*raft.Log) error {
	b := p.db.NewBatch()
	for _, e := range logs {
		d := b.SetDeferred(17, 9+len(e.Data))
		copy(d.Key, p.logKey(e.Index))
		binary.BigEndian.PutUint64(d.Value, e.Term)
		d.Value[8] = byte(e.Type)
		copy(d.Value[9:], e.Data)
		if err := d.Finish(); err != nil {
			return err
		}
	}
	return errors.Join(b.Commit(pebble.Sync), b.Close())
}

func (p *pebbleGroup) DeleteRange(lo, hi uint64) error {
	return p.db.DeleteRange(p.logKey(lo), p.logKey(hi+1), pebble.Sync)
}

func (p *pebbleGroup) Set(k, v []byte) error { return p.db.Set(p.stableKey(k), v, pebble.Sync) }

func (p *pebbleGroup) Get(k []byte) ([]byte, error) {
	v, err := p.get(p.stableKey(k))
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, base.ErrNotFound
	}
	return v, err
}

func (p *pebbleGroup) SetUint64(k []byte, v uint64) error {
	return p.Set(k, binary.BigEndian.AppendUint64(nil, v))
}

func (p *pebbleGroup) GetUint64(k []byte) (uint64, error) {
	v, err := p.Get(k)
	if err != nil {
		return 0, err
	}
	return binary.BigEndian.Uint64(v), nil
}
