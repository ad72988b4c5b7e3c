package steps

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// replicas is how many copies each log has.
const replicas = 3

// metadata is the system group: a log, and copies that apply it.
type metadata struct {
	loop   *Loop
	log    [][]byte
	copies [replicas]metaCopy
	opened map[base.SessionID]bool // every id that was given
	ended  map[base.SessionID]bool
	states map[string]uint32 // the id of each state by name, while it is declared
	used   map[uint32]bool
	txns   int
}

type metaCopy struct {
	store   *broadcast.Store
	mirror  *meta.Mirror
	applied int // entries of the log
	rev     base.Revision
	clock   uint64
}

func newMetadata(l *Loop) *metadata {
	m := &metadata{loop: l, opened: map[base.SessionID]bool{}, ended: map[base.SessionID]bool{}, states: map[string]uint32{}, used: map[uint32]bool{}}
	for i := range m.copies {
		m.reset(i)
	}
	return m
}

func (m *metadata) reset(i int) {
	store := broadcast.New(broadcast.Options{})
	m.copies[i] = metaCopy{store: store, mirror: meta.NewMirror(store)}
}

func (m *metadata) view(i int) *meta.View {
	v, err := m.copies[i].mirror.View()
	if err != nil {
		m.loop.Problem("copy %d of the metadata cannot be read: %v", i, err)
	}
	return v
}

// nowMs is a wall clock that is wrong by up to some seconds.
func (m *metadata) nowMs() uint64 {
	return uint64(1_000_000 + m.loop.Now().Milliseconds() + m.loop.Int64N(6000) - 3000)
}

// advance applies entries at a copy, up to a length of the log.
func (m *metadata) advance(i, to int) []broadcast.Result {
	c := &m.copies[i]
	var out []broadcast.Result
	for ; c.applied < to; c.applied++ {
		res, err := c.store.Apply(uint64(c.applied+1), m.log[c.applied])
		if err != nil {
			m.loop.Problem("entry %d of the metadata is refused: %v", c.applied+1, err)
		}
		if res.Revision < c.rev || res.Clock < c.clock { // SS4
			m.loop.Problem("copy %d went back from revision %d and clock %d to %d and %d", i, c.rev, c.clock, res.Revision, res.Clock)
		}
		c.rev, c.clock = res.Revision, res.Clock
		out = append(out, res)
	}
	return out
}

// restart makes a copy anew, from a snapshot of another or from the whole log.
func (m *metadata) restart(i int) {
	from := &m.copies[(i+1)%replicas]
	if m.loop.chance(0.5) {
		m.loop.Note("copy %d of the metadata begins anew", i)
		m.reset(i)
		return
	}
	var b bytes.Buffer
	if err := from.store.WriteSnapshot(&b); err != nil {
		m.loop.Problem("snapshot of copy %d: %v", i, err)
		return
	}
	m.loop.Note("copy %d of the metadata is restored at %d", i, from.applied)
	applied, rev, clock := from.applied, from.rev, from.clock
	m.reset(i)
	c := &m.copies[i]
	if err := c.store.Restore(&b); err != nil {
		m.loop.Problem("restoring copy %d: %v", i, err)
	}
	c.applied, c.rev, c.clock = applied, rev, clock
}

// update proposes what build makes of a copy's view, which may be old; the
// proposal travels, is now and then lost, and is applied in the order of arrival.
// done is told whether it is known to have succeeded.
func (m *metadata) update(i int, what string, build func(v *meta.View) (broadcast.Txn, error), done func(ok bool)) {
	txn, err := build(m.view(i))
	if err != nil {
		m.loop.Note("%s at copy %d: %s", what, i, base.SentinelOf(err).Reason)
		done(false)
		return
	}
	if meta.Empty(txn) {
		done(true)
		return
	}
	cmd, err := broadcast.EncodeTxn(txn)
	if err != nil {
		m.loop.Problem("encoding %s: %v", what, err)
		return
	}
	lost, answered := m.loop.chance(0.05), !m.loop.chance(0.05)
	m.loop.Soon(20*time.Millisecond, func() {
		if lost {
			done(false)
			return
		}
		m.log = append(m.log, cmd)
		m.txns++
		// The leader, copy 0, applies at once.
		results := m.advance(0, len(m.log))
		res := results[len(results)-1]
		m.loop.Note("%s: entry %d revision %d succeeded %v", what, len(m.log), res.Revision, res.Succeeded)
		m.check()
		if answered {
			done(res.Succeeded)
		} else {
			done(false)
		}
	})
}

// check looks for what may never be, at the copy that is always newest.
func (m *metadata) check() {
	v := m.view(0)
	seen := map[base.SessionID]bool{}
	v.ScanSessions(func(s *meta.Session) bool {
		seen[s.ID] = true
		if m.ended[s.ID] {
			m.loop.Problem("session %d lives again", s.ID)
		}
		m.opened[s.ID] = true
		return true
	})
	for id := range m.opened {
		if !seen[id] {
			m.ended[id] = true
		}
	}
	now := map[string]uint32{}
	for _, d := range v.States() {
		now[d.Name] = d.ID
		if old, ok := m.states[d.Name]; (!ok || old != d.ID) && m.used[d.ID] {
			m.loop.Problem("state id %d is used twice", d.ID)
		}
		m.used[d.ID] = true
	}
	m.states = now
}

// live is the life of the system group.
func (m *metadata) live() {
	l := m.loop
	for i := 1; i < replicas; i++ {
		l.Every(30*time.Millisecond, func() bool {
			m.advance(i, m.copies[i].applied+l.IntN(len(m.log)-m.copies[i].applied+1))
			return true
		})
		l.Every(5*time.Second, func() bool { m.restart(i); return true })
	}
	l.Every(500*time.Millisecond, func() bool {
		m.update(0, "expire", func(v *meta.View) (broadcast.Txn, error) { t, _, err := meta.ExpireSessionsTxn(v); return t, err }, func(bool) {})
		m.log = append(m.log, broadcast.EncodeTick(m.nowMs()))
		m.advance(0, len(m.log))
		return true
	})
	for range 3 { // operators, each at some node
		l.Every(400*time.Millisecond, func() bool { m.operate(l.IntN(replicas)); return true })
	}
}

func (m *metadata) operate(i int) {
	name := fmt.Sprintf("s%d", m.loop.IntN(6))
	if m.loop.chance(0.6) {
		want := meta.Declaration{Keyspace: "k", Name: name, Kind: "list", KeyType: "string", ValueType: "string", CodecVersion: 1}
		m.update(i, "declare "+name, func(v *meta.View) (broadcast.Txn, error) {
			t, _, _, err := meta.DeclareTxn(v, want, nil)
			return t, err
		}, func(bool) {})
		return
	}
	m.update(i, "drop "+name, func(v *meta.View) (broadcast.Txn, error) { return meta.DropTxn(v, "k", name) }, func(bool) {})
}

// open opens a session; done is told its id, 0 if that failed or is not known.
func (m *metadata) open(i int, lease time.Duration, done func(id base.SessionID)) {
	var id base.SessionID
	m.update(i, "open", func(v *meta.View) (broadcast.Txn, error) {
		id = v.NextSessionID()
		return meta.OpenSessionTxn(v, m.nowMs(), id, uint64(lease.Milliseconds()))
	}, func(ok bool) {
		if !ok {
			id = 0
		}
		done(id)
	})
}

// found founds the cluster, so that there is metadata.
func (m *metadata) found() error {
	spec := meta.FoundingSpec{Nodes: []meta.FoundingNode{{ID: "n1", RaftAddr: "n1:1"}}, KeyGroups: groups, Shards: 1, Replication: 1, Engine: "mem"}
	txn, _, err := meta.FoundTxn(m.view(0), meta.Founding{Spec: spec, Self: "n1", Cluster: "c", FormatVersion: 1, NowMs: m.nowMs()})
	if err != nil {
		return err
	}
	cmd, err := broadcast.EncodeTxn(txn)
	if err != nil {
		return err
	}
	m.log = append(m.log, cmd)
	for i := range m.copies {
		m.advance(i, 1)
	}
	if m.view(0).Cluster() == nil {
		return errors.New("the founding has no effect")
	}
	return nil
}

// settle lets every copy apply everything and compares them (SS2).
func (m *metadata) settle() {
	var first []byte
	for i := range m.copies {
		m.advance(i, len(m.log))
		var b bytes.Buffer
		if err := m.copies[i].store.WriteSnapshot(&b); err != nil {
			m.loop.Problem("snapshot of copy %d: %v", i, err)
		}
		if first == nil {
			first = b.Bytes()
		}
		if !bytes.Equal(first, b.Bytes()) {
			m.loop.Problem("copy %d of the metadata differs from copy 0", i)
		}
	}
	m.loop.Note("metadata settled at entry %d, %d bytes, revision %d", len(m.log), len(first), m.copies[0].rev)
}
