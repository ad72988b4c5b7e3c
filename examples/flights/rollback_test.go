package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/client/keeltest/cluster"
	"github.com/keelstate/keelstate/examples/flights/job"
)

// asCommand makes the test's binary the command, for tests that kill it.
const asCommand = "FLIGHTS_TEST_AS_COMMAND"

// killSeed draws where the job is killed.
const killSeed = 4

// jobProcess is the job in a process of its own.
type jobProcess struct {
	cmd    *exec.Cmd
	acks   string
	stderr bytes.Buffer
}

func startJob(t *testing.T, c *cluster.Cluster, dir string, n int, args ...string) *jobProcess {
	t.Helper()
	p := &jobProcess{acks: filepath.Join(dir, fmt.Sprint("acks-", n))}
	args = append([]string{"--endpoints", strings.Join(c.Endpoints(), ","), "--input", testInput, "--recovery", "rollback", "--checkpoint-every", "300ms",
		"--window", "400", "--batch", "50", "--acks", p.acks, "--report", filepath.Join(dir, "report.csv"), "--days", filepath.Join(dir, "days.csv")}, args...)
	p.cmd = exec.CommandContext(t.Context(), os.Args[0], args...)
	p.cmd.Env = append(os.Environ(), asCommand+"=1")
	p.cmd.Stderr = &p.stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return p
}

// acked is how many rows the process has counted.
func (p *jobProcess) acked(t *testing.T) (n int) {
	t.Helper()
	text, err := os.ReadFile(p.acks)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, line := range bytes.Split(text, []byte("\n")) {
		if f := bytes.Split(line, []byte(",")); len(f) == 6 {
			rows, err := strconv.Atoi(string(f[4]))
			if err != nil {
				t.Fatal(err)
			}
			n += rows
		}
	}
	return n
}

// The job has nothing but checkpoints to go on by. It is killed at random points, a
// node crashes, and the answer is the expected one.
func TestKillOfJobWithRollbackLeavesTheAnswerRight(t *testing.T) {
	c := cluster.New(t, cluster.Options{Shards: 3})
	dir := t.TempDir()
	rng := rand.New(rand.NewPCG(killSeed, 0))
	total, rolledBack := 0, 0
	for n := range 3 {
		// So slow that there is much left to do wherever it is killed, though the
		// leader and whoever looks take their time.
		p := startJob(t, c, dir, n, "--rate", "1000")
		at := 300 + rng.IntN(1200)
		c.Nodes().Eventually(fmt.Sprintf("run %d has counted %d rows", n, at), func() error {
			if got := p.acked(t); got < at {
				return fmt.Errorf("%d", got)
			}
			return nil
		})
		if n == 1 {
			c.Restart(c.Nodes().Leader(2))
		}
		if err := p.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := p.cmd.Wait(); err == nil {
			t.Fatal("the killed job ended well")
		}
		total += p.acked(t)
		rolledBack += strings.Count(p.stderr.String(), "was rolled back to checkpoint")
	}
	p := startJob(t, c, dir, 3)
	if err := p.cmd.Wait(); err != nil {
		t.Fatalf("the last run: %v\n%s", err, p.stderr.String())
	}
	total += p.acked(t)
	rolledBack += strings.Count(p.stderr.String(), "was rolled back to checkpoint")
	checkAnswer(t, dir)
	// The position is the only thing that keeps rows from being counted again.
	if rolledBack < 2 || total <= 20000 {
		t.Errorf("%d rollbacks, %d rows counted in all: nothing was taken back\n%s", rolledBack, total, p.stderr.String())
	}
	t.Logf("%d rollbacks, %d rows counted for 20000", rolledBack, total)
}

func checkAnswer(t *testing.T, dir string) {
	t.Helper()
	report, err1 := os.ReadFile(filepath.Join(dir, "report.csv"))
	want, err2 := os.ReadFile("testdata/flights-20k-expected.csv")
	days, err3 := os.ReadFile(filepath.Join(dir, "days.csv"))
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(report, want) {
		t.Error("the report differs from the expected answer")
	}
	checkDays(t, string(report), string(days))
}

// shifted is a cluster to which a position is given that is wrong by some lines. It
// counts the positions beyond the beginning that are in complete checkpoints.
type shifted struct {
	job.Cluster
	by       int64
	complete *atomic.Int64
}

func (s shifted) Begin(ctx context.Context) (job.Session, error) {
	in, err := s.Cluster.Begin(ctx)
	return shiftedSession{in, s}, err
}

type shiftedSession struct {
	job.Session
	c shifted
}

func (s shiftedSession) Participate(ctx context.Context) (job.Participant, error) {
	p, err := s.Session.Participate(ctx)
	return &shiftedParticipant{Participant: p, c: s.c}, err
}

type shiftedParticipant struct {
	job.Participant
	c      shifted
	beyond atomic.Bool
}

func (p *shiftedParticipant) Ack(ctx context.Context, number uint64, position []byte) error {
	var place job.Place
	if err := json.Unmarshal(position, &place); err != nil {
		return err
	}
	if place.Line > 0 {
		place.Line += p.c.by
	}
	p.beyond.Store(place.Line > 0)
	wrong, err := json.Marshal(place)
	if err != nil {
		return err
	}
	return p.Participant.Ack(ctx, number, wrong)
}

func (p *shiftedParticipant) Done(ctx context.Context, number uint64) error {
	err := p.Participant.Done(ctx, number)
	if err == nil && p.beyond.Load() {
		p.c.complete.Add(1)
	}
	return err
}

// What the test above compares tells a position that is wrong by one line, in either
// direction, from the right one.
func TestAPositionThatIsWrongByOneGivesAnotherAnswer(t *testing.T) {
	want, err := os.ReadFile("testdata/flights-20k-expected.csv")
	if err != nil {
		t.Fatal(err)
	}
	for _, by := range []int64{0, -1, 1} {
		// One cluster each: a job does not take back what another one has written.
		c := cluster.New(t, cluster.Options{Nodes: 1, Shards: 2})
		var complete atomic.Int64
		once := func(ctx context.Context, onAck func(job.Ack), args ...string) (string, error) {
			dir := t.TempDir()
			o, err := parse(append([]string{"--quiet", "--endpoints", strings.Join(c.Endpoints(), ","), "--input", testInput, "--keyspace", fmt.Sprint("by", by+1),
				"--recovery", "rollback", "--checkpoint-every", "200ms", "--report", dir + "/report.csv"}, args...), noEnv, os.Stderr)
			if err != nil {
				t.Fatal(err)
			}
			o.job.OnAck = onAck
			o.within = func(c job.Cluster) job.Cluster { return shifted{c, by, &complete} }
			if err := execute(ctx, o, os.Stdout, os.Stderr); err != nil {
				return "", err
			}
			text, err := os.ReadFile(dir + "/report.csv")
			return string(text), err
		}
		ctx, kill := context.WithTimeout(t.Context(), time.Minute)
		_, err := once(ctx, func(job.Ack) {
			if complete.Load() >= 2 {
				kill()
			}
		}, "--rate", "1000") // far more than the checkpoints take
		if kill(); !errors.Is(err, context.Canceled) {
			t.Fatalf("the first run ended with %v", err)
		}
		got, err := once(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if same := got == string(want); same != (by == 0) {
			t.Errorf("a position wrong by %d lines: the answer is right: %t", by, same)
		}
	}
}
