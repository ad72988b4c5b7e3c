package steps

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// groups are the key groups of the shard; listID is its one state.
const (
	groups                 = 8
	listID engine.FamilyID = 1
)

// shard is one shard: a log, and machines that apply it.
type shard struct {
	loop     *Loop
	meta     *metadata
	log      []raftfsm.Entry
	machines [replicas]*machine
	stamp    uint64
	writes   int
}

type machine struct {
	dir     string
	driver  engine.Driver
	m       *raftfsm.Machine
	store   engine.Store
	applied int // entries of the log
}

func newShard(l *Loop, m *metadata, dir string) (*shard, error) {
	s := &shard{loop: l, meta: m, stamp: 1000}
	for i := range s.machines {
		s.machines[i] = &machine{dir: filepath.Join(dir, fmt.Sprint(i)), driver: mem.NewDriver()}
		if err := s.machines[i].open(); err != nil {
			return nil, err
		}
	}
	s.append(raftfsm.AppendInit(nil, raftfsm.Init{Group: 1, Range: keygroup.FullRange(groups), M: groups, Epoch: 1, Birth: 7, Incarnation: 1, ClockMs: 1000}))
	s.append(raftfsm.AppendDeclare(nil, []state.Declaration{{ID: listID, Keyspace: "k", Name: "l", Kind: state.KindList, KeyType: keygroup.String, ValueType: keygroup.Int64, CodecVersion: 1}}))
	return s, nil
}

func (m *machine) open() error {
	store, err := m.driver.Open(m.dir)
	if err != nil {
		return err
	}
	m.store = store
	m.m, err = raftfsm.Open(store, raftfsm.Options{OnFatal: func(error) {}}) // m.m.Err says it too
	return err
}

func (s *shard) append(cmd []byte) {
	s.log = append(s.log, raftfsm.Entry{Index: uint64(len(s.log)) + 1, Term: 1, Command: cmd})
}

// advance applies entries at a machine and returns what came of the last one.
func (s *shard) advance(i, to int) raftfsm.Outcome {
	m := s.machines[i]
	if m.applied >= to {
		return raftfsm.Outcome{}
	}
	out := m.m.ApplyBatch(s.log[m.applied:to])
	m.applied = to
	if err := m.m.Err(); err != nil {
		s.loop.Problem("machine %d stops: %v", i, err)
	}
	return out[len(out)-1]
}

// crash restarts a machine: what it had not flushed is gone and comes again out
// of the log.
func (s *shard) crash(i int) {
	m := s.machines[i]
	if s.loop.chance(0.5) {
		if err := m.store.Flush(); err != nil {
			s.loop.Problem("flushing machine %d: %v", i, err)
		}
	}
	if err := m.m.Close(); err != nil {
		s.loop.Problem("closing machine %d: %v", i, err)
	}
	if err := m.open(); err != nil {
		s.loop.Problem("opening machine %d: %v", i, err)
		return
	}
	index, _ := m.m.Applied()
	s.loop.Note("machine %d restarts at entry %d of %d", i, index, m.applied)
	m.applied = int(index)
}

// live is the life of the shard: its machines fall behind and restart, and its
// leader, machine 0, forgets the sessions that have ended.
func (s *shard) live() {
	l := s.loop
	for i := range s.machines {
		if i > 0 {
			l.Every(20*time.Millisecond, func() bool {
				s.advance(i, s.machines[i].applied+l.IntN(len(s.log)-s.machines[i].applied+1))
				return true
			})
		}
		l.Every(3*time.Second, func() bool {
			s.crash(i)
			if i == 0 {
				s.advance(0, len(s.log))
			}
			return true
		})
	}
	l.Every(time.Second, func() bool { s.forget(); return true })
}

// forget proposes to forget the sessions that have ended by the leader's copy of
// the metadata.
func (s *shard) forget() {
	v := s.meta.view(s.loop.IntN(replicas))
	view, err := s.machines[0].m.View()
	if err != nil {
		s.loop.Problem("viewing the shard: %v", err)
		return
	}
	defer view.Close()
	ids, err := view.SessionIDs()
	if err != nil {
		s.loop.Problem("listing sessions: %v", err)
		return
	}
	var gone []base.SessionID
	for _, id := range ids {
		if id < v.NextSessionID() && !v.SessionAlive(id) {
			gone = append(gone, id)
		}
	}
	if len(gone) == 0 {
		return
	}
	s.append(raftfsm.AppendForget(nil, v.Revision(), gone))
	out := s.advance(0, len(s.log))
	s.loop.Note("forgetting %v at revision %d: %v", gone, v.Revision(), out.Err)
}

// propose is what the leader does with a request, by some copy of the metadata.
func (s *shard) propose(req *raftfsm.Request, known base.Revision) error {
	i := s.loop.IntN(replicas)
	v := s.meta.view(i)
	if v.Revision() < known { // the leader waits for its copy; here, the client comes again
		return base.ErrNotReady
	}
	if !v.SessionAlive(req.Session) {
		return base.ErrSessionEnded
	}
	encoded, err := raftfsm.AppendRequest(nil, req)
	if err != nil {
		return err
	}
	s.stamp += uint64(s.loop.IntN(20))
	s.append(raftfsm.AppendWrite(nil, s.stamp, v.Revision(), encoded))
	s.writes++
	out := s.advance(0, len(s.log))
	if out.Err != nil {
		return out.Err
	}
	return out.Results[0].Failure()
}

// elements reads the list of a key at the leader.
func (s *shard) elements(key string) []int64 {
	view, err := s.machines[0].m.View()
	if err != nil {
		s.loop.Problem("viewing the shard: %v", err)
		return nil
	}
	defer view.Close()
	q := &state.Query{State: listID, Kind: state.QueryPage, Group: groupOf(key), Key: []byte(key)}
	var out []int64
	for {
		a, err := view.Read(q)
		if err != nil {
			s.loop.Problem("reading %s: %v", key, err)
			return nil
		}
		for _, e := range a.Elements {
			v, err := keygroup.Decode(keygroup.Int64, e)
			if err != nil {
				s.loop.Problem("decoding an element: %v", err)
				return nil
			}
			out = append(out, v.(int64))
		}
		if a.Next == nil {
			return out
		}
		q.Cursor = a.Next
	}
}

func groupOf(key string) keygroup.Group {
	g, err := keygroup.GroupOfKey(keygroup.String, []byte(key), groups)
	if err != nil {
		panic(err) // a string has a code
	}
	return g
}

// settle lets every machine apply everything and compares their hashes (SS2).
func (s *shard) settle() {
	const mark = 99
	s.append(raftfsm.AppendHashMark(nil, mark))
	var content, ops []byte
	for i, m := range s.machines {
		s.advance(i, len(s.log))
		r, err := m.m.HashAt(context.Background(), mark)
		if err != nil {
			s.loop.Problem("hashing machine %d: %v", i, err)
			continue
		}
		c, o := r.Sum()
		if i == 0 {
			content, ops = c, o
		}
		if !bytes.Equal(c, content) || !bytes.Equal(o, ops) {
			s.loop.Problem("machine %d differs from machine 0", i)
		}
	}
	s.loop.Note("shard settled at entry %d, hashes %x %x", len(s.log), content, ops)
}

func (s *shard) close() {
	for i, m := range s.machines {
		if err := m.m.Close(); err != nil {
			s.loop.Problem("closing machine %d: %v", i, err)
		}
	}
}
