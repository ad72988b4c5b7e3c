package report

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/keelstate/keelstate/jepsen/check"
)

//go:embed page.html
var pageText string

var pageTemplate = template.Must(template.New("page").Funcs(template.FuncMap{
	"clock": clock,
	"round": func(d time.Duration) string { return d.Round(time.Millisecond).String() },
	"ms":    func(ns int64) string { return time.Duration(ns).Round(time.Millisecond).String() },
	"ns":    func(ns int64) string { return time.Duration(ns).Round(time.Second).String() },
}).Parse(pageText))

// page is what the template shows.
type page struct {
	Run        *Run
	Totals     Totals
	Options    []string
	Product    string
	Gaps       []KindGap
	AfterFault time.Duration
	Plots      []figure
	Kinds      []legend
	Events     []row
	Left       int
}

// row is a line of the timeline; GapNs is that of a fault.
type row struct {
	Event
	GapNs int64
}

type figure struct {
	Title, Note string
	Legend      []legend
	SVG         template.HTML
}

type legend struct{ Name, Color string }

// maxPageEvents bounds the events in the page; all are in the timeline.
const maxPageEvents = 2000

// WritePage makes report.html of a folder from its other files (JR2, JR3).
func WritePage(dir string) error {
	run, err := LoadRun(dir)
	if err != nil {
		return err
	}
	events, err := LoadEvents(dir)
	if err != nil {
		return err
	}
	samples, err := LoadSamples(dir)
	if err != nil {
		return err
	}
	series := NewSeries(run.ElapsedNs)
	for i := range run.Episodes {
		e := &run.Episodes[i]
		h, err := LoadHistory(dir, e)
		if err != nil {
			return err
		}
		series.Add(h.Ops, slices.DeleteFunc(slices.Clone(events), func(v Event) bool { return v.Episode != e.Number }))
	}
	var b bytes.Buffer
	if err := pageTemplate.Execute(&b, newPage(run, events, samples, series)); err != nil {
		return fmt.Errorf("drawing the report: %w", err)
	}
	return replace(filepath.Join(dir, PageFile), b.Bytes())
}

func newPage(run *Run, events []Event, samples []Sample, series *Series) *page {
	p := &page{Run: run, Totals: run.Totals(), Gaps: series.GapsByKind(), AfterFault: AfterFault}
	for _, k := range slices.Sorted(maps.Keys(run.Options)) {
		p.Options = append(p.Options, k+"="+run.Options[k])
	}
	var product []string
	for _, k := range slices.Sorted(maps.Keys(run.Product)) {
		product = append(product, k+" "+run.Product[k])
	}
	p.Product = strings.Join(product, ", ")
	d := &drawing{run: run, samples: samples, series: series}
	colors := map[string]string{}
	gaps := map[faultID]int64{}
	for _, g := range series.Gaps {
		gaps[idOf(g.Fault)] = g.LongestNs
	}
	for _, v := range endedFaults(events, run.ElapsedNs) {
		switch v.Type {
		case EventFault:
			d.faults = append(d.faults, v)
			colors[v.Kind] = ""
		case EventDeath:
			d.deaths = append(d.deaths, v)
		}
		p.Events = append(p.Events, row{v, gaps[idOf(v)]})
	}
	d.kinds = slices.Sorted(maps.Keys(colors))
	for i, kind := range d.kinds {
		colors[kind] = color(i)
		p.Kinds = append(p.Kinds, legend{kind, color(i)})
	}
	d.colors = colors
	if p.Left = len(p.Events) - maxPageEvents; p.Left > 0 {
		p.Events = p.Events[:maxPageEvents]
	}
	p.Plots = append(p.Plots, d.rates(), d.latencies(), d.lanes(), d.leaders())
	p.Plots = append(p.Plots, d.metrics()...)
	return p
}

// endedFaults has one event for each fault: that of its end, or, for one that was
// in force when the harness was killed, a fault until the end of the run.
func endedFaults(events []Event, end int64) []Event {
	ended := map[faultID]bool{}
	for _, v := range events {
		if v.Type == EventFault {
			ended[idOf(v)] = true
		}
	}
	var all []Event
	for _, v := range events {
		if v.Type == EventBegun {
			if ended[idOf(v)] {
				continue
			}
			v.Type, v.End, v.Text = EventFault, max(v.At, end), v.Text+"; it was in force to the end"
		}
		all = append(all, v)
	}
	return all
}

// faultID tells the faults of a timeline apart.
type faultID struct {
	at   int64
	name string
}

func idOf(v Event) faultID { return faultID{v.At, v.Name} }

// drawing has what the plots need.
type drawing struct {
	run     *Run
	samples []Sample
	series  *Series
	faults  []Event
	deaths  []Event
	kinds   []string
	colors  map[string]string
}

// bands draws the faults behind a plot.
func (d *drawing) bands(p *plot) {
	for i := range d.run.Episodes {
		e := &d.run.Episodes[i]
		p.bar(e.HealedNs, e.EndNs, 0, 1, "#888888", 0.10, fmt.Sprintf("episode %d: healed, final reads, verdict", e.Number))
	}
	for _, f := range d.faults {
		p.bar(f.At, f.End, 0, 1, d.colors[f.Kind], 0.16, fmt.Sprintf("%s %s: %s", clock(f.At), f.Name, f.Text))
	}
}

func (d *drawing) slotTimes() []int64 {
	at := make([]int64, len(d.series.Slots))
	for i := range at {
		at[i] = int64(i)*d.series.SlotNs + d.series.SlotNs/2
	}
	return at
}

func (d *drawing) rates() figure {
	p := newPlot(230, d.run.ElapsedNs)
	d.bands(p)
	seconds := float64(d.series.SlotNs) / 1e9
	top := 1.0
	for _, s := range d.series.Slots {
		top = max(top, float64(max(s.OK, s.Failed, s.Unknown))/seconds)
	}
	top = round125(top)
	for _, share := range []float64{0.25, 0.5, 0.75, 1} {
		p.mark(share, human(top*share))
	}
	f := figure{Title: "Operations a second", Note: "by outcome; the bands are faults, grey is the time after healing"}
	for _, l := range []struct {
		name, color string
		count       func(Slot) int
	}{{"ok", "#2d7d46", func(s Slot) int { return s.OK }}, {"failed (not applied)", "#c9a227", func(s Slot) int { return s.Failed }},
		{"unknown", "#c0392b", func(s Slot) int { return s.Unknown }}} {
		shares := make([]float64, len(d.series.Slots))
		for i, s := range d.series.Slots {
			shares[i] = float64(l.count(s)) / seconds / top
		}
		p.line(d.slotTimes(), shares, l.color)
		f.Legend = append(f.Legend, legend{l.name, l.color})
	}
	f.SVG = p.svg()
	return f
}

// latencyShare places a latency on a logarithmic axis from 100 µs to 10 s.
func latencyShare(l time.Duration) float64 {
	if l <= 0 {
		return -1
	}
	return max(0, math.Log10(float64(l)/1e5)/5)
}

func (d *drawing) latencies() figure {
	p := newPlot(230, d.run.ElapsedNs)
	d.bands(p)
	for _, l := range []time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, time.Second, 10 * time.Second} {
		p.mark(latencyShare(l), l.String())
	}
	f := figure{Title: "Latency of operations that succeeded", Note: "logarithmic"}
	for i, q := range []float64{0.5, 0.99, 1} {
		shares := make([]float64, len(d.series.Slots))
		for k := range d.series.Slots {
			shares[k] = latencyShare(d.series.Slots[k].Latency(q))
		}
		c := []string{"#3b6fb6", "#d1603d", "#999999"}[i]
		p.line(d.slotTimes(), shares, c)
		f.Legend = append(f.Legend, legend{[]string{"median", "99 %", "longest"}[i], c})
	}
	f.SVG = p.svg()
	return f
}

// lanes draws the faults, a lane for each kind, and deaths.
func (d *drawing) lanes() figure {
	lanes := append(slices.Clone(d.kinds), "deaths")
	p := newPlot(len(lanes)*16+plotTop+plotBottom, d.run.ElapsedNs)
	place := func(name string) (low, high float64) {
		i := slices.Index(lanes, name)
		return 1 - float64(i+1)/float64(len(lanes)), 1 - (float64(i)+0.12)/float64(len(lanes))
	}
	for _, name := range lanes {
		low, high := place(name)
		p.printf(`<text class="t" x="%d" y="%.1f" text-anchor="end">%s</text>`, plotLeft-6, (p.y(low)+p.y(high))/2+4, template.HTMLEscapeString(name))
		p.printf(`<line class="grid" x1="%d" y1="%.1f" x2="%d" y2="%.1f"/>`, plotLeft, p.y(low), plotWidth-plotRight, p.y(low))
	}
	for _, f := range d.faults {
		low, high := place(f.Kind)
		p.bar(f.At, f.End, low, high, d.colors[f.Kind], 0.85, fmt.Sprintf("%s to %s %s: %s", clock(f.At), clock(f.End), f.Name, f.Text))
	}
	for _, v := range d.deaths {
		low, high := place("deaths")
		p.bar(v.At, v.At+d.run.ElapsedNs/400, low, high, "#c0392b", 1, clock(v.At)+" "+v.Text)
	}
	return figure{Title: "Faults", Note: "point at one for what it did; deaths are ends of processes that the harness did not ask for", SVG: p.svg()}
}

// leaders draws who led which group, from the samples.
func (d *drawing) leaders() figure {
	const series = "keelstate_leader:"
	groups, nodes := map[string]bool{}, map[string]bool{}
	for _, s := range d.samples {
		nodes[s.Node] = true
		for name := range s.Values {
			if g, ok := strings.CutPrefix(name, series); ok {
				groups[g] = true
			}
		}
	}
	names, order := slices.Sorted(maps.Keys(groups)), slices.Sorted(maps.Keys(nodes))
	p := newPlot(max(1, len(names))*22+plotTop+plotBottom, d.run.ElapsedNs)
	f := figure{Title: "Leaders", Note: "as each node says of itself, once a second; a gap is a second in which no node that answers leads, two colours are two nodes that say so"}
	for i, g := range names {
		low, high := 1-float64(i+1)/float64(len(names)), 1-(float64(i)+0.15)/float64(len(names))
		p.printf(`<text class="t" x="%d" y="%.1f" text-anchor="end">%s</text>`, plotLeft-6, (p.y(low)+p.y(high))/2+4, template.HTMLEscapeString(g))
		for k, node := range order {
			from, last := int64(-1), int64(0)
			part := (high - low) / float64(len(order))
			end := func() {
				if from >= 0 {
					p.bar(from, last+int64(time.Second), low+part*float64(k), low+part*float64(k+1), color(k), 0.9, g+" led by "+node+" from "+clock(from))
				}
				from = -1
			}
			for _, s := range d.samples {
				if s.Node != node {
					continue
				}
				if s.Values[series+g] != 1 {
					end()
					continue
				}
				if from < 0 {
					from = s.At
				}
				last = s.At
			}
			end()
		}
	}
	for k, node := range order {
		f.Legend = append(f.Legend, legend{node, color(k)})
	}
	f.SVG = p.svg()
	return f
}

// drawn are the series of the nodes that have a plot.
var drawn = []struct{ name, title string }{
	{"process_resident_memory_bytes", "Resident memory, bytes"},
	{"keelstate_raftlog_oldest_fsync_seconds", "Age of the oldest fsync in flight, seconds"},
	{"keelstate_raft_log_bytes", "Live bytes in the Raft log, all groups"},
	{"go_goroutines", "Goroutines"},
	{"process_open_fds", "Open files"},
}

func (d *drawing) metrics() []figure {
	var all []figure
	for _, m := range drawn {
		type points struct {
			at     []int64
			values []float64
		}
		by, top := map[string]*points{}, 0.0
		for _, s := range d.samples {
			pt := by[s.Node]
			if pt == nil {
				pt = &points{}
				by[s.Node] = pt
			}
			v, found := 0.0, false
			for name, x := range s.Values {
				if base, _, _ := strings.Cut(name, ":"); base == m.name {
					v, found = v+x, true
				}
			}
			if !found {
				v = -1
			}
			pt.at, pt.values, top = append(pt.at, s.At), append(pt.values, v), max(top, v)
		}
		top = round125(top)
		p := newPlot(130, d.run.ElapsedNs)
		d.bands(p)
		p.mark(0.5, human(top/2))
		p.mark(1, human(top))
		f := figure{Title: m.title}
		for k, node := range slices.Sorted(maps.Keys(by)) {
			shares := make([]float64, len(by[node].values))
			for i, v := range by[node].values {
				shares[i] = v / top
			}
			p.line(by[node].at, shares, color(k))
			f.Legend = append(f.Legend, legend{node, color(k)})
		}
		f.SVG = p.svg()
		all = append(all, f)
	}
	return all
}

// Bad says that a result has something to show.
func (p *page) Bad(r check.Result) bool { return r.Verdict != check.Pass }
