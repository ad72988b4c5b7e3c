package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestPacerTimesCallsFromWhenTheyWereDue(t *testing.T) { // KB4
	// The first call holds all others up until it is released.
	release := make(chan struct{})
	var begun atomic.Int64
	var released time.Time // set before release is closed: nobody can be answered earlier
	p := &pacer{perSecond: 1000, call: func(ctx context.Context, n int) error {
		if begun.Add(1) == 100 {
			released = time.Now()
			close(release)
		}
		select {
		case <-release:
		case <-ctx.Done():
		}
		return nil
	}}
	ctx, cancel := context.WithCancel(context.Background())
	start := time.Now()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.run(ctx)
	}()
	<-release
	for len(p.seen()) < 100 {
		if err := wait(ctx, time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	<-ended
	var first sample
	for _, s := range p.seen() {
		if first.due.IsZero() || s.due.Before(first.due) {
			first = s
		}
	}
	if first.due.Before(start) || first.due.Add(first.took).Before(released) {
		t.Errorf("the first call was due at %v and took %v, but nothing was answered before %v", first.due, first.took, released.Sub(start))
	}
	for i, s := range p.seen() {
		if s.took < 0 || s.due.Before(start) {
			t.Errorf("call %d was due at %v and took %v", i, s.due.Sub(start), s.took)
		}
	}
}

func TestPacerCountsErrorsApart(t *testing.T) { // KB2
	at := time.Unix(1000, 0)
	failed := errors.New("refused")
	p := &pacer{}
	for i := range 100 {
		p.samples = append(p.samples, sample{due: at.Add(time.Duration(i) * time.Millisecond), took: time.Duration(i+1) * time.Millisecond})
	}
	p.samples = append(p.samples, sample{due: at.Add(time.Millisecond), took: time.Hour, err: failed},
		sample{due: at.Add(time.Hour), took: time.Hour})
	l := p.within(span{at, at.Add(100 * time.Millisecond)})
	if l.calls != 100 || l.errors != 1 || !errors.Is(l.first, failed) {
		t.Errorf("%d calls, %d errors, first %v", l.calls, l.errors, l.first)
	}
	if l.p50 != 50 || l.p99 != 99 || l.max != 100 || l.perSecond != 1000 {
		t.Errorf("p50 %v, p99 %v, max %v, %v/s", l.p50, l.p99, l.max, l.perSecond)
	}
	l = p.within(span{at, at.Add(10 * time.Millisecond)}, span{at.Add(90 * time.Millisecond), at.Add(100 * time.Millisecond)})
	if l.calls != 20 || l.p50 != 10 {
		t.Errorf("in two spans %d calls with p50 %v", l.calls, l.p50)
	}
	if l := p.within(span{at.Add(-time.Hour), at}); l.calls != 0 || l.p99 != 0 {
		t.Errorf("%+v where nothing was due", l)
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{"1": 1, "10kB": 10_000, "100MB": 100_000_000, "1GB": 1_000_000_000} {
		if got, err := bytesOf(text); err != nil || got != want {
			t.Errorf("%s is %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "MB", "0MB", "-1GB", "1TB", "99999999999GB", "1.5GB"} {
		if got, err := bytesOf(text); err == nil {
			t.Errorf("%q is %d, not refused", text, got)
		}
	}
}

func TestCheckpointsRefusesWhatItDoesNotKnow(t *testing.T) {
	for _, args := range [][]string{{"--parts", "checkpoint,else"}, {"--stores", "tape"}, {"--keys", "10"}, {"--rounds", "0"}} {
		cmd := checkpointsCommand()
		cmd.SetArgs(append(args, "--dir", t.TempDir()))
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		if err := cmd.Execute(); err == nil {
			t.Errorf("%v was not refused", args)
		}
	}
}

func TestFleetLeavesNothing(t *testing.T) { // KB6
	dir, bin := t.TempDir(), t.TempDir()
	// A node that says why it ends.
	script := "#!/bin/sh\necho 'no disk today' >&2\nexit 1\n"
	if err := os.WriteFile(filepath.Join(bin, "keelstate-node"), []byte(script), 0o750); err != nil {
		t.Fatal(err)
	}
	o := &checkpointOptions{dir: dir, bin: bin, memory: "64MiB"}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := o.with(ctx, storeFile, func(f *fleet) error { return f.start(ctx, 3) })
	if err == nil || !strings.Contains(err.Error(), "no disk today") {
		t.Errorf("a node that ends gives %v", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

func TestReportGivesMediansOfCases(t *testing.T) {
	var c cases
	for _, v := range []float64{3, 1, 2.5} {
		c.add(&figures{"rollback", "local links", []figure{{"s", v}, {"fetched_bytes", 0}}}, "1.5")
	}
	c.add(&figures{"rollback", "from the store", []figure{{"s", 4}}}, "2.0")
	var out bytes.Buffer
	out.WriteString(c.String())
	for _, want := range []string{"| rollback | local links | 3 | s 2.50, fetched_bytes 0 | 1.5, 1.5, 1.5 |", "| rollback | from the store | 1 | s 4 | 2.0 |"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%s is missing in:\n%s", want, out.String())
		}
	}
}
