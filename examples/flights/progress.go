package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/keelstate/keelstate/examples/flights/job"
)

// progress shows how far the job is: a bar on a terminal, else a line per 10 s.
type progress struct {
	out     io.Writer
	count   *job.Counters
	rows    int64 // of the input; 0 is not known
	tty     bool
	quiet   bool
	started time.Time
	stop    chan struct{}
	wg      sync.WaitGroup

	mu struct {
		sync.Mutex
		bar bool // the cursor is behind a bar
	}
}

func newProgress(f *os.File, c *job.Counters, rows int64, quiet bool) *progress {
	st, err := f.Stat()
	return &progress{out: f, count: c, rows: rows, quiet: quiet, stop: make(chan struct{}),
		tty: err == nil && st.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb"}
}

func (p *progress) start() {
	p.started = time.Now()
	if p.quiet {
		return
	}
	every := 10 * time.Second
	if p.tty {
		every = 200 * time.Millisecond
	}
	p.wg.Go(func() {
		t := time.NewTicker(every)
		defer t.Stop()
		last, at := int64(0), p.started
		for {
			select {
			case <-p.stop:
				return
			case now := <-t.C:
				n := p.count.Acked.Load()
				p.show(n, perSecond(n-last, now.Sub(at)))
				last, at = n, now
			}
		}
	})
}

// say prints a line of its own.
func (p *progress) say(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clearLocked()
	fmt.Fprintf(p.out, "flights: %s\n", text)
}

func (p *progress) clearLocked() {
	if p.mu.bar {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.mu.bar = false
	}
}

func (p *progress) show(acked int64, rate float64) {
	text := p.line(acked, rate)
	if !p.tty {
		p.say(text)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clearLocked()
	fmt.Fprint(p.out, text)
	p.mu.bar = true
}

// line is the state in one line, with a bar on a terminal where the end is
// known.
func (p *progress) line(acked int64, rate float64) string {
	done := acked + p.count.Skipped.Load()
	if p.rows == 0 {
		return fmt.Sprintf("%d rows acknowledged, %.0f/s", done, rate)
	}
	share := min(1, float64(done)/float64(p.rows))
	text := fmt.Sprintf("%d of %d rows acknowledged (%.0f %%), %.0f/s", done, p.rows, 100*share, rate)
	if !p.tty {
		return text
	}
	const width = 30
	full := int(share * width)
	return "[" + strings.Repeat("#", full) + strings.Repeat(".", width-full) + "] " + text
}

// finish prints the summary, also of a run that failed.
func (p *progress) finish(err error) {
	close(p.stop)
	p.wg.Wait()
	if p.quiet {
		return
	}
	took := time.Since(p.started)
	n := p.count.Acked.Load()
	text := fmt.Sprintf("%d rows counted in %.1f s, %.0f rows/s; %d were counted before, %d bad lines; longest wait for an acknowledgement %d ms",
		n, took.Seconds(), perSecond(n, took), p.count.Skipped.Load(), p.count.Bad.Load(), time.Duration(p.count.WaitedMost.Load()).Milliseconds())
	if err != nil {
		text = "stopped: " + text
	}
	p.say(text)
}

func perSecond(n int64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return float64(n) / d.Seconds()
}
