package report

import (
	"math"
	"slices"
	"time"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Series is what the page draws of the operations: counts and latencies by slot
// of time, and the gaps in service around each fault. Episodes are added one by
// one, so that only one history is in memory.
type Series struct {
	// SlotNs is the width of a slot.
	SlotNs int64
	Slots  []Slot
	Gaps   []Gap
}

// maxSlots bounds the points of a plot.
const maxSlots = 600

// Slot is a stretch of time. Operations are in the slot in which they ended,
// unknown ones in that in which they began.
type Slot struct {
	OK, Failed, Unknown int
	latency             [latencySteps]uint32
}

// latencySteps steps of a quarter octave each reach from 1 µs to minutes.
const latencySteps = 112

// Gap is the service around a fault.
type Gap struct {
	Fault Event
	// LongestNs is the longest time without an operation that succeeded, of those
	// that overlap the fault or the AfterFault behind it.
	LongestNs int64
}

// AfterFault is how long after its end a gap still counts for a fault.
const AfterFault = 5 * time.Second

// NewSeries prepares a series for a run of some length.
func NewSeries(lengthNs int64) *Series {
	// Whole seconds, so that the plots' rates are.
	slot := max(1, (lengthNs+maxSlots*int64(time.Second)-1)/(maxSlots*int64(time.Second))) * int64(time.Second)
	count := min(maxSlots+1, lengthNs/slot+1)
	return &Series{SlotNs: slot, Slots: make([]Slot, max(1, count))}
}

func (s *Series) slot(at int64) *Slot {
	return &s.Slots[min(max(0, at/s.SlotNs), int64(len(s.Slots)-1))]
}

// Add takes in the operations of an episode, and its faults.
func (s *Series) Add(ops []history.Op, faults []Event) {
	var done []int64
	for i := range ops {
		o := &ops[i]
		switch o.Outcome {
		case history.OK:
			slot := s.slot(o.Return)
			slot.OK++
			slot.latency[latencyStep(o.Return-o.Invoke)]++
			done = append(done, o.Return)
		case history.Fail:
			s.slot(o.Return).Failed++
		default:
			s.slot(o.Invoke).Unknown++
		}
	}
	slices.Sort(done)
	for _, f := range faults {
		if f.Type == EventFault {
			s.Gaps = append(s.Gaps, Gap{f, longestGap(done, f.At, f.End+int64(AfterFault))})
		}
	}
}

// longestGap is the longest stretch between two moments, or between the ends of
// the window and one, that overlaps the window.
func longestGap(done []int64, from, to int64) int64 {
	i, _ := slices.BinarySearch(done, from)
	last := from
	if i > 0 {
		last = done[i-1] // the gap may have begun before the fault
	}
	longest := int64(0)
	for ; i < len(done) && done[i] <= to; i++ {
		longest = max(longest, done[i]-last)
		last = done[i]
	}
	end := to
	if i < len(done) {
		end = done[i]
	} else if len(done) > 0 && done[len(done)-1] < to {
		// The episode ended in the window: what came after it is no gap.
		end = last
	}
	return max(longest, end-last)
}

func latencyStep(ns int64) int {
	if ns <= 1000 {
		return 0
	}
	return min(latencySteps-1, int(4*math.Log2(float64(ns)/1000)))
}

// Latency is a quantile (0 to 1) of the latencies of a slot, 0 if it has none;
// it is exact to a quarter octave, and rounded up.
func (s *Slot) Latency(q float64) time.Duration {
	total := uint32(0)
	for _, n := range s.latency {
		total += n
	}
	if total == 0 {
		return 0
	}
	rank := max(1, uint32(math.Ceil(q*float64(total))))
	for step, n := range s.latency {
		if n >= rank {
			return time.Duration(1000 * math.Exp2(float64(step+1)/4))
		}
		rank -= n
	}
	return 0
}

// KindGap sums the gaps of the faults of a kind up.
type KindGap struct {
	Kind              string
	Count             int
	Longest, Median   time.Duration
	LongestName       string
	LongestAtNs       int64
	LongestInEpisode  int
	LongestTargetText string
}

// GapsByKind lists the kinds, the one with the longest gap first.
func (s *Series) GapsByKind() []KindGap {
	by := map[string][]Gap{}
	for _, g := range s.Gaps {
		by[g.Fault.Kind] = append(by[g.Fault.Kind], g)
	}
	var all []KindGap
	for kind, gaps := range by {
		slices.SortFunc(gaps, func(a, b Gap) int { return int(min(1, max(-1, b.LongestNs-a.LongestNs))) })
		worst := gaps[0]
		all = append(all, KindGap{Kind: kind, Count: len(gaps), Longest: time.Duration(worst.LongestNs),
			Median: time.Duration(gaps[len(gaps)/2].LongestNs), LongestName: worst.Fault.Name, LongestAtNs: worst.Fault.At,
			LongestInEpisode: worst.Fault.Episode, LongestTargetText: worst.Fault.Text})
	}
	slices.SortFunc(all, func(a, b KindGap) int {
		if a.Longest != b.Longest {
			return int(min(1, max(-1, b.Longest-a.Longest)))
		}
		return map[bool]int{true: -1, false: 1}[a.Kind < b.Kind]
	})
	return all
}
