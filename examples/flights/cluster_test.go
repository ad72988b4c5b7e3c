package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/keelstate/keelstate/client/keeltest/cluster"
	"github.com/keelstate/keelstate/examples/flights/job"
)

const testInput = "testdata/flights-20k.csv"

// countOn runs the command against a cluster and returns its two reports.
func countOn(ctx context.Context, t *testing.T, c *cluster.Cluster, args []string, onAck func(job.Ack)) (report, days string, err error) {
	t.Helper()
	dir := t.TempDir()
	args = append([]string{"--quiet", "--endpoints", strings.Join(c.Endpoints(), ","),
		"--report", dir + "/report.csv", "--days", dir + "/days.csv"}, args...)
	o, err := parse(args, noEnv, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	o.job.OnAck = onAck
	if err := execute(ctx, o, io.Discard, os.Stderr); err != nil {
		return "", "", err
	}
	r, err1 := os.ReadFile(dir + "/report.csv")
	d, err2 := os.ReadFile(dir + "/days.csv")
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return string(r), string(d), nil
}

// The whole way on a real cluster: the job is cut off in the middle and started
// again, the leader of a shard crashes, and the answer is the expected one.
func TestKillOfJobAndLeaderLeaveTheAnswerRight(t *testing.T) {
	c := cluster.New(t, cluster.Options{Shards: 4})
	ctx, kill := context.WithCancel(t.Context())
	defer kill()
	_, _, err := countOn(ctx, t, c, []string{"--input", testInput, "--window", "400", "--batch", "50"}, func(a job.Ack) {
		if a.Total > 5000 {
			kill()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("the first run ended with %v", err)
	}

	var once atomic.Bool
	crashed := make(chan struct{})
	report, days, err := countOn(t.Context(), t, c, []string{"--input", testInput, "--window", "400", "--batch", "50"}, func(a job.Ack) {
		if a.Total > 4000 && once.CompareAndSwap(false, true) {
			go func() {
				defer close(crashed)
				c.Restart(c.Nodes().Leader(1))
			}()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	<-crashed
	want, err := os.ReadFile("testdata/flights-20k-expected.csv")
	if err != nil {
		t.Fatal(err)
	}
	if report != string(want) {
		t.Error("the report differs from the expected answer")
	}
	checkDays(t, report, days)

	// What the cluster holds is reported alike without the input.
	again, _, err := countOn(t.Context(), t, c, nil, nil)
	if err != nil || again != report {
		t.Errorf("read back again: %v, equal: %v", err, again == report)
	}
	// Another input under the same keyspace is refused and changes nothing.
	other := t.TempDir() + "/other.csv"
	if err := os.WriteFile(other, []byte("date,delay,distance,origin,destination\n2002/01/01 00:47,1,1,ABE,LAS\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var refused *job.OtherInput
	if _, _, err := countOn(t.Context(), t, c, []string{"--input", other}, nil); !errors.As(err, &refused) {
		t.Errorf("another input: %v", err)
	}
}

// checkDays compares the days with a single pass over the input.
func checkDays(t *testing.T, report, days string) {
	t.Helper()
	text, err := os.ReadFile(testInput)
	if err != nil {
		t.Fatal(err)
	}
	want := make(map[string]int)
	for _, line := range bytes.Split(bytes.TrimSpace(text), []byte("\n"))[1:] {
		f := strings.Split(string(line), ",")
		want[f[3]+","+f[0][:10]]++
	}
	lines := strings.Split(strings.TrimSpace(days), "\n")
	if lines[0] != "origin,day,flights" || len(lines)-1 != len(want) {
		t.Fatalf("%d lines of days, want %d; header %q", len(lines)-1, len(want), lines[0])
	}
	perOrigin := make(map[string]int)
	for _, line := range lines[1:] {
		i := strings.LastIndexByte(line, ',')
		if line[i+1:] != strconv.Itoa(want[line[:i]]) {
			t.Errorf("%s, want %d", line, want[line[:i]])
		}
		origin, _, _ := strings.Cut(line, ",")
		perOrigin[origin] += want[line[:i]]
	}
	for _, line := range strings.Split(strings.TrimSpace(report), "\n")[1:] {
		f := strings.Split(line, ",")
		if f[1] != strconv.Itoa(perOrigin[f[0]]) {
			t.Errorf("origin %s: %s flights, the days sum to %d", f[0], f[1], perOrigin[f[0]])
		}
	}
}
