package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"time"
)

// sample is one call of a pacer.
type sample struct {
	due  time.Time     // when it was to begin
	took time.Duration // from then until its answer
	err  error
}

// pacer makes calls at a constant rate, whether or not those before have been
// answered: a cluster that stands still for a second shows in the calls of that
// second, each with the time from when it was due (KB4).
type pacer struct {
	perSecond int
	call      func(ctx context.Context, n int) error

	mu      sync.Mutex
	samples []sample
}

const (
	pacerTick = time.Millisecond
	// maxOpen bounds the calls without an answer; what is due then begins later.
	maxOpen = 4096
)

// run calls until the context ends, and returns when all calls have ended.
func (p *pacer) run(ctx context.Context) {
	var wg sync.WaitGroup
	open := make(chan struct{}, maxOpen)
	start := time.Now()
	ticker := time.NewTicker(pacerTick)
	defer ticker.Stop()
	for n := 0; ; {
		for ; time.Since(start) >= p.due(n); n++ {
			select {
			case open <- struct{}{}:
			case <-ctx.Done():
				wg.Wait()
				return
			}
			at := n
			wg.Go(func() {
				p.one(ctx, start.Add(p.due(at)), at)
				<-open
			})
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			wg.Wait()
			return
		}
	}
}

// due is when call n begins, from the start on.
func (p *pacer) due(n int) time.Duration {
	return time.Duration(float64(n) / float64(p.perSecond) * float64(time.Second))
}

func (p *pacer) one(ctx context.Context, due time.Time, n int) {
	err := p.call(ctx, n)
	if ctx.Err() != nil {
		return // the end of the measurement cut it off
	}
	s := sample{due: due, took: time.Since(due), err: err}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.samples = append(p.samples, s)
}

// seen are the calls so far.
func (p *pacer) seen() []sample {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.samples)
}

// span is a time in which calls were due.
type span struct{ from, to time.Time }

func (s span) has(t time.Time) bool { return !t.Before(s.from) && t.Before(s.to) }

// latencies are those of the calls due within any of the spans, in ms.
type latencies struct {
	calls, errors int
	p50, p99, max float64
	perSecond     float64
	first         error
}

func (p *pacer) within(spans ...span) latencies {
	var l latencies
	var took []time.Duration
	for _, s := range p.seen() {
		if !slices.ContainsFunc(spans, func(w span) bool { return w.has(s.due) }) {
			continue
		}
		if s.err != nil {
			l.errors++
			if l.first == nil {
				l.first = s.err
			}
			continue
		}
		took = append(took, s.took)
	}
	l.calls = len(took)
	if l.calls == 0 {
		return l
	}
	seconds := 0.0
	for _, w := range spans {
		seconds += w.to.Sub(w.from).Seconds()
	}
	slices.Sort(took)
	l.p50, l.p99, l.max = ms(quantile(took, 0.5)), ms(quantile(took, 0.99)), ms(took[len(took)-1])
	l.perSecond = float64(l.calls) / seconds
	return l
}

// quantile of a sorted list: the smallest value that is not below that part of them.
func quantile(sorted []time.Duration, q float64) time.Duration {
	at := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(at, 0), len(sorted)-1)]
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// printSlow shows, for each span, the slowest call of each 20 ms of it: when in the
// span the cluster stood.
func (p *pacer) printSlow(spans []span) {
	const step = 20 * time.Millisecond
	all := p.seen()
	for i, w := range spans {
		slowest := make([]time.Duration, w.to.Sub(w.from)/step+1)
		for _, s := range all {
			if w.has(s.due) {
				at := s.due.Sub(w.from) / step
				slowest[at] = max(slowest[at], s.took)
			}
		}
		fmt.Fprintf(os.Stderr, "span %d, slowest calls by the %v in which they were due:", i, step)
		for _, d := range slowest {
			fmt.Fprintf(os.Stderr, " %.0f", ms(d))
		}
		fmt.Fprintln(os.Stderr)
	}
}
