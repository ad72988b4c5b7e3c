package job

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

func start(ctx context.Context, t testing.TB, text string, s Store, o Options, c *Counters) error {
	t.Helper()
	in, err := NewReader(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return Run(ctx, in, s, o, c)
}

func reportOf(t testing.TB, s Source) string {
	t.Helper()
	var b bytes.Buffer
	if _, err := WriteReport(context.Background(), &b, s, 4); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func daysOf(t testing.TB, s Source) string {
	t.Helper()
	var b bytes.Buffer
	if _, err := WriteDays(context.Background(), &b, s); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// singlePass is an independent answer: the standard CSV reader, one loop, no
// state of the job.
func singlePass(t testing.TB, text string) (report, days string) {
	t.Helper()
	records, err := csv.NewReader(strings.NewReader(text)).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	type answer struct {
		n, most, delays, miles, late int
		last                         string
		to                           map[string]int
	}
	all := map[string]*answer{}
	perDay := map[string]int{}
	for _, r := range records[1:] {
		delay, err1 := strconv.Atoi(r[1])
		miles, err2 := strconv.Atoi(r[2])
		if err1 != nil || err2 != nil {
			t.Fatal(r)
		}
		a := all[r[3]]
		if a == nil {
			a = &answer{most: delay, to: map[string]int{}}
			all[r[3]] = a
		}
		a.n++
		a.most = max(a.most, delay)
		a.delays += delay
		a.miles += miles
		a.last = r[0]
		a.to[r[4]]++
		if delay > 180 {
			a.late++
		}
		perDay[r[3]+","+r[0][:10]]++
	}
	var lines []string
	for origin, a := range all {
		top := ""
		for d, n := range a.to {
			if top == "" || n > a.to[top] || n == a.to[top] && d < top {
				top = d
			}
		}
		lines = append(lines, fmt.Sprintf("%s,%d,%d,%d,%.3f,%d,%s,%d,%s\n", origin, a.n, len(a.to), a.most,
			float64(a.delays)/float64(a.n), a.miles, a.last, a.late, top))
	}
	sort.Strings(lines)
	report = "origin,flights,destinations,delay_max,delay_mean,distance_sum,last_date,late,top_destination\n" + strings.Join(lines, "")
	lines = nil
	for k, n := range perDay {
		lines = append(lines, fmt.Sprintf("%s,%d\n", k, n))
	}
	sort.Strings(lines)
	return report, "origin,day,flights\n" + strings.Join(lines, "")
}

func TestRealFlightsGiveTheExpectedAnswer(t *testing.T) {
	text, err := os.ReadFile("../testdata/flights-20k.csv")
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("../testdata/flights-20k-expected.csv")
	if err != nil {
		t.Fatal(err)
	}
	s := newFake(1, 0.05)
	var c Counters
	if err := start(t.Context(), t, string(text), s, Options{Run: "a"}, &c); err != nil {
		t.Fatal(err)
	}
	if got := reportOf(t, s); got != string(want) {
		t.Error("the report differs from the expected answer")
	}
	_, days := singlePass(t, string(text))
	if got := daysOf(t, s); got != days {
		t.Error("the days differ from those of a single pass")
	}
	if c.Acked.Load() != 20000 || c.Skipped.Load() != 0 || c.Read.Load() != 20000 {
		t.Errorf("acked %d, skipped %d, read %d", c.Acked.Load(), c.Skipped.Load(), c.Read.Load())
	}
	if s.calls > 20000 {
		t.Errorf("%d writes: rows are not batched", s.calls)
	}
	// The same input again counts nothing.
	var again Counters
	if err := start(t.Context(), t, string(text), s, Options{Run: "b"}, &again); err != nil {
		t.Fatal(err)
	}
	if again.Acked.Load() != 0 || again.Skipped.Load() != 20000 || reportOf(t, s) != string(want) {
		t.Errorf("again: acked %d, skipped %d", again.Acked.Load(), again.Skipped.Load())
	}
}

// flightsOf draws an input.
func flightsOf(r *rapid.T) string {
	var b strings.Builder
	b.WriteString(header)
	origins := rapid.IntRange(1, 5).Draw(r, "origins")
	for i := range rapid.IntRange(0, 120).Draw(r, "rows") {
		fmt.Fprintf(&b, "2001/01/%02d 10:%02d,%d,%d,O%d,D%d\n", 1+i/20, i%60,
			rapid.IntRange(-30, 300).Draw(r, "delay"), rapid.IntRange(0, 3000).Draw(r, "distance"),
			rapid.IntRange(1, origins).Draw(r, "origin"), rapid.IntRange(1, 4).Draw(r, "destination"))
	}
	return b.String()
}

// FJ1, FJ2: whatever the network does to single requests and however often the
// job is killed, the state is that of a single pass.
func TestKilledAndResumedRunsCountExactlyOnce(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		text := flightsOf(r)
		s := newFake(rapid.Uint64().Draw(r, "seed"), 0.3)
		for i := range rapid.IntRange(0, 3).Draw(r, "kills") {
			ctx, kill := context.WithCancel(context.Background())
			left := rapid.Int64Range(0, 60).Draw(r, "rows before the kill")
			o := Options{Run: fmt.Sprint("killed", i), Workers: 3, BatchRows: rapid.IntRange(1, 20).Draw(r, "batch"), WindowRows: 64}
			o.OnAck = func(a Ack) {
				if a.Total >= left {
					kill()
				}
			}
			var c Counters
			if err := start(ctx, t, text, s, o, &c); err != nil && !errors.Is(err, context.Canceled) {
				r.Fatal(err)
			}
			kill()
		}
		var c Counters
		if err := start(context.Background(), t, text, s, Options{Run: "last", Workers: 3, BatchRows: 7, WindowRows: 64}, &c); err != nil {
			r.Fatal(err)
		}
		if c.Acked.Load()+c.Skipped.Load() != c.Read.Load() {
			r.Errorf("acked %d + skipped %d, read %d", c.Acked.Load(), c.Skipped.Load(), c.Read.Load())
		}
		report, days := singlePass(t, text)
		if got := reportOf(t, s); got != report {
			r.Errorf("report\n%s\nwant\n%s", got, report)
		}
		if got := daysOf(t, s); got != days {
			r.Errorf("days\n%s\nwant\n%s", got, days)
		}
		for name, c := range s.origins {
			if !sort.SliceIsSorted(c.applied, func(i, j int) bool { return c.applied[i] < c.applied[j] }) {
				r.Errorf("origin %s was applied in the order %v", name, c.applied)
			}
		}
	})
}

// FJ3: two runs at once; the older one is fenced, and nothing counts twice.
func TestRevivedOldRunIsFenced(t *testing.T) {
	text := header + strings.Repeat("2001/01/01 00:47,66,1750,DTW,LAS\n", 50)
	s := newFake(1, 0)
	asleep, wake := make(chan struct{}), make(chan struct{})
	var once sync.Once
	s.gate = func(_ context.Context, u *Update) {
		if u.After.Run == "old" && u.After.Line > 20 {
			once.Do(func() { close(asleep); <-wake }) // the process is stopped with a request in hand
		}
	}
	old := make(chan error, 1)
	go func() {
		var c Counters
		old <- start(context.Background(), t, text, s, Options{Run: "old", BatchRows: 5}, &c)
	}()
	<-asleep
	var c Counters
	if err := start(t.Context(), t, text, s, Options{Run: "new", BatchRows: 5}, &c); err != nil {
		t.Fatal(err)
	}
	close(wake)
	err := <-old
	var fenced *Fenced
	if !errors.As(err, &fenced) || fenced.Origin != "DTW" || fenced.Theirs.Run != "new" {
		t.Fatalf("the old run ended with %v", err)
	}
	if !strings.Contains(err.Error(), "another run has taken over") {
		t.Error(err)
	}
	if report, _ := singlePass(t, text); reportOf(t, s) != report {
		t.Errorf("report %s", reportOf(t, s))
	}
}

// The old run is fenced from the new one's claim on, before it has written.
func TestClaimFencesBeforeTheFirstUpdate(t *testing.T) {
	text := header + strings.Repeat("2001/01/01 00:47,66,1750,DTW,LAS\n", 10)
	s := newFake(1, 0)
	s.gate = func(ctx context.Context, u *Update) {
		if u.After.Run == "old" && u.After.Line > 5 {
			mine := Position{Run: "new", Source: u.Before.Source, Line: u.Before.Line}
			if err := s.Claim(ctx, u.Origin, &u.Before, mine); err != nil {
				t.Error(err)
			}
		}
	}
	var c Counters
	err := start(t.Context(), t, text, s, Options{Run: "old", BatchRows: 4, WindowRows: 4}, &c)
	var fenced *Fenced
	if !errors.As(err, &fenced) {
		t.Fatal(err)
	}
	if got := s.origins["DTW"].delays; got != c.Acked.Load() {
		t.Errorf("%d rows counted, %d acknowledged", got, c.Acked.Load())
	}
}

func TestAnotherInputIsRefused(t *testing.T) {
	s := newFake(1, 0)
	var c Counters
	if err := start(t.Context(), t, header+"2001/01/01 00:47,66,1750,DTW,LAS\n", s, Options{Run: "a"}, &c); err != nil {
		t.Fatal(err)
	}
	before := reportOf(t, s)
	err := start(t.Context(), t, header+"2002/02/02 00:47,1,1,DTW,LAS\n", s, Options{Run: "b"}, &c)
	var other *OtherInput
	if !errors.As(err, &other) || other.Origin != "DTW" {
		t.Fatal(err)
	}
	if reportOf(t, s) != before {
		t.Error("something was written")
	}
}

// FJ5: while the store stands still, no more than the window is read.
func TestWindowBoundsWhatIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b strings.Builder
		b.WriteString(header)
		for i := range 1000 {
			fmt.Fprintf(&b, "2001/01/01 00:47,66,1750,O%d,LAS\n", i%7)
		}
		s := newFake(1, 0)
		open := make(chan struct{})
		s.gate = func(context.Context, *Update) { <-open }
		var c Counters
		done := make(chan error, 1)
		go func() {
			done <- start(t.Context(), t, b.String(), s, Options{Run: "a", BatchRows: 10, WindowRows: 50}, &c)
		}()
		synctest.Wait()
		// One more row was read and waits for a slot.
		if n := c.Read.Load(); n != 50+1 {
			t.Errorf("%d rows were read with a window of 50", n)
		}
		close(open)
		if err := <-done; err != nil {
			t.Error(err)
		}
		if c.Acked.Load() != 1000 {
			t.Errorf("%d rows were counted", c.Acked.Load())
		}
	})
}

func TestRateThrottlesAndDoesNotRushAfterAStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		text := header + strings.Repeat("2001/01/01 00:47,66,1750,DTW,LAS\n", 500)
		s := newFake(1, 0)
		var stalled atomic.Bool
		s.gate = func(_ context.Context, u *Update) {
			if u.After.Line > 200 && stalled.CompareAndSwap(false, true) {
				time.Sleep(10 * time.Second) // a fault that is a delay, in fake time
			}
		}
		began := time.Now()
		var c Counters
		if err := start(t.Context(), t, text, s, Options{Run: "a", RowsPerSecond: 100, BatchRows: 10, WindowRows: 20}, &c); err != nil {
			t.Fatal(err)
		}
		// 500 rows take 5 s, and what the stall cost is not made up for.
		if took := time.Since(began); took < 14500*time.Millisecond || took > 16*time.Second {
			t.Errorf("500 rows at 100/s with a stall of 10 s took %v", took)
		}
	})
}

func TestRunGivesUpOnAStoreThatNeverAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFake(1, 0)
		s.always = lostCall
		var c Counters
		err := start(t.Context(), t, header+"2001/01/01 00:47,66,1750,DTW,LAS\n", s, Options{Run: "a", GiveUp: time.Minute}, &c)
		if !errors.Is(err, errNet) || !strings.Contains(err.Error(), "giving up after 1m0s") {
			t.Error(err)
		}
	})
}

func TestBadLineEndsTheRunUnlessSkipped(t *testing.T) {
	text := header + "2001/01/01 00:47,66,1750,DTW,LAS\nnonsense\n2001/01/01 00:48,6,175,DTW,LAS\n"
	s := newFake(1, 0)
	var c Counters
	err := start(t.Context(), t, text, s, Options{Run: "a"}, &c)
	var bad *BadLine
	if !errors.As(err, &bad) || bad.Line != 3 || bad.Text != "nonsense" {
		t.Fatal(err)
	}
	var skipped []*BadLine
	var again Counters
	err = start(t.Context(), t, text, s, Options{Run: "b", OnBadLine: func(b *BadLine) { skipped = append(skipped, b) }}, &again)
	if err != nil || len(skipped) != 1 || again.Bad.Load() != 1 {
		t.Fatal(err, skipped)
	}
	if s.origins["DTW"].delays != 2 {
		t.Errorf("%d rows counted", s.origins["DTW"].delays)
	}
}

func TestAnOriginThatWasOnlyClaimedIsNotReported(t *testing.T) {
	s := newFake(1, 0)
	if err := s.Claim(t.Context(), "DTW", nil, Position{Run: "a"}); err != nil {
		t.Fatal(err)
	}
	if got := reportOf(t, s); got != reportColumns+"\n" {
		t.Error(got)
	}
}

func TestOptionsNameEachFault(t *testing.T) {
	o := Options{Workers: -1, BatchRows: 2000, WindowRows: 1, RowsPerSecond: -1, GiveUp: -1}
	err := o.Validate()
	for _, field := range []string{"run", "workers", "batch", "window", "rate", "give-up"} {
		if err == nil || !strings.Contains(err.Error(), field+":") {
			t.Errorf("%v does not name %s", err, field)
		}
	}
	var d Options
	d.EnsureDefaults()
	d.Run = "a"
	if err := d.Validate(); err != nil {
		t.Error(err)
	}
}

func TestMeanIsPrintedWithTiesToEven(t *testing.T) {
	for mean, want := range map[float64]string{-0.8125: "-0.812", 0.0625: "0.062", 0.1875: "0.188", -5: "-5.000"} {
		s := newFake(1, 0)
		s.origins["A"] = &cell{sum: Summary{Destinations: map[string]int64{"B": 1}, DelayMean: mean}, delays: 1}
		if got := reportOf(t, s); !strings.Contains(got, ","+want+",") {
			t.Errorf("%v: %s, want %s", mean, got, want)
		}
	}
}
