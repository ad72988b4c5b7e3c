package check

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/jepsen/history"
)

var rewrite = flag.Bool("rewrite", false, "write the saved histories anew")

// TestSavedHistories judges files of known good and known bad runs, as
// `keelstate-jepsen check` does.
func TestSavedHistories(t *testing.T) {
	if *rewrite {
		saveAll(t)
	}
	for dir, want := range map[string]Verdict{"good": Pass, "bad": Fail} {
		files, err := filepath.Glob(filepath.Join("testdata", dir, "*.jsonl"))
		if err != nil || len(files) < 7 {
			t.Fatalf("%d files: %v", len(files), err)
		}
		for _, f := range files {
			file, err := os.Open(f)
			if err != nil {
				t.Fatal(err)
			}
			h, err := history.Read(file, history.ReadOptions{})
			file.Close()
			if err != nil || !h.Complete {
				t.Fatalf("%s: complete %v: %v", f, err == nil, err)
			}
			for _, res := range Judge(h, Options{}) {
				if res.Verdict != want {
					t.Errorf("%s: %v, want %v: %s", f, res.Verdict, want, res.Text)
				}
			}
		}
	}
}

func saveAll(t *testing.T) {
	for n, w := range worlds {
		name := fmt.Sprintf("%s-%d", w.checker.Name(), n)
		// The first seed that gives occasion for every mutation.
		for seed := uint64(1); ; seed++ {
			r := rng(seed)
			ops := w.generate(r, 4, 40, 12)
			bad := map[string][]*history.Op{}
			for _, kind := range kinds(w) {
				if c := clone(ops); w.spoil[kind](r, c) {
					bad[kind] = c
				}
			}
			if seed > 5000 {
				t.Fatalf("no seed spoils %s in every way", name)
			}
			if len(bad) < len(w.spoil) {
				continue
			}
			save(t, "good", name, w, ops)
			for kind, ops := range bad {
				save(t, "bad", name+"-"+strings.ReplaceAll(strings.ReplaceAll(kind, " ", "-"), "'", ""), w, ops)
			}
			break
		}
	}
}

// save replays operations through a recorder.
func save(t *testing.T, dir, name string, w world, ops []*history.Op) {
	t.Helper()
	type event struct {
		at  int64
		op  *history.Op
		end bool
	}
	var events []event
	for _, op := range ops {
		events = append(events, event{op.Invoke, op, false})
		if op.Outcome != history.Unknown {
			events = append(events, event{op.Return, op, true})
		}
	}
	slices.SortStableFunc(events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	var now int64
	var out bytes.Buffer
	rec, err := history.NewRecorder(&out, history.Header{Note: name}, history.Options{Clock: func() int64 { return now }})
	if err != nil {
		t.Fatal(err)
	}
	calls := map[*history.Op]history.Call{}
	for _, e := range events {
		now = e.at
		if !e.end {
			o := history.Op{Process: e.op.Process, Workload: w.checker.Name(), F: e.op.F, Key: e.op.Key, Arg: e.op.Arg}
			for _, p := range e.op.Parts {
				o.Parts = append(o.Parts, history.Part{Key: p.Key, Arg: p.Arg})
			}
			calls[e.op] = rec.Invoke(o)
			continue
		}
		d := history.Done{Outcome: e.op.Outcome, Result: e.op.Result}
		for _, p := range e.op.Parts {
			d.Parts = append(d.Parts, p.Result)
		}
		rec.Complete(calls[e.op], d)
	}
	if err := rec.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", dir, name+".jsonl")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// CK1, with shrinking: valid histories of any shape pass.
func TestValidHistoriesProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := worlds[rapid.IntRange(0, len(worlds)-1).Draw(t, "workload")]
		ops := w.generate(rng(rapid.Uint64().Draw(t, "seed")), rapid.IntRange(1, 12).Draw(t, "clients"),
			rapid.IntRange(1, 150).Draw(t, "operations"), rapid.SampledFrom([]int{0, 3, 8, 30}).Draw(t, "lossy"))
		if res := w.checker.Check(ops, Options{}); res.Verdict == Fail {
			t.Fatalf("%s: %s\n%s", res.Name, res.Text, lines(ops))
		}
	})
}

// A prefix of a good history is good: the harness may be killed at any time.
func TestPrefixesProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := worlds[rapid.IntRange(0, len(worlds)-1).Draw(t, "workload")]
		ops := clone(w.generate(rng(rapid.Uint64().Draw(t, "seed")), 4, 60, 12))
		until := ops[rapid.IntRange(0, len(ops)-1).Draw(t, "until")].Invoke
		var cut []*history.Op
		for _, op := range ops {
			if op.Invoke > until {
				continue
			}
			if op.Return > until {
				op.Outcome, op.Return, op.Result = history.Unknown, history.Never, nil
			}
			cut = append(cut, op)
		}
		if res := w.checker.Check(cut, Options{}); res.Verdict == Fail {
			t.Fatalf("%s: %s\n%s", res.Name, res.Text, lines(cut))
		}
	})
}
