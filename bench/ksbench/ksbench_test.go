package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// fakeTarget answers at once, every third call with an error.
type fakeTarget struct {
	target
	n atomic.Int64
}

func (f *fakeTarget) write(context.Context, string) error {
	if f.n.Add(1)%3 == 0 {
		return errMissing
	}
	return nil
}
func (f *fakeTarget) shardOf(key string) (uint64, error) { return uint64(1 + len(key)%2), nil }
func (f *fakeTarget) shards() []uint64                   { return []uint64{1, 2} }

func TestMeasureCountsErrorsApartAndEndsByCalls(t *testing.T) { // KB2, KB3
	f := &fakeTarget{}
	g, err := newKeyring(f, 1000)
	if err != nil {
		t.Fatal(err)
	}
	o := &loadOptions{seconds: time.Minute, maxOps: 3000, per: 100}
	r, err := o.measure(context.Background(), f, g, "write", 4)
	if err != nil {
		t.Fatal(err)
	}
	if r.Calls != 2000 || r.Errors != 1000 || r.FirstError != errMissing.Error() {
		t.Errorf("%d calls, %d errors, first %q; want 2000, 1000", r.Calls, r.Errors, r.FirstError)
	}
	if r.Seconds <= 0 || r.Seconds > 30 || r.CallsPerSecond != float64(r.Calls)/r.Seconds {
		t.Errorf("%v s, %v calls/s", r.Seconds, r.CallsPerSecond)
	}
}

func TestMeasureLeavesOutTheWarmUp(t *testing.T) { // KB1
	f := &fakeTarget{}
	g, err := newKeyring(f, 100)
	if err != nil {
		t.Fatal(err)
	}
	o := &loadOptions{warmup: time.Minute, seconds: time.Minute, maxOps: 3000, per: 100}
	r, err := o.measure(context.Background(), f, g, "write", 1)
	if err != nil {
		t.Fatal(err)
	}
	if r.Calls != 0 || r.Errors != 0 || f.n.Load() != 3000 {
		t.Errorf("%d calls and %d errors counted of %d", r.Calls, r.Errors, f.n.Load())
	}
}

func TestUnknownWorkIsRefused(t *testing.T) {
	f := &fakeTarget{}
	g, err := newKeyring(f, 100)
	if err != nil {
		t.Fatal(err)
	}
	o := &loadOptions{seconds: time.Second, maxOps: 1}
	if _, err := o.measure(context.Background(), f, g, "writes", 1); err == nil {
		t.Error("unknown work was measured")
	}
}

func TestKeysOfAnAtomicCallShareAShard(t *testing.T) {
	f := &fakeTarget{}
	g, err := newKeyring(f, 2000)
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	for i, list := range g.byShard {
		total += len(list)
		for _, k := range some(rand.New(rand.NewPCG(1, 2)), list, make([]string, 100)) {
			if id, _ := f.shardOf(k); id != f.shards()[i] {
				t.Fatalf("%s is of shard %d, listed under %d", k, id, f.shards()[i])
			}
		}
	}
	if total != len(g.all) {
		t.Errorf("%d keys by shard, %d in all", total, len(g.all))
	}
	if _, err := newKeyring(f, 1); err == nil {
		t.Error("a shard without keys was accepted")
	}
}

func TestResumedAfterIgnoresAnswersToOlderWrites(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	answers := []answered{{at(0), at(9)}, {at(9), at(12)}, {at(12), at(900)}, {at(900), at(905)}}
	if d, ok := resumedAfter(answers, at(10)); !ok || d != 890*time.Millisecond {
		t.Errorf("resumed after %v, %v", d, ok)
	}
	if d, ok := resumedAfter(answers, at(13)); !ok || d != 892*time.Millisecond {
		t.Errorf("resumed after %v, %v; the write open at the kill does not count", d, ok)
	}
	if _, ok := resumedAfter(answers, at(901)); ok {
		t.Error("resumed without a later write")
	}
	if d := longestPause(answers, at(10)); d != 888*time.Millisecond {
		t.Errorf("longest pause %v", d)
	}
}

func TestSumMetric(t *testing.T) {
	text := "# HELP x\nkeelstate_snapshots_total{group=\"1\",what=\"installed\"} 2\nkeelstate_snapshots_total{group=\"2\",what=\"made\"} 7\n" +
		"keelstate_snapshots_total{group=\"2\",what=\"installed\"} 1e+00\nkeelstate_snapshots_totals{what=\"installed\"} 50\n"
	if n, err := sumMetric(text, "keelstate_snapshots_total", `what="installed"`); err != nil || n != 3 {
		t.Errorf("%v, %v", n, err)
	}
	if n, err := sumMetric("", "keelstate_snapshots_total", `what="installed"`); err != nil || n != 0 {
		t.Errorf("%v, %v", n, err)
	}
	if _, err := sumMetric("a{b=\"c\"} x\n", "a", "b"); err == nil {
		t.Error("a value that is no number was taken")
	}
}

func TestReportReadsWhatWasSaved(t *testing.T) {
	c := common{json: filepath.Join(t.TempDir(), "results.jsonl"), label: "l"}
	for _, r := range []record{
		{What: "load", LoadAvg: "0.50", Load: &result{Mode: "client", Work: "write", Clients: 64, Shards: 4, CallsPerSecond: 1234, KeysPerSecond: 1234, P50us: 1500, P99us: 9000, NodeCPUus: 310}},
		{What: "resume", Resume: &resumed{SlowestMs: 900}},
		{What: "resume", Resume: &resumed{SlowestMs: 700}},
		{What: "restart", Restart: &restart{Node: "n1", ReadyMs: 10, ServedMs: 20}},
	} {
		if err := c.save(r); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(c.json)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out strings.Builder
	if err := report(&out, f); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| client | write | 64 | 4 | 1234 | 1234 | 1.50 | 9.00 | 310 | 0 | 0 | 0.50 |", "2 rounds, median 800 ms, max 900 ms", "served as leader after 20 ms"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if err := report(&out, strings.NewReader("{}\nnonsense\n")); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("a broken line: %v", err)
	}
}

func TestArgumentsAreChecked(t *testing.T) {
	for _, s := range []string{"", "0", "1,,2", "x", "-1"} {
		if _, err := numbers(s); err == nil {
			t.Errorf("numbers(%q)", s)
		}
	}
	for _, s := range []string{"", "n1", "n1=", "=5", "n1=x", "n1=1", "n1=0", "n1=-7"} {
		if _, err := parsePids(s); err == nil {
			t.Errorf("parsePids(%q): it could signal what it must not", s)
		}
	}
	if got, err := parsePids("n1=12,n2=13"); err != nil || got["n1"] != 12 || got["n2"] != 13 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestProcessorTime(t *testing.T) {
	if d := statTime([]byte("7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 150 25 0 0\n")); d != 1750*time.Millisecond {
		t.Errorf("%v", d)
	}
	if statTime([]byte("7 (x) S 1")) != 0 || statTime(nil) != 0 {
		t.Error("a short line has a time")
	}
	before, own := processorTime([]int{os.Getpid()}), ownTime()
	for ownTime()-own < 100*time.Millisecond {
	}
	if d := processorTime([]int{os.Getpid(), 1 << 30}) - before; d < 50*time.Millisecond || d > 10*time.Second {
		t.Errorf("used %v", d)
	}
}

func TestWaitEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := wait(ctx, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("wait: %v", err)
	}
}
