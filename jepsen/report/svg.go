package report

import (
	"fmt"
	"html"
	"html/template"
	"math"
	"strings"
	"time"
)

// The size of a plot in its own units.
const (
	plotWidth  = 1100
	plotLeft   = 70
	plotRight  = 10
	plotTop    = 8
	plotBottom = 22
)

// plot draws into an SVG picture with time from left to right.
type plot struct {
	b        strings.Builder
	height   int
	lengthNs int64
}

func newPlot(height int, lengthNs int64) *plot {
	p := &plot{height: height, lengthNs: max(1, lengthNs)}
	p.printf(`<svg viewBox="0 0 %d %d" role="img">`, plotWidth, height)
	return p
}

func (p *plot) printf(format string, args ...any) { fmt.Fprintf(&p.b, format, args...) }

func (p *plot) x(at int64) float64 {
	return plotLeft + float64(at)/float64(p.lengthNs)*(plotWidth-plotLeft-plotRight)
}

func (p *plot) bottom() float64 { return float64(p.height - plotBottom) }

// y maps a share of the full height, 0 at the bottom.
func (p *plot) y(share float64) float64 {
	return p.bottom() - min(1, max(0, share))*(p.bottom()-plotTop)
}

// times draws the axis.
func (p *plot) times() {
	step := time.Second
	for _, s := range []time.Duration{1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600} {
		if step = s * time.Second; time.Duration(p.lengthNs)/step <= 12 {
			break
		}
	}
	p.printf(`<line class="axis" x1="%d" y1="%.1f" x2="%d" y2="%.1f"/>`, plotLeft, p.bottom(), plotWidth-plotRight, p.bottom())
	for at := int64(0); at <= p.lengthNs; at += int64(step) {
		p.printf(`<text class="t" x="%.1f" y="%d" text-anchor="middle">%s</text>`, p.x(at), p.height-6, clock(at))
	}
}

// clock is a time of the run as minutes and seconds.
func clock(ns int64) string {
	s := ns / int64(time.Second)
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}

// mark is a line of the vertical axis.
func (p *plot) mark(share float64, text string) {
	p.printf(`<line class="grid" x1="%d" y1="%.1f" x2="%d" y2="%.1f"/><text class="t" x="%d" y="%.1f" text-anchor="end">%s</text>`,
		plotLeft, p.y(share), plotWidth-plotRight, p.y(share), plotLeft-6, p.y(share)+4, html.EscapeString(text))
}

// bar is a rectangle between two shares of the height, with a tip.
func (p *plot) bar(from, to int64, low, high float64, color string, opacity float64, tip string) {
	x, y := p.x(from), p.y(high)
	p.printf(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s" fill-opacity="%.2f">`, x, y, max(0.5, p.x(to)-x), p.y(low)-y, color, opacity)
	if tip != "" {
		p.printf(`<title>%s</title>`, html.EscapeString(tip))
	}
	p.printf(`</rect>`)
}

// line draws shares over time; a negative one interrupts it.
func (p *plot) line(at []int64, shares []float64, color string) {
	open := false
	p.printf(`<path fill="none" stroke="%s" stroke-width="1.3" d="`, color)
	for i, share := range shares {
		if share < 0 || math.IsNaN(share) {
			open = false
			continue
		}
		verb := "L"
		if !open {
			verb = "M"
		}
		open = true
		p.printf("%s%.1f %.1f", verb, p.x(at[i]), p.y(share))
	}
	p.printf(`"/>`)
}

func (p *plot) svg() template.HTML {
	p.times()
	// Every text that went in was escaped, and everything else is numbers.
	return template.HTML(p.b.String() + "</svg>") //nolint:gosec // see above
}

// palette is for what is told apart by colour, in order of appearance.
var palette = []string{"#3b6fb6", "#d1603d", "#3c9d6b", "#9b59b6", "#c9a227", "#3aa6b9", "#b5476d", "#7a8450", "#6c5ce7", "#8d6e63",
	"#2d7d46", "#e17055", "#636e72", "#00838f", "#ad1457", "#5d4037", "#827717", "#4527a0", "#ef6c00", "#1565c0", "#558b2f", "#6a1b9a", "#37474f"}

func color(n int) string { return palette[n%len(palette)] }

// round125 is the next of 1, 2, 5, 10, ... for the end of an axis.
func round125(v float64) float64 {
	if v <= 0 {
		return 1
	}
	base := math.Pow(10, math.Floor(math.Log10(v)))
	for _, f := range []float64{1, 2, 5, 10} {
		if v <= f*base {
			return f * base
		}
	}
	return 10 * base
}

// human is a number with a unit prefix.
func human(v float64) string {
	for _, u := range []struct {
		at   float64
		name string
	}{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if v >= u.at {
			return fmt.Sprintf("%.3g%s", v/u.at, u.name)
		}
	}
	return fmt.Sprintf("%.3g", v)
}
