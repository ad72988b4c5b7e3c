package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// follower follows something long that the cluster does, and that goes on without it.
type follower[T any] struct {
	app *app
	// line is what there is to say, meter how far it is, ended whether it is over.
	line  func(T) string
	meter func(T) meter
	ended func(T) bool
	// look sees it again; bound bounds each look, 0 not at all.
	look  func(context.Context, T) (T, error)
	bound time.Duration
	// name is it in an error.
	name string
}

// follow looks until it has ended or the context does, and says on stderr what
// changes. An error is that it is not there any more; any other look is taken again.
func (f *follower[T]) follow(ctx context.Context, last T) (T, error) {
	bar := f.app.bar()
	defer bar.end()
	for {
		bar.say(f.line(last))
		bar.draw(f.meter(last))
		if f.ended(last) || ctx.Err() != nil {
			return last, nil
		}
		select {
		case <-ctx.Done():
			return last, nil
		case <-time.After(statusPause):
		}
		look, done := ctx, context.CancelFunc(func() {})
		if f.bound > 0 {
			look, done = context.WithTimeout(ctx, f.bound)
		}
		next, err := f.look(look, last)
		done()
		switch {
		case err == nil:
			last = next
		case errors.Is(err, keel.ErrNotFound):
			return last, err
		case ctx.Err() == nil:
			bar.remark(fmt.Sprintf("%s: %v; trying again", f.name, err))
		}
	}
}

// meter is how far something is, in bytes or in shards; of 0 is not known.
type meter struct {
	done, of uint64
	unit     string
}

func bytesMeter(done, of uint64) meter { return meter{min(done, of), of, "bytes"} }

// fetchMeter adds up what shards have fetched.
func fetchMeter(all []*keelstatepb.ShardFetch) meter {
	var done, of uint64
	for _, f := range all {
		done, of = done+f.GetHereBytes(), of+f.GetDueBytes()
	}
	return bytesMeter(done, of)
}

func (m meter) String() string {
	if m.unit == "bytes" {
		return fmt.Sprintf("%d%%, %s of %s", m.done*100/m.of, sizeText(m.done), sizeText(m.of))
	}
	return fmt.Sprintf("%d%%, %d of %d %s", m.done*100/m.of, m.done, m.of, m.unit)
}

// sizeText is a number of bytes for the eye.
func sizeText(n uint64) string {
	const k = 1 << 10
	for i, unit := range []string{"GiB", "MiB", "KiB"} {
		if size := uint64(1) << (30 - 10*i); n >= size {
			return fmt.Sprintf("%.1f %s", float64(n*10/size)/10, unit)
		}
	}
	return fmt.Sprintf("%d B", n%k)
}

// barWidth is that of a bar in characters.
const barWidth = 30

// bar shows on stderr how far something is: on a terminal as a bar that moves below
// what was said last, elsewhere as a line now and then.
type bar struct {
	app      *app
	terminal bool
	every    time.Duration // between two lines where there is no terminal
	said     string
	drawn    string // on the terminal's last line
	last     meter
	at       time.Time // of the last line about the meter
}

func (a *app) bar() *bar {
	f, isFile := a.stderr.(*os.File)
	return &bar{app: a, terminal: isFile && isTerminal(f), every: proseEvery, at: time.Now()}
}

// say says a line, if it is another one than the last.
func (b *bar) say(line string) {
	if line != b.said {
		b.said = line
		b.remark(line)
	}
}

func (b *bar) remark(line string) {
	b.clear()
	b.app.prose("%s", line)
}

func (b *bar) draw(m meter) {
	if m.of == 0 || b.app.quiet {
		b.clear()
		return
	}
	if !b.terminal {
		if m != b.last && time.Since(b.at) >= b.every {
			b.app.prose("%s: %s", b.said, m)
			b.last, b.at = m, time.Now()
		}
		return
	}
	full := int(m.done * barWidth / m.of)
	text := fmt.Sprintf("[%s%s] %s", strings.Repeat("#", full), strings.Repeat(".", barWidth-full), m)
	if text != b.drawn {
		b.clear()
		fmt.Fprint(b.app.stderr, text)
		b.drawn = text
	}
}

// clear takes the bar away.
func (b *bar) clear() {
	if b.drawn != "" {
		fmt.Fprint(b.app.stderr, "\r\x1b[K")
		b.drawn = ""
	}
}

func (b *bar) end() { b.clear() }
