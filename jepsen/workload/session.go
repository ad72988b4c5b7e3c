package workload

import (
	"context"
	"sync/atomic"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Session sends numbered appends in a pipeline, of which the client sends each
// as often as it takes.
type Session struct {
	driver
	labels atomic.Int64 // sessions as the history names them
}

// depth is how many appends of a worker are on their way at a time.
const depth = 8

// NewSession makes the workload.
func NewSession(c Config) *Session {
	if c.OpsPerKey <= 0 {
		c.OpsPerKey = 200
	}
	return &Session{driver: newDriver("session", c)}
}

// Run works until ctx ends. Rounds of appends to one list are started one after
// the other and then waited for; in some the list is read too.
func (s *Session) Run(ctx context.Context, n int) {
	processes := make([]int64, depth)
	for k := range processes {
		processes[k] = s.rec.NewProcess()
	}
	label, number := s.labels.Add(1), int64(0)
	w := s.worker(n)
	for s.pace.wait(ctx, 1) {
		key, _ := s.keys.take(w.rng.IntN(s.cfg.Keys))
		if w.rng.IntN(100) < 15 {
			s.read(ctx, w, key)
			continue
		}
		var round []<-chan history.Outcome
		for size := 1 + w.rng.IntN(depth); len(round) < size; {
			number++
			round = append(round, s.start(ctx, w, processes[len(round)], key, label, number))
			if len(round) < size && !s.pace.wait(ctx, 1) {
				break
			}
		}
		if s.finish(round, processes) || number+depth >= 1<<numberBits {
			// A new name for what comes after an operation that may be late.
			label, number = s.labels.Add(1), 0
		}
	}
}

// start starts an append; its outcome comes when it is known. Each append on
// its way has a process of its own, for a process does one thing at a time.
func (s *Session) start(ctx context.Context, w *worker, process int64, key string, label, number int64) <-chan history.Outcome {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Timeout)
	began, call := s.rec.Now(), s.rec.Invoke(history.Op{Process: process, Workload: s.name, F: "append", Key: key, Arg: []int64{label, number}})
	wait := w.client.Sessions.Append(ctx, key, label, number)
	outcome := make(chan history.Outcome, 1) // one is sent
	go func() {
		defer cancel()
		d := DoneOf(nil, wait(), true)
		s.rec.Complete(call, d)
		s.served(d, true, began)
		outcome <- d.Outcome
	}()
	return outcome
}

// finish waits for a round; it says whether any did not succeed.
func (s *Session) finish(round []<-chan history.Outcome, processes []int64) (broken bool) {
	for k, c := range round {
		o := <-c
		if o == history.Unknown {
			processes[k] = s.rec.NewProcess() // JW2
		}
		broken = broken || o != history.OK
	}
	return broken
}

func (s *Session) read(ctx context.Context, w *worker, key string) history.Outcome {
	return w.do(ctx, history.Op{F: "read", Key: key}, false, func(ctx context.Context) ([]int64, error) {
		return w.client.Sessions.Read(ctx, key)
	})
}

// Final reads every list.
func (s *Session) Final(ctx context.Context) error { return s.finally(ctx, s.keys.used(), s.read) }
