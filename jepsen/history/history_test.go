package history

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"pgregory.net/rapid"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// tick is a clock that moves one microsecond a look.
func tick() func() int64 {
	var mu sync.Mutex
	var now int64
	return func() int64 {
		mu.Lock()
		defer mu.Unlock()
		now += 1000
		return now
	}
}

// sample records one of everything.
func sample(t testing.TB, w *bytes.Buffer) *Recorder {
	t.Helper()
	r, err := NewRecorder(w, Header{Seed: 42, Start: "2026-01-02T03:04:05Z", Note: "a \"note\" with é"}, Options{Clock: tick()})
	if err != nil {
		t.Fatal(err)
	}
	p, q, lost := r.NewProcess(), r.NewProcess(), r.NewProcess()
	a := r.Invoke(Op{Process: p, Workload: "register", F: "write", Key: "k1", Arg: []int64{1}})
	b := r.Invoke(Op{Process: q, Workload: "register", F: "read", Key: "k1", Level: Stale})
	r.Complete(a, Done{Outcome: OK, Node: "n1", Shard: 3})
	r.Complete(b, Done{Outcome: OK, Result: []int64{1}})
	c := r.Invoke(Op{Process: p, Workload: "register", F: "cas", Key: "k1", Arg: []int64{1, -2}})
	d := r.Invoke(Op{Process: lost, Workload: "list", F: "append", Parts: []Part{{Key: "a", Arg: []int64{7}}, {Key: "b\n", Arg: []int64{8, -1 << 63}}}})
	r.Complete(c, Done{Outcome: Fail, Code: "not_leader"})
	r.Complete(d, Done{Outcome: Unknown, Code: "deadline"})
	e := r.Invoke(Op{Process: q, Workload: "list", F: "read", Parts: []Part{{Key: "a"}, {Key: "b"}}})
	r.Complete(e, Done{Outcome: OK, Parts: [][]int64{{7}, {}}})
	r.Invoke(Op{Process: p, Workload: "register", F: "read", Key: "k1"})
	return r
}

// failer is what tests and rapid have in common.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
}

func equalOps(t failer, got, want []Op) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d operations, want %d", len(got), len(want))
	}
	for i := range want {
		g, w := got[i].String()+string(got[i].Level)+got[i].Node+got[i].Code, want[i].String()+string(want[i].Level)+want[i].Node+want[i].Code
		if g != w || got[i].Shard != want[i].Shard || got[i].Workload != want[i].Workload {
			t.Fatalf("operation %d:\n got %s\nwant %s", i+1, g, w)
		}
	}
}

func TestRoundTripAndGolden(t *testing.T) {
	var w bytes.Buffer
	r := sample(t, &w)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "golden", "v1", "sample.jsonl")
	if *rewrite {
		if err := os.MkdirAll(filepath.Dir(golden), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(golden, w.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, w.Bytes()) {
		t.Errorf("the bytes changed:\n%s\nwant\n%s", w.Bytes(), want)
	}
	h, err := Read(bytes.NewReader(want), ReadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !h.Complete || h.Header != r.header {
		t.Errorf("complete %v, header %+v", h.Complete, h.Header)
	}
	equalOps(t, h.Ops, r.History().Ops)
	if err := Validate(h.All()); err != nil {
		t.Error(err)
	}
	if got := strings.Join(h.Workloads(), " "); got != "list register" {
		t.Error("workloads:", got)
	}
}

// JH6: a file cut anywhere is a prefix, or has no first line.
func TestTruncatedAtEveryOffset(t *testing.T) {
	var w bytes.Buffer
	r := sample(t, &w)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	all := r.History().Ops
	first := bytes.IndexByte(w.Bytes(), '\n') + 1
	for n := range w.Len() {
		h, err := Read(bytes.NewReader(w.Bytes()[:n]), ReadOptions{})
		if n < first {
			if !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("cut at %d: %v", n, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("cut at %d: %v", n, err)
		}
		if h.Complete || len(h.Ops) > len(all) {
			t.Fatalf("cut at %d: complete %v, %d operations", n, h.Complete, len(h.Ops))
		}
		if err := Validate(h.All()); err != nil {
			t.Fatalf("cut at %d: %v", n, err)
		}
	}
}

// JH6: no flipped bit goes unseen, but for one in the last line feed, which
// makes a prefix.
func TestBitFlips(t *testing.T) {
	var w bytes.Buffer
	r := sample(t, &w)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	for i := range w.Len() {
		for bit := range 8 {
			b := bytes.Clone(w.Bytes())
			b[i] ^= 1 << bit
			h, err := Read(bytes.NewReader(b), ReadOptions{})
			if err == nil && (i < w.Len()-1 || h.Complete) {
				t.Fatalf("bit %d of byte %d is not noticed", bit, i)
			}
			if err != nil && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatalf("bit %d of byte %d: %v", bit, i, err)
			}
		}
	}
}

// JH6: what a reader would refuse is not written.
func TestRecorderRefusesWhatReadersDo(t *testing.T) {
	long := strings.Repeat("x", MaxText+1)
	for name, do := range map[string]func(r *Recorder){
		"key":   func(r *Recorder) { r.Invoke(Op{Key: long}) },
		"part":  func(r *Recorder) { r.Invoke(Op{Parts: []Part{{Key: long}}}) },
		"parts": func(r *Recorder) { r.Invoke(Op{Parts: make([]Part, MaxParts+1)}) },
		"code":  func(r *Recorder) { r.Complete(r.Invoke(Op{}), Done{Code: long}) },
		"line":  func(r *Recorder) { r.Invoke(Op{Arg: make([]int64, MaxLine/2)}) },
	} {
		var w bytes.Buffer
		r, err := NewRecorder(&w, Header{}, Options{Clock: tick()})
		if err != nil {
			t.Fatal(err)
		}
		do(r)
		if err := r.Close(); !errors.Is(err, base.ErrTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := Read(&w, ReadOptions{}); err != nil {
			t.Errorf("%s: what was written cannot be read: %v", name, err)
		}
	}
}

// sealed makes lines of a history from objects without their last brace.
func sealed(objects ...string) *bytes.Reader {
	b := appendHeader(nil, Header{})
	for _, o := range objects {
		b = seal(append(b, o...), len(b))
	}
	return bytes.NewReader(b)
}

func TestReaderRefuses(t *testing.T) {
	one := `{"t":"invoke","id":1,"at":5,"p":1,"w":"w","f":"f"`
	cases := map[string]struct {
		in   *bytes.Reader
		want error
	}{
		"nothing":         {bytes.NewReader(nil), base.ErrCorrupt},
		"another file":    {strings2("{\"a\":1}\n"), base.ErrCorrupt},
		"a newer version": {strings2(`{"format":"keelstate-jepsen-history","version":2,"crc":"00000000"}` + "\n"), base.ErrFormatVersion},
		"a bad header":    {strings2(`{"format":"keelstate-jepsen-history","version":1,"crc":"00000000"}` + "\n"), base.ErrCorrupt},
		"wrong id":        {sealed(`{"t":"invoke","id":2,"at":5`), base.ErrCorrupt},
		"twice":           {sealed(one, `{"t":"ok","id":1,"at":6`, `{"t":"ok","id":1,"at":7`), base.ErrCorrupt},
		"unknown, ok":     {sealed(one, `{"t":"unknown","id":1,"at":6`, `{"t":"ok","id":1,"at":7`), base.ErrCorrupt},
		"before it began": {sealed(one, `{"t":"ok","id":1,"at":4`), base.ErrCorrupt},
		"never began":     {sealed(one, `{"t":"ok","id":2,"at":6`), base.ErrCorrupt},
		"parts":           {sealed(one, `{"t":"ok","id":1,"at":6,"results":[[1]]`), base.ErrCorrupt},
		"end miscounts":   {sealed(one, `{"t":"end","ops":2`), base.ErrCorrupt},
		"after the end":   {sealed(`{"t":"end","ops":0`, one), base.ErrCorrupt},
		"another kind":    {sealed(`{"t":"what"`), base.ErrCorrupt},
		"a long name":     {sealed(one + `,"k":"` + strings.Repeat("x", MaxText+1) + `"`), base.ErrCorrupt},
		"a long line":     {sealed(one + `,"x":"` + strings.Repeat("x", MaxLine) + `"`), base.ErrCorrupt},
		"too many":        {sealed(one, `{"t":"invoke","id":2,"at":5`, `{"t":"invoke","id":3,"at":5`), base.ErrTooLarge},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if _, err := Read(c.in, ReadOptions{MaxOps: 2}); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

func strings2(s string) *bytes.Reader { return bytes.NewReader([]byte(s)) }

// JH2, JH5.
func TestValidate(t *testing.T) {
	ok := Op{ID: 1, Process: 1, Invoke: 1, Return: 5, Outcome: OK}
	cases := map[string]struct {
		ops  []Op
		good bool
	}{
		"none":             {nil, true},
		"one after other":  {[]Op{ok, {ID: 2, Process: 1, Invoke: 5, Return: Never}}, true},
		"two at once":      {[]Op{ok, {ID: 2, Process: 1, Invoke: 4, Return: Never}}, false},
		"after an unknown": {[]Op{{ID: 1, Process: 1, Invoke: 1, Return: Never}, {ID: 2, Process: 1, Invoke: 9, Return: 10, Outcome: OK}}, false},
		"unknown returned": {[]Op{{ID: 1, Process: 1, Invoke: 1, Return: 4}}, false},
		"ok never":         {[]Op{{ID: 1, Process: 1, Invoke: 1, Return: Never, Outcome: OK}}, false},
		"backwards":        {[]Op{{ID: 1, Process: 1, Invoke: 5, Return: 4, Outcome: Fail}}, false},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if err := Validate((&History{Ops: c.ops}).All()); (err == nil) != c.good || (err != nil && !errors.Is(err, base.ErrInvalid)) {
				t.Error(err)
			}
		})
	}
}

// limited fails after so many bytes.
type limited struct{ left int }

func (l *limited) Write(p []byte) (int, error) {
	if l.left -= len(p); l.left < 0 {
		return 0, errors.New("full")
	}
	return len(p), nil
}

func TestRecorderReportsItsFile(t *testing.T) {
	r, err := NewRecorder(&limited{left: 1 << 10}, Header{}, Options{Clock: tick()})
	if err != nil {
		t.Fatal(err)
	}
	for range 10000 {
		r.Complete(r.Invoke(Op{Process: 1, F: "read"}), Done{Outcome: OK})
	}
	if err := r.Close(); err == nil || !strings.Contains(err.Error(), "full") {
		t.Errorf("Close: %v", err)
	}
	if got := len(r.History().Ops); got != 10000 {
		t.Errorf("memory has %d operations", got)
	}
	r, err = NewRecorder(&bytes.Buffer{}, Header{}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	r.Invoke(Op{Arg: make([]int64, MaxLine)})
	if err := r.Close(); !errors.Is(err, base.ErrTooLarge) {
		t.Errorf("Close: %v", err)
	}
	if _, err := NewRecorder(nil, Header{Note: strings.Repeat("x", MaxNote+1)}, Options{}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a long note: %v", err)
	}
}

// JH4: while clients go on, what is flushed is always a valid history.
func TestConcurrentRecorder(t *testing.T) {
	var w bytes.Buffer
	r, err := NewRecorder(&w, Header{}, Options{FlushEvery: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	var clients sync.WaitGroup
	for range 8 {
		clients.Add(1)
		go func() {
			defer clients.Done()
			p := r.NewProcess()
			for i := range int64(500) {
				c := r.Invoke(Op{Process: p, Workload: "w", F: "f", Key: "k", Arg: []int64{i}})
				d := Done{Outcome: Outcome(i % 3), Result: []int64{i}}
				r.Complete(c, d)
				if d.Outcome == Unknown {
					p = r.NewProcess()
				}
			}
		}()
	}
	clients.Wait()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	h, err := Read(&w, ReadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	equalOps(t, h.Ops, r.History().Ops)
	if err := Validate(h.All()); err != nil || len(h.Ops) != 4000 {
		t.Errorf("%d operations: %v", len(h.Ops), err)
	}
}

// Any operation survives the file, whatever its names and values.
func TestRoundTripProperty(t *testing.T) {
	ints := rapid.SliceOfN(rapid.Int64(), 0, 4)
	rapid.Check(t, func(t *rapid.T) {
		var w bytes.Buffer
		r, err := NewRecorder(&w, Header{Seed: rapid.Int64().Draw(t, "seed"), Note: rapid.StringN(0, 40, 100).Draw(t, "note")}, Options{Clock: tick()})
		if err != nil {
			t.Fatal(err)
		}
		for i := range rapid.IntRange(0, 6).Draw(t, "n") {
			name := rapid.StringN(0, 10, 30)
			o := Op{Process: int64(i), Workload: name.Draw(t, "w"), F: name.Draw(t, "f"), Key: name.Draw(t, "k"), Arg: ints.Draw(t, "arg")}
			d := Done{Outcome: Outcome(rapid.IntRange(0, 2).Draw(t, "outcome")), Result: ints.Draw(t, "result"), Node: name.Draw(t, "node"), Code: "c"}
			for range rapid.IntRange(0, 2).Draw(t, "parts") {
				o.Parts = append(o.Parts, Part{Key: name.Draw(t, "part"), Arg: ints.Draw(t, "part arg")})
				d.Parts = append(d.Parts, ints.Draw(t, "part result"))
			}
			if c := r.Invoke(o); rapid.Bool().Draw(t, "done") {
				r.Complete(c, d)
			}
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		h, err := Read(&w, ReadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		equalOps(t, h.Ops, r.History().Ops)
	})
}

func FuzzRead(f *testing.F) {
	var w bytes.Buffer
	r := sample(f, &w)
	if err := r.Close(); err != nil {
		f.Fatal(err)
	}
	f.Add(w.Bytes())
	f.Add(w.Bytes()[:w.Len()/2])
	f.Add(bytes.ReplaceAll(w.Bytes(), []byte(`:1`), []byte(`:-1`)))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := Read(bytes.NewReader(b), ReadOptions{MaxOps: 1000})
		if err != nil {
			if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) && !errors.Is(err, base.ErrTooLarge) {
				t.Fatal(err)
			}
			return
		}
		for i := range h.Ops {
			_ = h.Ops[i].String()
		}
	})
}

// The quick way and encoding/json agree on every line that the quick way takes.
func FuzzScanLine(f *testing.F) {
	f.Add([]byte(`{"t":"ok","id":1,"at":-5,"result":[1,2],"results":[[1],[]],"node":"n","shard":4}`))
	f.Add([]byte(`{"t":"invoke","id":1,"parts":[{"k":"a","arg":[-9223372036854775808]},{}],"arg":[]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var l line
		if !scanLine(b, &l, func(b []byte) string { return string(b) }) {
			return
		}
		checkScanned(t, b, &l)
	})
}

func BenchmarkRecorder(b *testing.B) {
	file, err := os.Create(filepath.Join(b.TempDir(), "history.jsonl"))
	if err != nil {
		b.Fatal(err)
	}
	defer file.Close()
	r, err := NewRecorder(file, Header{}, Options{Forget: true})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		p := r.NewProcess()
		o := Op{Process: p, Workload: "register", F: "write", Key: "r-0123", Arg: []int64{123456}}
		for pb.Next() {
			r.Complete(r.Invoke(o), Done{Outcome: OK, Shard: 2})
		}
	})
	if err := r.Close(); err != nil {
		b.Fatal(err)
	}
}

func BenchmarkRead(b *testing.B) {
	var w bytes.Buffer
	r, err := NewRecorder(&w, Header{}, Options{})
	if err != nil {
		b.Fatal(err)
	}
	for i := range int64(100000) {
		r.Complete(r.Invoke(Op{Process: 1, Workload: "register", F: "read", Key: "r-1"}), Done{Outcome: OK, Result: []int64{i}})
	}
	if err := r.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := Read(bytes.NewReader(w.Bytes()), ReadOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)*100000/b.Elapsed().Seconds(), "ops/s")
}
