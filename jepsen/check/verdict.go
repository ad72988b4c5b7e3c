package check

import (
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Verdict is what a checker says.
type Verdict string

// The verdicts.
const (
	Pass    Verdict = "pass"
	Fail    Verdict = "fail"
	Unknown Verdict = "unknown"
)

// Combine is the verdict of several: any failure fails, else anything unknown
// is unknown, and so is nothing at all (CK3).
func Combine(vs ...Verdict) Verdict {
	all := Unknown
	for _, v := range vs {
		switch v {
		case Fail:
			return Fail
		case Pass:
			all = Pass
		}
	}
	if slices.ContainsFunc(vs, func(v Verdict) bool { return v != Pass }) {
		return Unknown
	}
	return all
}

// Options bound a check. The zero value has the defaults.
type Options struct {
	// Limit is the time for one checker; 0 is one minute.
	Limit time.Duration
	// Parallel is how many goroutines search; 0 is GOMAXPROCS.
	Parallel int
}

func (o Options) withDefaults() Options {
	if o.Limit <= 0 {
		o.Limit = time.Minute
	}
	if o.Parallel <= 0 {
		o.Parallel = runtime.GOMAXPROCS(0)
	}
	return o
}

// Detail is one finding.
type Detail struct {
	// Verdict is Fail or Unknown.
	Verdict Verdict `json:"verdict"`
	// Key is the key, list, map, bank or shard concerned.
	Key string `json:"key,omitempty"`
	// Text says what is wrong, in one sentence or a few lines.
	Text string `json:"text"`
	// Ops are the ids of the operations that show it.
	Ops []int64 `json:"ops,omitempty"`
}

// Result is a verdict with its reasons.
type Result struct {
	// Name is the checker's, which is the workload's.
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	// Text says it in one line.
	Text    string   `json:"text"`
	Details []Detail `json:"details,omitempty"`
	// Ops counts what was judged, by outcome.
	OK      int `json:"ok"`
	Failed  int `json:"failed"`
	Unknown int `json:"unknown"`
	// Elapsed is what the checker took.
	Elapsed time.Duration `json:"elapsed_ns"`
}

// Checker judges the operations of one workload.
type Checker interface {
	// Name is the workload's name.
	Name() string
	// Check judges operations, in any order.
	Check(ops []*history.Op, o Options) Result
}

// Checkers returns one of each.
func Checkers() []Checker {
	return []Checker{Register{}, Counter{}, List{}, Map{}, Bank{}, Session{}}
}

// For returns the checker of a workload.
func For(workload string) (Checker, bool) {
	for _, c := range Checkers() {
		if c.Name() == workload {
			return c, true
		}
	}
	return nil, false
}

// Judge checks a history: one result for each workload in it, and for each that
// is wanted, sorted by name. A workload without a checker is Unknown, and so is
// one that is wanted and did nothing.
func Judge(h *history.History, o Options, wanted ...string) []Result {
	by := map[string][]*history.Op{}
	for i := range h.Ops {
		op := &h.Ops[i]
		by[op.Workload] = append(by[op.Workload], op)
	}
	names := append(h.Workloads(), wanted...)
	slices.Sort(names)
	var all []Result
	for _, w := range slices.Compact(names) {
		c, ok := For(w)
		switch {
		case len(by[w]) == 0:
			all = append(all, Result{Name: w, Verdict: Unknown, Text: "it did nothing"})
		case ok:
			all = append(all, c.Check(by[w], o))
		default:
			all = append(all, Result{Name: w, Verdict: Unknown, Text: "there is no checker for this workload"})
		}
	}
	return all
}

// maxDetails bounds what a result carries; more are counted only.
const maxDetails = 20

// judge collects findings.
type judge struct {
	Result
	o        Options
	deadline time.Time
	more     int
	notes    []string
}

// check runs the body of a checker on a history that is fit for it.
func check(name string, ops []*history.Op, o Options, body func(j *judge)) Result {
	start := time.Now()
	j := &judge{Result: Result{Name: name}, o: o.withDefaults()}
	j.deadline = start.Add(j.o.Limit)
	levels, looked := true, false
	for _, op := range ops {
		switch op.Outcome {
		case history.OK:
			j.OK++
			looked = looked || looks(op)
		case history.Fail:
			j.Failed++
		default:
			j.Result.Unknown++
		}
		levels = levels && op.Level == history.Linearizable
	}
	if err := history.Validate(ops); err != nil {
		j.undecided("", nil, "%v", err)
	} else {
		body(j)
		if !levels {
			j.undecided("", nil, "it has reads of a level without a rule (CK5)")
		}
		switch {
		case j.OK == 0:
			j.undecided("", nil, "no operation succeeded: nothing is proved")
		case !looked:
			j.undecided("", nil, "nobody saw what the operations did: nothing is proved")
		}
	}
	j.finish()
	j.Elapsed = time.Since(start)
	return j.Result
}

// looks says that an operation's result tells something of the state.
func looks(op *history.Op) bool {
	return slices.Contains([]string{"read", "get", "scan", "cas", "create"}, op.F)
}

func (j *judge) finish() {
	j.Verdict = Pass
	for _, d := range j.Details {
		j.Verdict = Combine(j.Verdict, d.Verdict)
	}
	counts := fmt.Sprintf("%d ok, %d failed, %d unknown", j.OK, j.Failed, j.Result.Unknown)
	switch j.Verdict {
	case Pass:
		j.Text = counts
	default:
		// The first failure, or else the first that is not known, says it.
		for _, d := range j.Details {
			if d.Verdict == j.Verdict {
				j.Text = d.Text
				if d.Key != "" {
					j.Text = d.Key + ": " + d.Text
				}
				break
			}
		}
		if n := len(j.Details) - 1 + j.more; n > 0 {
			j.Text += fmt.Sprintf(" (and %d more)", n)
		}
		j.Text += "; " + counts
	}
	for _, n := range j.notes {
		j.Text += "; " + n
	}
}

func (j *judge) add(d Detail) {
	if len(j.Details) >= maxDetails {
		j.more++
		if d.Verdict != Fail || j.failed() {
			return
		}
		j.Details = j.Details[:maxDetails-1] // a failure is never left out for what is unknown
	}
	j.Details = append(j.Details, d)
}

func (j *judge) fail(key string, ops []int64, format string, args ...any) {
	j.add(Detail{Verdict: Fail, Key: key, Ops: ops, Text: fmt.Sprintf(format, args...)})
}

func (j *judge) undecided(key string, ops []int64, format string, args ...any) {
	j.add(Detail{Verdict: Unknown, Key: key, Ops: ops, Text: fmt.Sprintf(format, args...)})
}

// note adds to the text of a result, whatever its verdict; the same only once.
func (j *judge) note(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(j.notes, text) {
		j.notes = append(j.notes, text)
	}
}

func (j *judge) failed() bool {
	return slices.ContainsFunc(j.Details, func(d Detail) bool { return d.Verdict == Fail })
}

func (j *judge) left() time.Duration { return time.Until(j.deadline) }

// late says that the time is over, after having noted it.
func (j *judge) late(doing string) bool {
	if j.left() > 0 {
		return false
	}
	j.undecided("", nil, "the time was over while %s", doing)
	return true
}

// malformed notes an operation that the workload's vocabulary does not have.
func (j *judge) malformed(op *history.Op) {
	j.undecided(op.Key, []int64{op.ID}, "the history has an operation without meaning: %v", op)
}

// byKey parts operations by key, keys in order of their first operation.
func byKey(ops []*history.Op) (keys []string, parts map[string][]*history.Op) {
	parts = map[string][]*history.Op{}
	for _, op := range ops {
		if _, ok := parts[op.Key]; !ok {
			keys = append(keys, op.Key)
		}
		parts[op.Key] = append(parts[op.Key], op)
	}
	return keys, parts
}
