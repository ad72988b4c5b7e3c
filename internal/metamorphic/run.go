package metamorphic

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// Event is what happens to a replica between two batches of entries.
type Event uint8

const (
	EventNone Event = iota
	// EventCrash closes without a flush; the log is replayed.
	EventCrash
	// EventRestart flushes and closes; the log is replayed.
	EventRestart
	// EventFlush flushes, and lets dropped families go.
	EventFlush
	// EventKeep takes a checkpoint aside for EventGoBack.
	EventKeep
	// EventGoBack puts the checkpoint in place of the store and replays the log.
	EventGoBack
	// EventSwap installs a checkpoint of the present state under the machine.
	EventSwap
	// EventCompact compacts.
	EventCompact
	// Events is the number of events.
	Events
)

func (e Event) String() string {
	return [...]string{"none", "crash", "restart", "flush", "keep", "go back", "swap", "compact"}[e]
}

// Stage is some entries in one call of ApplyBatch, and an event after them.
type Stage struct {
	Entries int
	After   Event
}

// Variant is one way to run a log. Stages repeat until the log is at its end.
type Variant struct {
	Driver  engine.Driver
	Options raftfsm.Options
	Stages  []Stage
}

// Trace is what must not depend on the variant.
type Trace struct {
	Outcomes []raftfsm.Outcome // by index - 1
	Hashes   map[uint64]*raftfsm.HashReport
	Header   string
}

// replica runs a variant.
type replica struct {
	v     Variant
	dir   string
	log   *Log
	store engine.Store
	m     *raftfsm.Machine
	trace Trace
	kept  string // directory of the kept checkpoint, empty if none
	dirs  int
	done  int // entries applied at least once
	fatal error
}

// Run runs the log under the variant in dir, which it creates, and calls after
// when the given number of entries is applied (after each stage).
func Run(v Variant, log *Log, dir string, after func(applied int, m *raftfsm.Machine) error) (*Trace, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	r := &replica{v: v, dir: dir, log: log}
	r.trace.Outcomes = make([]raftfsm.Outcome, len(log.Steps))
	r.trace.Hashes = make(map[uint64]*raftfsm.HashReport)
	r.v.Options.OnFatal = func(err error) { r.fatal = err }
	r.v.Options.HashMarks = len(log.Steps)
	err := r.open()
	for i := 0; err == nil && r.done < len(log.Steps); i++ {
		s := v.Stages[i%len(v.Stages)]
		if err = r.apply(s.Entries); err != nil {
			break
		}
		if err = r.event(s.After); err != nil {
			err = fmt.Errorf("%s after entry %d: %w", s.After, r.done, err)
			break
		}
		if after != nil {
			err = after(r.done, r.m)
		}
	}
	if err == nil {
		err = r.finish()
	}
	if r.m != nil {
		err = errors.Join(err, r.m.Close())
	}
	return &r.trace, err
}

func (r *replica) path() string { return filepath.Join(r.dir, "store") }

func (r *replica) open() (err error) {
	if r.store, err = r.v.Driver.Open(r.path()); err != nil {
		return err
	}
	r.m, err = raftfsm.Open(r.store, r.v.Options)
	return err
}

// apply applies the next n entries.
func (r *replica) apply(n int) error {
	n = min(n, len(r.log.Steps)-r.done)
	entries := r.log.Entries()[r.done : r.done+n]
	out := r.m.ApplyBatch(entries)
	if r.fatal != nil {
		return r.fatal
	}
	copy(r.trace.Outcomes[r.done:], out)
	for i := range out {
		if out[i].Skipped || out[i].Index != entries[i].Index {
			return fmt.Errorf("entry %d: outcome %+v", entries[i].Index, out[i])
		}
	}
	first := r.done
	r.done += n
	return r.collect(first)
}

// replay applies everything again, as raft does at start. What is not skipped
// must give what it gave the first time.
func (r *replica) replay() error {
	out := r.m.ApplyBatch(r.log.Entries()[:r.done])
	if r.fatal != nil {
		return r.fatal
	}
	for i := range out {
		if out[i].Skipped {
			continue
		}
		if want := r.trace.Outcomes[i]; describe(out[i]) != describe(want) {
			return fmt.Errorf("entry %d gave at its replay\n%s\nand before\n%s", out[i].Index, describe(out[i]), describe(want))
		}
	}
	return r.collect(0)
}

// collect takes the hashes of the marks from step first on that the machine
// holds.
func (r *replica) collect(first int) error {
	for i := first; i < r.done; i++ {
		s := &r.log.Steps[i]
		if s.Mark == 0 {
			continue
		}
		h, err := r.m.HashAt(context.Background(), s.Mark)
		if errors.Is(err, base.ErrNotFound) {
			continue // the mark is older than the store; it was collected then
		}
		if err != nil {
			return err
		}
		if old := r.trace.Hashes[s.Mark]; old != nil && !reflect.DeepEqual(old, h) {
			return fmt.Errorf("mark %d hashes as\n%+v\nand before\n%+v", s.Mark, h, old)
		}
		r.trace.Hashes[s.Mark] = h
	}
	return nil
}

func (r *replica) event(e Event) error {
	switch e {
	case EventCrash:
		return r.reopen(nil)
	case EventRestart:
		if err := r.store.Flush(); err != nil {
			return err
		}
		return r.reopen(nil)
	case EventFlush:
		if err := r.store.Flush(); err != nil {
			return err
		}
		durable, err := r.m.DurableIndex()
		if applied, _ := r.m.Applied(); err == nil && durable != applied {
			return fmt.Errorf("durable up to %d after a flush at %d", durable, applied)
		}
		return err
	case EventKeep:
		dir := r.fresh("kept")
		if err := r.store.Checkpoint(dir); err != nil {
			return err
		}
		r.kept = dir
	case EventGoBack:
		if r.kept == "" {
			return nil
		}
		kept := r.kept
		r.kept = ""
		return r.reopen(func() error {
			return errors.Join(os.RemoveAll(r.path()), os.Rename(kept, r.path()))
		})
	case EventSwap:
		return r.swap()
	case EventCompact:
		return r.store.Compact()
	}
	return nil
}

func (r *replica) fresh(name string) string {
	r.dirs++
	return filepath.Join(r.dir, fmt.Sprint(name, r.dirs))
}

func (r *replica) reopen(between func() error) error {
	if err := r.m.Close(); err != nil {
		return err
	}
	r.m = nil
	if between != nil {
		if err := between(); err != nil {
			return err
		}
	}
	if err := r.open(); err != nil {
		return err
	}
	return r.replay()
}

// swap lets the machine go on, on a copy of its store; a view of the old store
// stays readable meanwhile.
func (r *replica) swap() error {
	before, err := r.m.View()
	if err != nil {
		return err
	}
	defer before.Close()
	dir := r.fresh("swap")
	if err := r.store.Checkpoint(dir); err != nil {
		return err
	}
	store, err := r.v.Driver.Open(dir)
	if err != nil {
		return err
	}
	if err := r.m.Swap(store, nil); err != nil {
		return errors.Join(err, store.Close())
	}
	r.store = store
	now, err := r.m.View()
	if err != nil {
		return err
	}
	defer now.Close()
	for g := before.Range.Lo; g < before.Range.Hi; g++ {
		a, err := before.Hash(g)
		if err != nil {
			return err
		}
		b, err := now.Hash(g)
		if err != nil {
			return err
		}
		if a != b {
			return fmt.Errorf("group %d differs in the copy", g)
		}
	}
	// A crash opens the first directory; put the copy there.
	before.Close()
	now.Close()
	if err := r.store.Flush(); err != nil {
		return err
	}
	return r.reopen(func() error { return errors.Join(os.RemoveAll(r.path()), os.Rename(dir, r.path())) })
}

// finish adds a hash of the end of the log to the trace.
func (r *replica) finish() error {
	index := uint64(len(r.log.Steps)) + 1
	out := r.m.ApplyBatch([]raftfsm.Entry{{Index: index, Term: 1, Command: raftfsm.AppendHashMark(nil, index)}})
	if out[0].Err != nil {
		return out[0].Err
	}
	h, err := r.m.HashAt(context.Background(), index)
	if err != nil {
		return err
	}
	r.trace.Hashes[index] = h
	header := r.m.Header()
	conf, raw := r.m.Configuration()
	r.trace.Header = fmt.Sprintf("%+v configuration %d %x sessions %d declared %d", header.Token(), conf, raw, header.Sessions, len(header.Declarations()))
	return nil
}

// describe prints an outcome with what its pointers point to.
func describe(o raftfsm.Outcome) string {
	s := fmt.Sprintf("index %d clock %d sequence %d error %v skipped %t", o.Index, o.ClockMs, o.Sequence, o.Err, o.Skipped)
	for i := range o.Results {
		r := &o.Results[i]
		s += fmt.Sprintf("\n  %+v first %d replayed %t", r.Token, r.First, r.Replayed)
		if r.Err != nil {
			s += fmt.Sprintf(" refused %v ordinal %d field %q hint %q", r.Err, r.Err.Ordinal, r.Err.Field, r.Err.Hint)
		}
		for _, p := range r.Parts {
			s += fmt.Sprintf("\n    part %v first %d sequence %d replayed %t error %v", p.Ordinals, p.First, p.Sequence, p.Replayed, p.Err)
		}
	}
	return s
}

// Compare returns an error that names the first difference of two traces.
func Compare(a, b *Trace) error {
	for i := range a.Outcomes {
		if x, y := describe(a.Outcomes[i]), describe(b.Outcomes[i]); x != y {
			return fmt.Errorf("entry %d gave\n%s\nand\n%s", i+1, x, y)
		}
	}
	for mark, h := range a.Hashes {
		o := b.Hashes[mark]
		if o == nil {
			return fmt.Errorf("mark %d was lost", mark)
		}
		diff, err := h.Diff(o)
		if err != nil {
			return fmt.Errorf("mark %d: %w", mark, err)
		}
		if len(diff) > 0 {
			return fmt.Errorf("mark %d: groups %v differ", mark, diff)
		}
	}
	if a.Header != b.Header {
		return fmt.Errorf("headers\n%s\n%s", a.Header, b.Header)
	}
	return nil
}

// Check compares an outcome with the model, which it advances.
func Check(m *Model, s *Step, o *raftfsm.Outcome) error {
	switch {
	case s.Write != nil:
		want := m.Write(s.Write)
		if o.Err != nil || len(o.Results) != len(want) {
			return fmt.Errorf("%d results, error %v", len(o.Results), o.Err)
		}
		for i := range want {
			if got := VerdictOf(&o.Results[i]); !reflect.DeepEqual(got, want[i]) {
				return fmt.Errorf("request %d gave %+v (%v), the model says %+v", i, got, o.Results[i].Failure(), want[i])
			}
		}
	case s.Predict != nil:
		if got, want := reasonOf(o.Err), reasonOf(s.Predict(m)); got != want {
			return fmt.Errorf("refused as %q (%v), the model says %q", got, o.Err, want)
		}
	}
	if o.ClockMs != m.Clock || o.Sequence != m.Sequence {
		return fmt.Errorf("clock %d sequence %d, the model says %d and %d", o.ClockMs, o.Sequence, m.Clock, m.Sequence)
	}
	return nil
}

// CheckReads compares all contents of the shard with the model's, by scans in
// pages of limit items and, for what scans show, by point reads.
func CheckReads(m *Model, v *raftfsm.ReadView, limit int) error {
	if v.Sessions != len(m.Sessions) || len(v.Declarations()) != len(m.Declared) {
		return fmt.Errorf("%d sessions and %d states, the model has %d and %d", v.Sessions, len(v.Declarations()), len(m.Sessions), len(m.Declared))
	}
	for _, d := range v.Declarations() {
		want, wantErr := m.Data.Items(d, v.Range, false, nil)
		var got []state.ScanItem
		q := &state.ScanQuery{State: d.ID, Range: v.Range, Limit: limit}
		var err error
		for err == nil {
			var page []state.ScanItem
			page, q.Cursor, err = v.Scan(q)
			got = append(got, page...)
			if q.Cursor == nil {
				break
			}
		}
		if reasonOf(err) != reasonOf(wantErr) {
			return fmt.Errorf("scanning %s %s: %v, the model says %v", d.Kind, d.Function, err, wantErr)
		}
		if err != nil {
			continue
		}
		if a, b := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); a != b {
			return fmt.Errorf("scanning %s %s gave\n%s\nthe model has\n%s", d.Kind, d.Function, a, b)
		}
		if err := checkPoints(m, v, d, want); err != nil {
			return err
		}
	}
	return nil
}

func checkPoints(m *Model, v *raftfsm.ReadView, d *state.Declaration, items []state.ScanItem) error {
	var qs []*state.Query
	for _, it := range items {
		q := &state.Query{State: d.ID, Kind: state.QueryGet, Group: it.Group, Key: it.Key, Namespace: it.Namespace, UserKey: it.Entry.UserKey}
		if d.Kind == state.KindList {
			q.Kind = state.QueryPage
		}
		qs = append(qs, q)
	}
	got, errs := v.ReadMany(qs)
	for i, q := range qs {
		want, err := m.Data.Read(d, q)
		if reasonOf(errs[i]) != reasonOf(err) {
			return fmt.Errorf("reading %+v: %v, the model says %v", q, errs[i], err)
		}
		if a, b := fmt.Sprintf("%+v", got[i]), fmt.Sprintf("%+v", want); a != b {
			return fmt.Errorf("reading %+v gave %s, the model has %s", q, a, b)
		}
	}
	return nil
}
