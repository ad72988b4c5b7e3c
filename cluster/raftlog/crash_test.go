package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

// modelGroup is what one group should hold. Its worker is the only writer.
type modelGroup struct {
	generation uint64
	tombstone  bool
	exists     bool
	first      uint64
	entries    []*raft.Log
	stable     map[string][]byte
	term       uint64
}

func (m *modelGroup) clone() *modelGroup {
	c := *m
	c.entries = append([]*raft.Log(nil), m.entries...)
	c.stable = map[string][]byte{}
	for k, v := range m.stable {
		c.stable[k] = v
	}
	return &c
}

func (m *modelGroup) String() string {
	if !m.exists {
		return "none"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "gen %d tomb %t", m.generation, m.tombstone)
	for _, e := range m.entries {
		fmt.Fprintf(&b, " %d:%d:%d:%s", e.Index, e.Term, e.Type, e.Data)
	}
	for _, k := range sortedKeys(m.stable) {
		fmt.Fprintf(&b, " %s=%x", k, m.stable[k])
	}
	return b.String()
}

// history is the sequence of states of one group: of those, acked were confirmed
// and at most one more is under way.
type history struct {
	mu     sync.Mutex
	acked  int
	states []*modelGroup
}

func (h *history) bounds() (acked, started int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.acked, len(h.states) - 1
}

// step does one random operation on a group and on its model.
func (h *history) step(rng *rand.Rand, l *Log, id base.GroupID) error {
	h.mu.Lock()
	m := h.states[len(h.states)-1].clone()
	h.mu.Unlock()
	call := m.change(rng, l, id)
	h.mu.Lock()
	h.states = append(h.states, m)
	h.mu.Unlock()
	if err := call(); err != nil {
		return err
	}
	h.mu.Lock()
	h.acked = len(h.states) - 1
	h.mu.Unlock()
	return nil
}

// change makes the model's next state and returns the call that should lead there.
func (m *modelGroup) change(rng *rand.Rand, l *Log, id base.GroupID) func() error {
	g := l.Group(id)
	op := rng.Intn(100)
	if m.tombstone {
		m.generation, m.tombstone = m.generation+1, false
		gen := m.generation
		return func() error { return l.CreateGroup(id, gen) }
	}
	m.exists = true
	switch {
	case op < 3:
		*m = modelGroup{generation: m.generation, tombstone: true, exists: true, stable: map[string][]byte{}}
		return func() error { return l.Tombstone(id) }
	case op < 25:
		m.term += uint64(rng.Intn(3))
		key := []string{keyCurrentTerm, keyLastVoteTerm}[rng.Intn(2)]
		term := m.term
		m.stable[key] = binary.BigEndian.AppendUint64(nil, term)
		return func() error { return g.SetUint64([]byte(key), term) }
	case op < 45 && len(m.entries) > 0:
		hi := m.first + uint64(rng.Intn(len(m.entries)))
		m.entries, m.first = m.entries[hi-m.first+1:], hi+1
		return func() error { return g.DeleteRange(0, hi) }
	case op < 55 && len(m.entries) > 0:
		lo := m.first + uint64(rng.Intn(len(m.entries)))
		m.entries = m.entries[:lo-m.first]
		return func() error { return g.DeleteRange(lo, lo+1000) }
	}
	next := m.first + uint64(len(m.entries))
	if len(m.entries) == 0 {
		next += uint64(rng.Intn(20)) + 1
		m.first = next
	}
	var batch []*raft.Log
	for k := range uint64(rng.Intn(6) + 1) {
		data := fmt.Sprintf("%d.%d.%s", id, rng.Int31(), strings.Repeat("x", rng.Intn(200)))
		batch = append(batch, entry(next+k, m.term, raft.LogType(rng.Intn(2)), data))
	}
	m.entries = append(m.entries, batch...)
	return func() error { return g.StoreLogs(batch) }
}

// crashPoint is a crash before one call of the file system, with what had to
// survive it and what may have: positions in the histories.
type crashPoint struct {
	fs       *vfs.Mem
	op       vfs.Op
	seed     int64
	low, up  []int
	original []*history
}

const crashGroups = 5

type crashRun struct {
	t      *testing.T
	opt    Options
	states int // crash states checked
}

// life opens a log on a crashed file system, works on it, and crashes it at random
// calls. It returns the crash points.
func (r *crashRun) life(mem *vfs.Mem, start []*modelGroup, seed int64, steps int, every int) []crashPoint {
	histories := make([]*history, crashGroups)
	for k := range histories {
		histories[k] = &history{states: []*modelGroup{start[k]}}
	}
	var mu sync.Mutex
	rng := rand.New(rand.NewSource(seed))
	var points []crashPoint
	fsys := vfs.Faulty(mem, func(op vfs.Op) vfs.Fault {
		switch op.Kind {
		case vfs.OpWrite, vfs.OpSync, vfs.OpSyncDir, vfs.OpCreate, vfs.OpRemove, vfs.OpTruncate:
		default:
			return vfs.Fault{}
		}
		mu.Lock()
		defer mu.Unlock()
		if rng.Intn(every) != 0 {
			return vfs.Fault{}
		}
		p := crashPoint{op: op, seed: rng.Int63(), original: histories}
		for _, h := range histories {
			acked, _ := h.bounds()
			p.low = append(p.low, acked)
		}
		p.fs = mem.CrashClone(p.seed)
		for _, h := range histories {
			_, started := h.bounds()
			p.up = append(p.up, started)
		}
		points = append(points, p)
		return vfs.Fault{}
	})
	opt := r.opt
	opt.FS = fsys
	l, err := Open("log", opt)
	if err != nil {
		r.t.Fatalf("seed %d: opening: %v", seed, err)
	}
	var wg sync.WaitGroup
	for k, h := range histories {
		wg.Add(1)
		go func() {
			defer wg.Done()
			worker := rand.New(rand.NewSource(seed + int64(k)))
			for range steps {
				if err := h.step(worker, l, base.GroupID(k)); err != nil {
					r.t.Errorf("seed %d: %s: %v", seed, base.GroupID(k), err)
					return
				}
			}
		}()
	}
	wg.Wait()
	must(r.t, l.Close())
	return points
}

// check recovers a crash state and returns the states that it found (RL1, RL3).
func (r *crashRun) check(p crashPoint, seed int64) []*modelGroup {
	r.states++
	opt := r.opt
	opt.FS = p.fs
	l, err := Open("log", opt)
	if err != nil {
		r.t.Fatalf("seed %d, crash seed %d before %+v: opening: %v", seed, p.seed, p.op, err)
	}
	defer func() { must(r.t, l.Close()) }()
	found := make([]*modelGroup, crashGroups)
	for k, h := range p.original {
		got, err := describe(l.Group(base.GroupID(k)))
		must(r.t, err)
		for s := p.low[k]; s <= p.up[k] && found[k] == nil; s++ {
			if h.states[s].String() == got {
				found[k] = h.states[s]
			}
		}
		if found[k] == nil {
			r.t.Fatalf("seed %d, crash seed %d before %+v: group %d holds\n%s\nacknowledged was\n%s\nlast begun was\n%s",
				seed, p.seed, p.op, k, got, h.states[p.low[k]], h.states[p.up[k]])
		}
	}
	return found
}

func emptyModels() []*modelGroup {
	out := make([]*modelGroup, crashGroups)
	for k := range out {
		out[k] = &modelGroup{stable: map[string][]byte{}}
	}
	return out
}

// TestCrashKeepsWhatWasAcknowledged crashes a log of many groups at thousands of
// points, each with other parts of the unsynced bytes and names surviving, then
// lives on from some of them and crashes again. Every acknowledged write is
// there, nothing is invented, terms never go back (case B15).
func TestCrashKeepsWhatWasAcknowledged(t *testing.T) {
	r := &crashRun{t: t, opt: small()}
	lives := 12
	if testing.Short() {
		lives = 6
	}
	for seed := range int64(lives) {
		r.opt.MarkDelay = []time.Duration{-1, time.Nanosecond}[seed%2]
		r.opt.PreallocateBytes = []int64{-1, 512, 4 << 10}[seed%3]
		first := r.life(vfs.NewMem(), emptyModels(), seed*1000, 40, 3)
		for k, p := range first {
			start := r.check(p, seed)
			if k%20 != 0 {
				continue
			}
			for _, q := range r.life(p.fs, start, seed*1000+int64(k)+1, 15, 4) {
				r.check(q, seed)
			}
		}
	}
	t.Logf("%d crash states", r.states)
	if !testing.Short() && r.states < 2000 {
		t.Fatalf("only %d crash states were reached", r.states)
	}
}

// TestCrashWithoutSyncLosesData proves that the crash test can fail: on a file
// system that lies about fsync, acknowledged writes must be found missing.
func TestCrashWithoutSyncLosesData(t *testing.T) {
	for seed := range int64(50) {
		mem := vfs.NewMem()
		l := mustOpen(t, lyingFS{mem}, small())
		must(t, l.Group(1).StoreLogs(entries(1, 10, 1)))
		clone := mem.CrashClone(seed)
		must(t, l.Close())
		l, err := Open("log", Options{FS: clone})
		if err != nil {
			if !errors.Is(err, base.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		last, err := l.Group(1).LastIndex()
		must(t, err)
		must(t, l.Close())
		if last != 10 {
			return
		}
	}
	t.Fatal("no crash of a lying disk lost anything: the memory file system is too kind")
}

// lyingFS opens files whose fsync does nothing.
type lyingFS struct{ vfs.FS }

type lyingFile struct{ vfs.File }

func (lyingFile) Sync() error     { return nil }
func (lyingFile) SyncData() error { return nil }

func (f lyingFS) Create(name string) (vfs.File, error) {
	file, err := f.FS.Create(name)
	return lyingFile{file}, err
}
