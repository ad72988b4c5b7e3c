package report

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files")

func sampleRun() *Run {
	r := &Run{
		Seed: 7, Started: "2026-01-02T03:04:05Z", Repeat: "keelstate-jepsen run --seed 7 --faults='kill,<pause>'",
		Product: map[string]string{"version": "devel", "revision": "0123456789abcdef"}, Options: map[string]string{"rate": "250"},
		Nodes: 3, Shards: 2, Net: "namespaces", Disk: "fault", Victims: []string{"n2"}, Missing: []string{"clock-step: no control"},
		ElapsedNs: int64(95 * time.Second), Done: true,
		Episodes: []Episode{
			{Number: 1, Seed: 11, Style: "mixed", History: "episodes/00001.jsonl", BeginNs: 1e9, HealedNs: 41e9, EndNs: 44e9,
				Faults: map[string]int{"kill": 2, "pause": 1}, Skipped: 1, OK: 90, Failed: 5, Unknown: 3,
				Results: []check.Result{{Name: "register", Verdict: check.Pass, Text: "90 ok", OK: 90, Failed: 5, Unknown: 3, Elapsed: time.Second}}},
			{Number: 2, Seed: 12, Style: "cascade", History: "episodes/00002.jsonl", BeginNs: 45e9, HealedNs: 85e9, EndNs: 94e9,
				Faults: map[string]int{"kill": 1}, OK: 4,
				Results: []check.Result{{Name: "counter", Verdict: check.Fail, Text: "k: lost \"3\"", OK: 4,
					Details: []check.Detail{{Verdict: check.Fail, Key: "k", Text: "lost <b>3</b>", Ops: []int64{1, 2}}}}}},
		},
	}
	for i := range r.Episodes {
		r.Episodes[i].Judge()
	}
	r.Judge()
	return r
}

var sampleEvents = []Event{
	{Type: EventPhase, Episode: 1, At: 1e9, Text: "episode 1 (mixed): faults"},
	{Type: EventBegun, Episode: 1, At: 2e9, Step: 3, Name: "kill-one", Kind: "kill", Targets: []string{"n1"}, Text: "kill -9 of n1"},
	{Type: EventFault, Episode: 1, At: 2e9, End: 5e9, Step: 3, Name: "kill-one", Kind: "kill", Targets: []string{"n1"}, Text: "kill -9 of n1"},
	{Type: EventDeath, Episode: 1, At: 6e9, Targets: []string{"n2"}, Text: "n2 ended with code 70"},
}

var sampleSamples = []Sample{
	{At: 1e9, Node: "n1", Values: map[string]float64{"keelstate_leader:1": 1, "go_goroutines": 100}},
	{At: 2e9, Node: "n1", Values: map[string]float64{"keelstate_leader:1": 0, "go_goroutines": 101}},
	{At: 2e9, Node: "n2", Missed: true},
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func encodings(t testing.TB) map[string][]byte {
	t.Helper()
	run, err := sampleRun().Encode()
	must(t, err)
	var timeline, metrics bytes.Buffer
	w := NewWriter(&timeline, TimelineMagic)
	for _, v := range sampleEvents {
		w.Write(v)
	}
	must(t, w.Err())
	w = NewWriter(&metrics, MetricsMagic)
	for _, v := range sampleSamples {
		w.Write(v)
	}
	must(t, w.Err())
	return map[string][]byte{RunFile: run, TimelineFile: timeline.Bytes(), MetricsFile: metrics.Bytes()}
}

// decode reads a file of a folder by its name.
func decode(name string, b []byte) (any, error) {
	switch name {
	case RunFile:
		r, err := Decode(b)
		if err != nil {
			return nil, err
		}
		return r, nil
	case TimelineFile:
		return ReadEvents(bytes.NewReader(b))
	default:
		return ReadSamples(bytes.NewReader(b))
	}
}

func wants() map[string]any {
	return map[string]any{RunFile: sampleRun(), TimelineFile: sampleEvents, MetricsFile: sampleSamples}
}

func TestGolden(t *testing.T) {
	for name, b := range encodings(t) {
		path := filepath.Join("testdata", "golden", "v1", name)
		if *rewrite {
			must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			must(t, os.WriteFile(path, b, 0o644))
		}
		golden, err := os.ReadFile(path)
		must(t, err)
		if !bytes.Equal(golden, b) {
			t.Errorf("%s is written otherwise than the golden file", name)
		}
		got, err := decode(name, golden)
		must(t, err)
		if !reflect.DeepEqual(got, wants()[name]) {
			t.Errorf("%s: read %+v", name, got)
		}
	}
}

// JR4: run.json is whole or corrupt; lines that end early are a prefix.
func TestTruncation(t *testing.T) {
	for name, b := range encodings(t) {
		for cut := range b[:len(b)-1] {
			got, err := decode(name, b[:cut])
			if err != nil {
				if !errors.Is(err, base.ErrCorrupt) {
					t.Fatalf("%s cut at %d: %v", name, cut, err)
				}
				continue
			}
			if name == RunFile {
				t.Fatalf("%s cut at %d is read", name, cut)
			}
			if whole := bytes.Count(b[:cut], []byte("\n")) - 1; reflect.ValueOf(got).Len() != whole {
				t.Fatalf("%s cut at %d has %d lines, want %d", name, cut, reflect.ValueOf(got).Len(), whole)
			}
		}
	}
}

// JR4: a flipped bit is found, or means nothing.
func TestBitFlip(t *testing.T) {
	for name, b := range encodings(t) {
		for i := range b {
			for bit := range 8 {
				bad := bytes.Clone(b)
				bad[i] ^= 1 << bit
				got, err := decode(name, bad)
				switch {
				case err != nil:
					if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
						t.Fatalf("%s, byte %d bit %d: %v", name, i, bit, err)
					}
				case name == RunFile || b[i] != '\n': // a lost line feed makes the last line a torn one
					if !reflect.DeepEqual(got, wants()[name]) {
						t.Fatalf("%s, byte %d bit %d: read as something else", name, i, bit)
					}
				}
			}
		}
	}
}

func TestVersion(t *testing.T) {
	for name, b := range encodings(t) {
		for _, space := range []string{"", " "} {
			b = bytes.Replace(b, []byte(`"version":`+space+`1`), []byte(`"version":`+space+`2`), 1)
		}
		if _, err := decode(name, b); !errors.Is(err, base.ErrFormatVersion) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A history outside the folder is never opened.
func TestHistoryStaysInside(t *testing.T) {
	for _, path := range []string{"/etc/passwd", "../x", "a/../../x"} {
		r := sampleRun()
		r.Episodes[0].History = path
		b, err := r.Encode()
		must(t, err)
		if _, err := Decode(b); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestJudge(t *testing.T) {
	episode := func(vs ...check.Verdict) Episode {
		e := Episode{Number: len(vs)}
		for _, v := range vs {
			e.Results = append(e.Results, check.Result{Name: "x", Verdict: v, Text: "it is " + string(v)})
		}
		e.Judge()
		return e
	}
	const p, f, u = check.Pass, check.Fail, check.Unknown
	for _, c := range []struct {
		name     string
		episodes []Episode
		done     bool
		text     string
		want     check.Verdict
		wantText string
	}{
		{"nothing", nil, true, "", u, "the run did not come to its end"},
		{"pass", []Episode{episode(p), episode(p, p)}, true, "old", p, ""},
		{"not done", []Episode{episode(p)}, false, "interrupted", u, "interrupted"},
		{"unknown", []Episode{episode(p), episode(u, p)}, true, "", u, "episode 2: x: it is unknown"},
		{"fail after unknown", []Episode{episode(u), episode(p, u, f)}, true, "", f, "episode 3: x: it is fail"},
		{"no result is no pass", []Episode{episode()}, true, "", u, "the run did not come to its end"},
	} {
		r := &Run{Episodes: c.episodes, Done: c.done, Text: c.text}
		r.Judge()
		if r.Verdict != c.want || r.Text != c.wantText {
			t.Errorf("%s: %s %q", c.name, r.Verdict, r.Text)
		}
	}
}

func TestLongestGap(t *testing.T) {
	for _, c := range []struct {
		name           string
		done           []int64
		from, to, want int64
	}{
		{"nothing at all", nil, 10, 30, 20},
		{"steady", []int64{8, 12, 16, 20, 24, 28, 32}, 10, 30, 4},
		{"began before the fault", []int64{2, 20, 25, 30}, 10, 30, 18},
		{"ends after the window", []int64{9, 12, 50}, 10, 30, 38},
		{"the episode ended", []int64{9, 12, 14}, 10, 30, 3},
		{"outside", []int64{1, 2, 3, 100, 101}, 40, 50, 97},
	} {
		if got := longestGap(c.done, c.from, c.to); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

func TestSeries(t *testing.T) {
	s := NewSeries(int64(90 * time.Second))
	op := func(from, took time.Duration, o history.Outcome) history.Op {
		op := history.Op{Invoke: int64(from), Return: int64(from + took), Outcome: o}
		if o == history.Unknown {
			op.Return = history.Never
		}
		return op
	}
	var ops []history.Op
	for range 99 {
		ops = append(ops, op(time.Second, 2*time.Millisecond, history.OK))
	}
	ops = append(ops, op(time.Second, 900*time.Millisecond, history.OK), op(1500*time.Millisecond, time.Hour, history.Unknown),
		op(time.Second, 10*time.Millisecond, history.Fail), op(time.Hour, time.Second, history.OK))
	s.Add(ops, sampleEvents)
	if got := s.Slots[1]; got.OK != 100 || got.Failed != 1 || got.Unknown != 1 {
		t.Errorf("%d ok, %d failed, %d unknown", got.OK, got.Failed, got.Unknown)
	}
	within := func(q float64, low, high time.Duration) {
		if l := s.Slots[1].Latency(q); l < low || l > high {
			t.Errorf("quantile %v: %v", q, l)
		}
	}
	within(0.5, 2*time.Millisecond, 2500*time.Microsecond)
	within(1, 900*time.Millisecond, 1100*time.Millisecond)
	if last := s.Slots[len(s.Slots)-1]; last.OK != 1 || s.Slots[0].Latency(0.5) != 0 {
		t.Errorf("an operation after the end is not in the last slot")
	}
	if long := NewSeries(int64(100 * time.Hour)); len(long.Slots) > maxSlots+1 || long.SlotNs*int64(len(long.Slots)) < int64(100*time.Hour) {
		t.Errorf("%d slots of %v", len(long.Slots), time.Duration(long.SlotNs))
	}
}

// folder makes a folder like that of a run.
func folder(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for name, b := range encodings(t) {
		must(t, os.WriteFile(filepath.Join(dir, name), b, 0o644))
	}
	must(t, os.Mkdir(filepath.Join(dir, EpisodesDir), 0o755))
	run := sampleRun()
	for i := range run.Episodes {
		f, err := os.Create(filepath.Join(dir, run.Episodes[i].History))
		must(t, err)
		now := int64(i) * 45e9
		rec, err := history.NewRecorder(f, history.Header{}, history.Options{Clock: func() int64 { now += 1e8; return now }})
		must(t, err)
		for n := range int64(50) {
			c := rec.Invoke(history.Op{Process: 1, Workload: "counter", F: "add", Key: "k", Arg: []int64{n}})
			rec.Complete(c, history.Done{Outcome: history.OK})
		}
		must(t, rec.Close())
		must(t, f.Close())
	}
	return dir
}

// JR2, JR3: the page is made of the folder's files alone, needs nothing from
// elsewhere, and shows text as text.
// A fault that was in force when the harness was killed is in the page too.
func TestFaultWithoutEnd(t *testing.T) {
	kill := Event{Type: EventBegun, At: 5, Name: "kill-one", Kind: "kill"}
	cut := Event{Type: EventBegun, At: 7, Name: "partition-one", Kind: "partition"}
	healed := Event{Type: EventFault, At: 5, End: 9, Name: "kill-one", Kind: "kill"}
	got := endedFaults([]Event{kill, cut, healed}, 100)
	if len(got) != 2 || got[0].Name != cut.Name || got[0].Type != EventFault || got[0].End != 100 || got[1].End != 9 {
		t.Errorf("%+v", got)
	}
}

func TestPage(t *testing.T) {
	dir := folder(t)
	run, err := LoadRun(dir)
	must(t, err)
	must(t, Pack(dir, &run.Episodes[0]))
	must(t, run.Save(dir))
	if h, err := LoadHistory(dir, &run.Episodes[0]); err != nil || len(h.Ops) != 50 || !h.Complete {
		t.Fatalf("the packed history: %v", err)
	}
	must(t, WritePage(dir))
	b, err := os.ReadFile(filepath.Join(dir, PageFile))
	must(t, err)
	page := string(b)
	for _, want := range []string{"Seed 7", "episode 2: counter", "lost &lt;b&gt;3&lt;/b&gt;", "operations #1 #2", "kill -9 of n1", "n2 ended with code 70",
		"keelstate-jepsen run --seed 7", "clock-step: no control", "<svg", "<path", `<td class="n">200ms</td>`} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	for _, bad := range []string{"http:", "https:", "<script", "src=", "<b>3", "NaN", "ZgotmplZ"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
}

func TestDamagedPack(t *testing.T) {
	dir := folder(t)
	e := &sampleRun().Episodes[0]
	must(t, Pack(dir, e))
	path := filepath.Join(dir, e.History)
	b, err := os.ReadFile(path)
	must(t, err)
	for i := range b {
		bad := bytes.Clone(b)
		bad[i] ^= 0x40
		must(t, os.WriteFile(path, bad, 0o644))
		h, err := LoadHistory(dir, e)
		if err != nil && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
			t.Fatalf("byte %d: %v", i, err)
		}
		if err == nil && len(h.Ops) != 50 {
			t.Fatalf("byte %d: %d operations", i, len(h.Ops))
		}
	}
}

// What a killed harness has left says so.
func TestKilledRun(t *testing.T) {
	dir := t.TempDir()
	must(t, (&Run{Verdict: check.Unknown}).Save(dir))
	if r, err := LoadRun(dir); err != nil || r.Verdict != check.Unknown || !strings.Contains(r.Text, "did not come to its end") {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestNoRun(t *testing.T) {
	if _, err := LoadRun(t.TempDir()); !errors.Is(err, base.ErrNotFound) {
		t.Error(err)
	}
}

func TestLedgerRow(t *testing.T) {
	const want = "| 0123456789ab | 7 | 1.6 | 2 | 4: kill 3, pause 1 | 102 | fail |"
	if got := sampleRun().LedgerRow(); got != want {
		t.Errorf("%s", got)
	}
}

func FuzzDecode(f *testing.F) {
	for _, b := range encodings(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := Decode(b); err == nil {
			if _, err := r.Encode(); err != nil {
				t.Fatal(err)
			}
		}
		_, _ = ReadEvents(bytes.NewReader(b)) // must not panic
		_, _ = ReadSamples(bytes.NewReader(b))
	})
}
