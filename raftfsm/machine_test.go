package raftfsm_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// W1: what the leader let pass is decided again where it stands in the log.
func TestApplyDecidesByTheLogsOrder(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	q := request(put("a", "1"))
	if err := r.m.CheckRequest(q); err != nil {
		t.Fatal(err)
	}
	// The drop precedes the write in the log, even in the same batch.
	out := r.m.ApplyBatch([]raftfsm.Entry{
		r.entry(raftfsm.AppendDrop(nil, []engine.FamilyID{valueID})), r.entry(r.encode(q)),
	})
	wantErr(t, out[1].Results[0], base.ErrUndeclared)
	if err := r.m.CheckRequest(q); !errors.Is(err, base.ErrUndeclared) {
		t.Error(err)
	}
}

func TestLeaderRefusesEarlyWhatApplyRefuses(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	big := make([]byte, 1<<20)
	cases := map[string]struct {
		want error
		make func() *raftfsm.Request
	}{
		"stale epoch": {base.ErrStaleEpoch, func() *raftfsm.Request { q := request(put("a", "1")); q.Epoch = 9; return q }},
		"incarnation": {base.ErrIncarnation, func() *raftfsm.Request { q := request(put("a", "1")); q.Incarnation = 9; return q }},
		"range":       {base.ErrWrongRange, func() *raftfsm.Request { q := request(put("a", "1")); q.Mutations[0].Group = 99; return q }},
		"precondition's range": {base.ErrWrongRange, func() *raftfsm.Request {
			q := request(put("a", "1"))
			q.Preconditions = []state.Precondition{{State: valueID, Kind: state.PreAbsent, Group: 99, Key: []byte("a")}}
			return q
		}},
		"undeclared": {base.ErrUndeclared, func() *raftfsm.Request { q := request(put("a", "1")); q.Mutations[0].State = 99; return q }},
		"undeclared precondition": {base.ErrUndeclared, func() *raftfsm.Request {
			q := request(put("a", "1"))
			q.Preconditions = []state.Precondition{{State: 99, Kind: state.PreAbsent, Group: 1, Key: []byte("a")}}
			return q
		}},
		"kind": {base.ErrWrongKind, func() *raftfsm.Request { return request(mut(valueID, state.OpListAdd, "a", nil)) }},
		"null element": {base.ErrInvalid, func() *raftfsm.Request {
			return request(mut(listID, state.OpListAdd, "a", func(m *state.Mutation) { m.Elements = [][]byte{nil} }))
		}},
		"group of another key": {base.ErrInvalid, func() *raftfsm.Request {
			q := request(put("a", "1"))
			q.Mutations[0].Group = (q.Mutations[0].Group + 1) % groups
			return q
		}},
		"too many": {base.ErrTooLarge, func() *raftfsm.Request {
			q := request()
			for i := range state.MaxRequestMutations + 1 {
				q.Mutations = append(q.Mutations, raftfsm.Mutation{Ordinal: uint32(i), Mutation: put("a", "1")})
			}
			return q
		}},
		"too many bytes": {base.ErrTooLarge, func() *raftfsm.Request {
			q := request()
			for i := range 9 {
				m := put("a", "")
				m.Value = big
				q.Mutations = append(q.Mutations, raftfsm.Mutation{Ordinal: uint32(i), Mutation: m})
			}
			return q
		}},
	}
	before := r.dump()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if err := r.m.CheckRequest(c.make()); !errors.Is(err, c.want) {
				t.Errorf("leader: %v", err)
			}
			if _, n := raftfsm.AppendRequest(nil, c.make()); n == nil {
				wantErr(t, r.write(c.make()), c.want)
			}
		})
	}
	if after := r.dump(); contentOf(after) != contentOf(before) {
		t.Error("a refused request changed something")
	}
	for field, q := range map[string]*raftfsm.Request{
		"no number":     {Session: 1},
		"floor":         {Session: 1, Seq: 2, Floor: 3},
		"previous":      {Session: 1, Seq: 2, Prev: 2},
		"ordinal order": {Mutations: []raftfsm.Mutation{{Ordinal: 1, Mutation: put("a", "1")}, {Ordinal: 1, Mutation: put("a", "1")}}},
	} {
		q.Epoch, q.Incarnation = 1, 1
		if err := r.m.CheckRequest(q); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// contentOf leaves out of a dump where in the log it was taken.
func contentOf(dump string) string {
	_, rest, _ := strings.Cut(dump, "Range:")
	return rest
}

func TestRefusedRequestWritesNothingAndNamesTheFault(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	wantErr(t, r.write(request(put("a", "1"))), nil)
	before := r.dump()
	q := request(put("a", "2"), listAdd("l", "x"), add(sumID, "s", i64(1)), put("b", "3"))
	q.Mutations[3].Group = (q.Mutations[3].Group + 1) % groups
	got := r.write(q)
	wantErr(t, got, base.ErrInvalid)
	if got.Err.Ordinal != 3 || !strings.HasPrefix(got.Err.Field, "mutations[3]") {
		t.Errorf("names %d %q", got.Err.Ordinal, got.Err.Field)
	}
	q = request(put("a", "2"))
	q.Preconditions = []state.Precondition{
		{State: valueID, Kind: state.PrePresent, Group: groupOf("a"), Key: []byte("a")},
		{State: valueID, Kind: state.PreEqual, Group: groupOf("a"), Key: []byte("a"), Bytes: []byte("0")},
	}
	got = r.write(q)
	wantErr(t, got, base.ErrPrecondition)
	if got.Err.Ordinal != 1 || got.Err.Field != "preconditions[1]" {
		t.Errorf("names %d %q", got.Err.Ordinal, got.Err.Field)
	}
	if after := r.dump(); contentOf(after) != contentOf(before) {
		t.Errorf("changed:\n%s\n%s", before, after)
	}
	if r.value("a") != "1" {
		t.Error("the value changed")
	}
}

// W5 and W6.
func TestClockNeverGoesBackAndSequenceCountsMutations(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	r.stamp = 5000
	got := r.write(request(put("a", "1"), put("b", "1"), put("c", "1")))
	if got.First != 1 || got.Token.Sequence != 3 || got.Token.Group != 7 || got.Token.Birth != 99 || got.Token.Incarnation != 1 {
		t.Errorf("token %+v", got)
	}
	if a := r.read(valueID, "b"); a.Version != 2 {
		t.Errorf("version %d of the second mutation", a.Version)
	}
	for _, c := range []struct {
		command []byte
		clock   uint64
	}{
		{raftfsm.AppendTick(nil, 4000), 5000}, {raftfsm.AppendTick(nil, 6000), 6000},
		{raftfsm.AppendTermStart(nil, 1), 6000}, {raftfsm.AppendTermStart(nil, 7000), 7000},
		{r.encode(), 7000},
	} {
		if o := r.command(c.command); o.ClockMs != c.clock || o.Sequence != 3 || o.Err != nil {
			t.Errorf("clock %d sequence %d %v, want %d", o.ClockMs, o.Sequence, o.Err, c.clock)
		}
	}
	if h := r.m.Header(); h.ClockMs != 7000 || h.Sequence != 3 {
		t.Errorf("header %d %d", h.ClockMs, h.Sequence)
	}
}

func TestEntriesAtOrBelowTheAppliedIndexAreSkipped(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	e := r.entry(r.encode(request(add(sumID, "s", i64(1)))))
	out := r.m.ApplyBatch([]raftfsm.Entry{e, e})
	if out[0].Skipped || !out[1].Skipped || base.OutcomeOf(out[1].Err) != base.OutcomeUnknown {
		t.Errorf("%+v", out)
	}
	for _, o := range r.m.ApplyBatch(r.log) {
		if !o.Skipped {
			t.Errorf("entry %d was applied again", o.Index)
		}
	}
	if r.sum("s") != 1 {
		t.Errorf("sum %d", r.sum("s"))
	}
}

func TestInitIsTheFirstCommand(t *testing.T) {
	r := emptyReplica(t, mem.NewDriver(), raftfsm.Options{})
	o := r.command(r.encode(request(put("a", "1"))))
	wantErr(t, o.Results[0], base.ErrNotReady)
	for _, c := range [][]byte{raftfsm.AppendDeclare(nil, testDeclarations()), raftfsm.AppendHashMark(nil, 1), raftfsm.AppendTick(nil, 1)} {
		if o := r.command(c); !errors.Is(o.Err, base.ErrNotReady) {
			t.Error(o.Err)
		}
	}
	if _, err := r.m.ReadView(0, 0); !errors.Is(err, base.ErrNotReady) {
		t.Error(err)
	}
	init := raftfsm.Init{Group: 7, Range: keygroup.Range{Lo: 2, Hi: 5}, M: groups, Epoch: 3, Birth: 5, Incarnation: 2, Sequence: 100, ClockMs: 50}
	r.ok(r.command(raftfsm.AppendInit(nil, init)))
	r.ok(r.command(raftfsm.AppendInit(nil, init)))
	other := init
	other.Birth = 6
	if o := r.command(raftfsm.AppendInit(nil, other)); !errors.Is(o.Err, base.ErrConflict) {
		t.Error(o.Err)
	}
	r.restart(true)
	h := r.m.Header()
	if r.m.Birth() != 5 || h.Range != init.Range || h.M != groups || h.Epoch != 3 || h.Incarnation != 2 || h.Sequence != 100 || h.ClockMs != 50 || h.Group != 7 {
		t.Errorf("%+v", h)
	}
}

// B06: every merge-type operation, replayed from the log alone, from a flushed
// store and the log, and from a store newer than the log's first entries.
func TestReplayAppliesNothingTwice(t *testing.T) {
	for _, name := range []string{"mem", "rocks"} {
		t.Run(name, func(t *testing.T) {
			r := emptyReplica(t, newDriver(t, name), raftfsm.Options{})
			r.found()
			replayAppliesNothingTwice(t, r)
		})
	}
}

func replayAppliesNothingTwice(t *testing.T, r *replica) {
	const n = 100
	snapshot := filepath.Join(t.TempDir(), "snapshot")
	for i := 1; i <= n; i++ {
		e := []byte(fmt.Sprint(i))
		r.ok(r.command(r.encode(request(
			add(sumID, "k", i64(1)), listAdd("k", fmt.Sprint(i)), mapPut("k", "counter", fmt.Sprint(i)), add(minID, "k", i64(int64(-i))),
			add(firstID, "k", e), add(orID, "k", i64(int64(i))), add(concatID, "k", e), add(meanID, "k", i64(int64(i))),
			add(countID, "k", i64(1)), add(distinctID, "k", e), add(topkID, "k", e),
		))))
		if i == n/2 {
			if err := r.store.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		if i == 3*n/4 {
			if err := r.store.Checkpoint(snapshot); err != nil {
				t.Fatal(err)
			}
		}
	}
	want := r.dump()
	check := func(after string) {
		t.Helper()
		if got := r.dump(); contentOf(got) != contentOf(want) {
			t.Errorf("%s: state differs:\n%s\n%s", after, got, want)
		}
		if s := r.sum("k"); s != n {
			t.Errorf("%s: sum is %d", after, s)
		}
		l := r.list("k")
		if len(l) != n || l[0] != "1" || l[n-1] != fmt.Sprint(n) {
			t.Errorf("%s: list has %d elements", after, len(l))
		}
		if a := r.read(countID, "k"); string(a.Value) != string(i64(n)) {
			t.Errorf("%s: count is %x", after, a.Value)
		}
	}
	for round := range 3 {
		r.restart(false)
		check(fmt.Sprintf("replay of the tail, round %d", round))
		r.restart(true)
		check(fmt.Sprintf("nothing to replay, round %d", round))
	}
	replace := func(after string, by func() error) {
		t.Helper()
		if err := errors.Join(r.m.Close(), os.RemoveAll(r.dir), by()); err != nil {
			t.Fatal(err)
		}
		r.open()
		if out := r.m.ApplyBatch(r.log); out[len(out)-1].Skipped {
			t.Fatalf("%s: nothing was replayed", after)
		}
		check(after)
	}
	replace("snapshot and log", func() error { return os.Rename(snapshot, r.dir) })
	replace("the whole log", func() error { return nil })
}

// RF3: how entries are grouped makes no difference.
func TestBatchSizesMakeNoDifference(t *testing.T) {
	var want []raftfsm.Outcome
	var wantDump string
	source := newReplica(t, raftfsm.Options{})
	for i := range uint64(60) {
		s := base.SessionID(i%3 + 1)
		seq := i/3 + 1
		q := inSession(s, seq, add(sumID, fmt.Sprint("k", i%5), i64(1)), listAdd("l", fmt.Sprint(i)))
		if i%7 == 0 {
			q.Preconditions = []state.Precondition{{State: valueID, Kind: state.PrePresent, Group: groupOf("no"), Key: []byte("no")}}
		}
		source.entry(encodeWrite(t, 1000+i, 0, q, q))
	}
	source.entry(raftfsm.AppendForget(nil, 3, []base.SessionID{2}))
	for _, size := range []int{1, 2, 7, 1000} {
		for _, o := range []raftfsm.Options{{}, {MaxBatchOps: 1}, {MaxBatchBytes: 300}} {
			r := newReplica(t, o)
			var outs []raftfsm.Outcome
			for chunk := range slices.Chunk(source.log, size) {
				outs = append(outs, r.m.ApplyBatch(chunk)...)
			}
			outs = outs[2:] // init and declare had been applied
			r.log = slices.Clone(source.log)
			got := r.dump()
			if want == nil {
				want, wantDump = outs, got
				continue
			}
			if a, b := fmt.Sprintf("%+v", outs), fmt.Sprintf("%+v", want); a != b {
				t.Errorf("size %d options %+v: other outcomes", size, o)
			}
			if got != wantDump {
				t.Errorf("size %d options %+v:\n%s\n%s", size, o, got, wantDump)
			}
		}
	}
}

// B09: value, map, list and the session's result are of the same entry after a
// crash at any point.
func TestCrashNeverPartsABatch(t *testing.T) {
	for _, name := range []string{"mem", "rocks"} {
		t.Run(name, func(t *testing.T) {
			r := emptyReplica(t, newDriver(t, name), raftfsm.Options{})
			r.found()
			crashNeverPartsABatch(t, r)
		})
	}
}

func crashNeverPartsABatch(t *testing.T, r *replica) {
	for i := uint64(1); i <= 60; i++ {
		v := fmt.Sprint(i)
		q := inSession(1, i, put("k", v), mapPut("k", "u", v), mut(listID, state.OpListUpdate, "k", func(m *state.Mutation) { m.Elements = [][]byte{[]byte(v)} }))
		q.Floor = i
		r.ok(r.command(r.encode(q)))
		if i%7 == 0 {
			if err := r.store.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		if i%5 != 0 {
			continue
		}
		// The store as the crash left it, before any replay.
		if err := r.m.Close(); err != nil {
			t.Fatal(err)
		}
		r.open()
		applied, _ := r.m.Applied()
		if applied >= 3 {
			n := applied - 2 // after init and declare
			want := fmt.Sprint(n)
			if r.value("k") != want || r.list("k")[0] != want || string(r.read(mapID, "k").Entries[0].Value) != want {
				t.Fatalf("index %d: value %q list %q", applied, r.value("k"), r.list("k"))
			}
		}
		r.m.ApplyBatch(r.log)
		if got := r.value("k"); got != v {
			t.Fatalf("after replay: %q", got)
		}
	}
}

func TestDeclareIsIdempotentAndAtomic(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	r.ok(r.command(raftfsm.AppendDeclare(nil, testDeclarations())))
	fresh := state.Declaration{ID: 50, Keyspace: "ks", Name: "new", Kind: state.KindValue, KeyType: keygroup.String, ValueType: keygroup.Bytes, CodecVersion: 1}
	other := testDeclarations()[0]
	other.Name = "renamed"
	bad := fresh
	bad.ID, bad.Kind = 51, state.KindReducing
	zero := fresh
	zero.ID = 0
	for want, second := range map[error]state.Declaration{base.ErrConflict: other, base.ErrInvalid: bad} {
		if o := r.command(raftfsm.AppendDeclare(nil, []state.Declaration{fresh, second})); !errors.Is(o.Err, want) {
			t.Errorf("%v, want %v", o.Err, want)
		}
	}
	if o := r.command(raftfsm.AppendDeclare(nil, []state.Declaration{zero})); !errors.Is(o.Err, base.ErrInvalid) {
		t.Error(o.Err)
	}
	if r.m.Header().Declaration(50) != nil {
		t.Error("declared by a refused command")
	}
	r.ok(r.command(raftfsm.AppendDeclare(nil, []state.Declaration{fresh, fresh})))
	r.restart(false)
	if d := r.m.Header().Declaration(50); d == nil || *d != fresh {
		t.Errorf("%+v", d)
	}
	if n := len(r.m.Header().Declarations()); n != len(testDeclarations())+1 {
		t.Errorf("%d declarations", n)
	}
}

func TestUnreadableCommandStopsTheMachine(t *testing.T) {
	for name, c := range map[string]struct {
		command []byte
		want    error
	}{
		"garbage":         {[]byte("garbage"), base.ErrCorrupt},
		"empty":           {[]byte{}, base.ErrCorrupt},
		"unknown version": {[]byte{0xC7, 9, 1}, base.ErrFormatVersion},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReplica(t, raftfsm.Options{})
			out := r.m.ApplyBatch([]raftfsm.Entry{
				r.entry(r.encode(request(put("a", "1")))), r.entry(c.command), r.entry(r.encode(request(put("a", "2")))),
			})
			if !errors.Is(r.fatal, c.want) || !errors.Is(out[1].Err, c.want) {
				t.Errorf("stopped by %v", r.fatal)
			}
			for _, o := range out {
				if o.Err == nil || base.OutcomeOf(o.Err) != base.OutcomeUnknown {
					t.Errorf("entry %d: %v", o.Index, o.Err)
				}
			}
			if _, err := r.m.ReadView(1, 1); !errors.Is(err, base.ErrDamaged) {
				t.Errorf("still reads: %v", err)
			}
			if err := r.m.CheckRequest(request(put("a", "1"))); !errors.Is(err, base.ErrDamaged) {
				t.Error(err)
			}
		})
	}
}

func TestConfigurationIsKeptWithItsIndex(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	if i, raw := r.m.Configuration(); i != 0 || raw != nil {
		t.Errorf("%d %q", i, raw)
	}
	e := r.entry(nil)
	e.Configuration = []byte("configuration")
	r.log[len(r.log)-1] = e
	r.ok(r.m.ApplyBatch([]raftfsm.Entry{e})[0])
	r.ok(r.m.ApplyBatch([]raftfsm.Entry{r.entry(nil)})[0]) // neither: the index advances
	r.restart(true)
	if i, raw := r.m.Configuration(); i != e.Index || string(raw) != "configuration" {
		t.Errorf("%d %q", i, raw)
	}
	if i, term := r.m.Applied(); i != e.Index+1 || term != 1 {
		t.Errorf("applied %d %d", i, term)
	}
}

func TestCountersAddUp(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	q := inSession(1, 1, put("a", "1"), put("b", "1"))
	bad := request(put("a", "1"))
	bad.Epoch = 9
	r.command(r.encode(q, q, bad))
	c := r.m.Counters()
	if c.Entries != 3 || c.Requests != 3 || c.Replayed != 1 || c.Mutations != 2 || c.Refused["stale_epoch"] != 1 || c.Batches != 3 {
		t.Errorf("%+v", c)
	}
}
