package steps

import (
	"container/heap"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"math/rand/v2"
	"time"
)

// Loop is a virtual clock with what is to happen when. Things of the same time
// happen in the order in which they were planned.
type Loop struct {
	*rand.Rand
	now     time.Duration
	queue   events
	planned uint64
	sum     hash.Hash
	// Lines receives the trace if it is not nil.
	Lines func(string)
	// problems are broken invariants.
	problems []string
}

type event struct {
	at  time.Duration
	seq uint64
	do  func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	old := *e
	x := old[len(old)-1]
	old[len(old)-1] = event{}
	*e = old[:len(old)-1]
	return x
}

// NewLoop returns a loop whose choices follow from the seed.
func NewLoop(seed uint64) *Loop {
	return &Loop{Rand: rand.New(rand.NewPCG(seed, 0x57e9)), sum: sha256.New()}
}

// Now is the virtual time.
func (l *Loop) Now() time.Duration { return l.now }

// After plans something.
func (l *Loop) After(d time.Duration, do func()) {
	l.planned++
	heap.Push(&l.queue, event{at: l.now + max(d, 0), seq: l.planned, do: do})
}

// Soon plans something within d.
func (l *Loop) Soon(d time.Duration, do func()) { l.After(time.Duration(l.Int64N(int64(d)+1)), do) }

// Every does something again and again, about every d, while it returns true.
func (l *Loop) Every(d time.Duration, do func() bool) {
	l.Soon(2*d, func() {
		if do() {
			l.Every(d, do)
		}
	})
}

// Run lets time pass until a moment, or until nothing is left to do.
func (l *Loop) Run(until time.Duration) {
	for len(l.queue) > 0 && l.queue[0].at <= until {
		e := heap.Pop(&l.queue).(event)
		l.now = e.at
		e.do()
	}
	l.now = max(l.now, until)
}

// Note adds a line to the trace.
func (l *Loop) Note(format string, args ...any) {
	line := fmt.Sprintf("%d ", l.now) + fmt.Sprintf(format, args...)
	fmt.Fprintln(l.sum, line)
	if l.Lines != nil {
		l.Lines(line)
	}
}

// Problem notes a broken invariant.
func (l *Loop) Problem(format string, args ...any) {
	p := fmt.Sprintf(format, args...)
	l.problems = append(l.problems, p)
	l.Note("PROBLEM %s", p)
}

// Problems are the broken invariants.
func (l *Loop) Problems() []string { return l.problems }

// Sum is the hash of the trace until now.
func (l *Loop) Sum() string { return hex.EncodeToString(l.sum.Sum(nil)) }

// chance is true in a share p of the calls.
func (l *Loop) chance(p float64) bool { return l.Float64() < p }
