package history

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/keelstate/keelstate/internal/base"
)

// Never is the Return of an operation that stays open.
const Never int64 = math.MaxInt64

// Outcome says what a client knows about an operation.
type Outcome uint8

const (
	// Unknown: it may have been applied, or may be later. The zero value on
	// purpose: what was never completed is unknown.
	Unknown Outcome = iota
	// OK: it was applied, and Result is what it returned.
	OK
	// Fail: it was not applied and never will be.
	Fail
)

func (o Outcome) String() string {
	switch o {
	case OK:
		return "ok"
	case Fail:
		return "fail"
	default:
		return "unknown"
	}
}

// Level is the consistency that a read asked for.
type Level string

// The levels. Linearizable is the zero value; the others have a seat here and
// in the file, and no checker yet: package check says "unknown" to them.
const (
	Linearizable Level = ""
	AtToken      Level = "token"
	Stale        Level = "stale"
)

// Part is one of several things that one operation does at once. What they
// mean is up to F, as for the operation's own fields.
type Part struct {
	Key    string
	Arg    []int64
	Result []int64
}

// Op is one operation of one client.
type Op struct {
	// ID is the operation's number in its history, from 1 in the order in which
	// they were recorded; that of two that began together may differ from Invoke's.
	ID int64
	// Process is the logical client (JH5).
	Process int64
	// Workload names the workload and so the checker.
	Workload string
	// F is what was done, a word of the workload.
	F string
	// Key is the key or object concerned, empty where Parts say it.
	Key string
	// Arg is what was given. What is absent is left out, not coded.
	Arg []int64
	// Result is what came back. Valid where Outcome is OK.
	Result []int64
	// Parts is what an operation with several keys did.
	Parts []Part
	// Level is the consistency that a read asked for.
	Level Level
	// Invoke and Return are nanoseconds of the run's monotonic clock.
	Invoke, Return int64
	Outcome        Outcome
	// Node and Shard served it, Code is the error's stable reason; zero where
	// not known.
	Node  string
	Shard uint64
	Code  string
}

// Open says that the operation never returned.
func (o *Op) Open() bool { return o.Outcome == Unknown }

func (o *Op) String() string {
	s := fmt.Sprintf("#%d p%d %s %s", o.ID, o.Process, o.F, o.Key)
	if len(o.Arg) > 0 {
		s += fmt.Sprintf(" %v", short(o.Arg))
	}
	for _, p := range o.Parts {
		s += fmt.Sprintf(" %s%v", p.Key, short(p.Arg))
		if o.Outcome == OK && len(p.Result) > 0 {
			s += fmt.Sprintf("->%v", short(p.Result))
		}
	}
	switch {
	case o.Outcome == OK && o.Parts == nil:
		s += fmt.Sprintf(" -> %v", short(o.Result))
	case o.Outcome != OK:
		s += " -> " + o.Outcome.String()
	}
	if o.Return == Never {
		return s + fmt.Sprintf(" [%.6fs, open)", seconds(o.Invoke))
	}
	return s + fmt.Sprintf(" [%.6fs, %.6fs]", seconds(o.Invoke), seconds(o.Return))
}

func seconds(ns int64) float64 { return float64(ns) / 1e9 }

// short keeps the text of long results readable: the end is what matters.
func short(v []int64) any {
	const keep = 12
	if len(v) <= keep {
		return v
	}
	return fmt.Sprintf("[%d values, the last %v]", len(v), v[len(v)-keep:])
}

// Header is the first line of a saved history.
type Header struct {
	// Seed is the run's seed, 0 where it has none.
	Seed int64
	// Start is the wall clock's time at the run's zero, as text for people;
	// nothing is computed from it.
	Start string
	// Note is free text of at most 4096 bytes: the command, the commit.
	Note string
}

// History is what was recorded, by ID.
type History struct {
	Header Header
	Ops    []Op
	// Complete says that the recorder was closed; otherwise this is a prefix.
	Complete bool
}

// Workloads returns the names of the workloads, sorted.
func (h *History) Workloads() []string {
	seen := map[string]bool{}
	var names []string
	for i := range h.Ops {
		if w := h.Ops[i].Workload; !seen[w] {
			seen[w] = true
			names = append(names, w)
		}
	}
	slices.Sort(names)
	return names
}

// All returns pointers to the operations, as the checkers want them.
func (h *History) All() []*Op {
	all := make([]*Op, len(h.Ops))
	for i := range h.Ops {
		all[i] = &h.Ops[i]
	}
	return all
}

// Validate checks what every checker relies on: times and outcomes agree (JH2)
// and each process does one thing at a time (JH5). Ops may be of any order.
func Validate(ops []*Op) error {
	for _, o := range ops {
		switch {
		case o.Outcome == Unknown && o.Return != Never:
			return invalid("operation %d has an unknown outcome and a time of return", o.ID)
		case o.Outcome != Unknown && o.Return == Never:
			return invalid("operation %d has an outcome and never returned", o.ID)
		case o.Return < o.Invoke:
			return invalid("operation %d returns before it begins", o.ID)
		}
	}
	order := slices.Clone(ops)
	slices.SortFunc(order, func(x, y *Op) int {
		return cmp.Or(cmp.Compare(x.Process, y.Process), cmp.Compare(x.Invoke, y.Invoke), cmp.Compare(x.ID, y.ID))
	})
	for i := 1; i < len(order); i++ {
		x, y := order[i-1], order[i]
		if x.Process == y.Process && x.Return > y.Invoke {
			return invalid("process %d begins operation %d while %d is open", x.Process, y.ID, x.ID)
		}
	}
	return nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("checking a history: %s: %w", fmt.Sprintf(format, args...), base.ErrInvalid)
}
