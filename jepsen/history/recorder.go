package history

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// Options of a Recorder. The zero value is good for a run in real time.
type Options struct {
	// Clock gives nanoseconds since the start of the run and never goes back;
	// nil is the time since NewRecorder. Simulations give their own.
	Clock func() int64
	// Forget leaves the operations out of memory, so that History is empty:
	// for long runs, whose file is read again.
	Forget bool
	// FlushEvery is how old, on Clock, a line may become in the buffer while
	// others follow; 0 is 200 ms.
	FlushEvery time.Duration
}

// Recorder records a history, in memory and to a file as it goes.
type Recorder struct {
	clock     func() int64
	flushNs   int64
	processes atomic.Int64
	header    Header
	forget    bool

	mu      sync.Mutex
	out     *bufio.Writer // nil: memory only
	scratch []byte
	flushed int64
	err     error // the first error of the file
	closed  bool
	ops     []Op
	count   int64
}

// Call is an operation that has begun.
type Call struct {
	id int64
}

// Done is how an operation ended.
type Done struct {
	Outcome Outcome
	// Result and Parts are what came back: Parts has one entry for each part
	// of the operation, in the same order.
	Result []int64
	Parts  [][]int64
	Node   string
	Shard  uint64
	Code   string
}

// NewRecorder starts a history. w may be nil: then it is only kept in memory.
// The recorder buffers; it does not close w.
func NewRecorder(w io.Writer, h Header, o Options) (*Recorder, error) {
	if len(h.Note) > MaxNote || len(h.Start) > MaxText {
		return nil, invalid("the header's text is too long")
	}
	r := &Recorder{clock: o.Clock, flushNs: o.FlushEvery.Nanoseconds(), header: h, forget: o.Forget}
	if r.clock == nil {
		start := time.Now()
		r.clock = func() int64 { return int64(time.Since(start)) }
	}
	if r.flushNs == 0 {
		r.flushNs = int64(200 * time.Millisecond)
	}
	if w == nil {
		return r, nil
	}
	r.out = bufio.NewWriterSize(w, 256<<10)
	if _, err := r.out.Write(appendHeader(nil, h)); err != nil {
		return nil, fmt.Errorf("starting a history: %w", err)
	}
	if err := r.out.Flush(); err != nil {
		return nil, fmt.Errorf("starting a history: %w", err)
	}
	return r, nil
}

// NewProcess returns the number of a new logical client.
func (r *Recorder) NewProcess() int64 { return r.processes.Add(1) }

// Now is the time of the run in nanoseconds.
func (r *Recorder) Now() int64 { return r.clock() }

// Invoke notes that an operation begins; call it before anything is sent. ID,
// times and outcome of o are set here. Arg and Parts must not be changed
// afterwards.
func (r *Recorder) Invoke(o Op) Call {
	at := r.clock() // JH1
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count++
	o.ID, o.Invoke, o.Return, o.Outcome = r.count, at, Never, Unknown
	if !r.forget {
		r.ops = append(r.ops, o)
	}
	if r.out != nil {
		r.scratch = appendInvoke(r.scratch[:0], &o)
		r.boundLocked(o.ID, len(o.Parts), o.Workload, o.F, o.Key, string(o.Level))
		for i := range o.Parts {
			r.boundLocked(o.ID, 0, o.Parts[i].Key)
		}
		r.writeLocked(at)
	}
	return Call{id: o.ID}
}

// boundLocked refuses what no reader would take (JH6).
func (r *Recorder) boundLocked(id int64, parts int, names ...string) {
	long := func(s string) bool { return len(s) > MaxText }
	if r.err == nil && (parts > MaxParts || slices.ContainsFunc(names, long)) {
		r.err = fmt.Errorf("recording operation %d: it has %d parts or a name that is too long: %w", id, parts, base.ErrTooLarge)
	}
}

// Complete notes how an operation ended; call it after the answer is there,
// once. An unknown outcome leaves the operation open (JH2).
func (r *Recorder) Complete(c Call, d Done) {
	at := r.clock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.forget {
		r.ops[c.id-1].complete(at, &d)
	}
	if r.out != nil {
		r.scratch = appendReturn(r.scratch[:0], c.id, at, &d)
		r.boundLocked(c.id, len(d.Parts), d.Node, d.Code)
		r.writeLocked(at)
	}
}

// noCode is the code of an operation that ended unknown without one, so that it
// differs from one that has not ended.
const noCode = "unknown"

func (o *Op) complete(at int64, d *Done) {
	o.Outcome, o.Result, o.Node, o.Shard, o.Code = d.Outcome, d.Result, d.Node, d.Shard, d.Code
	if d.Outcome != Unknown {
		o.Return = at
	} else if d.Code == "" {
		o.Code = noCode
	}
	if len(d.Parts) > 0 {
		o.Parts = slices.Clone(o.Parts)
		for i := range o.Parts {
			if i < len(d.Parts) {
				o.Parts[i].Result = d.Parts[i]
			}
		}
	}
}

// writeLocked writes scratch; the lock is kept.
func (r *Recorder) writeLocked(at int64) {
	switch {
	case r.err != nil:
		return
	case r.closed:
		r.err = fmt.Errorf("recording after the end of the history: %w", base.ErrClosed)
		return
	case len(r.scratch) > MaxLine:
		r.err = fmt.Errorf("recording an operation of %d bytes: %w", len(r.scratch), base.ErrTooLarge)
		return
	}
	if _, err := r.out.Write(r.scratch); err != nil {
		r.err = fmt.Errorf("writing a history: %w", err)
		return
	}
	if at-r.flushed >= r.flushNs {
		r.flushed = at
		if err := r.out.Flush(); err != nil {
			r.err = fmt.Errorf("writing a history: %w", err)
		}
	}
}

// Flush hands the buffer to the file.
func (r *Recorder) Flush() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.out == nil || r.err != nil {
		return r.err
	}
	if err := r.out.Flush(); err != nil {
		r.err = fmt.Errorf("writing a history: %w", err)
	}
	return r.err
}

// Close ends the history and returns the first error of its file. Operations
// that are still open stay so.
func (r *Recorder) Close() error {
	at := r.clock()
	r.mu.Lock()
	if r.out != nil && !r.closed {
		r.scratch = appendEnd(r.scratch[:0], r.count, at)
		r.writeLocked(at)
	}
	r.closed = true
	r.mu.Unlock()
	return r.Flush()
}

// Count is the number of operations begun.
func (r *Recorder) Count() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count
}

// History returns a copy of what was recorded until now.
func (r *Recorder) History() *History {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &History{Header: r.header, Ops: slices.Clone(r.ops), Complete: r.closed}
}
