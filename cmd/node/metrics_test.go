package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/api/server"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/objectstore/metered"
)

// recorder is a registerer that only remembers what is registered.
type recorder struct{ all []prometheus.Collector }

func (r *recorder) Register(c prometheus.Collector) error {
	r.all = append(r.all, c)
	return nil
}

func (r *recorder) MustRegister(cs ...prometheus.Collector) { r.all = append(r.all, cs...) }
func (r *recorder) Unregister(prometheus.Collector) bool    { return false }

var descPattern = regexp.MustCompile(`^Desc\{fqName: "([^"]+)", help: "(.*?)"(?:, unit: "[^"]*")?, constLabels: \{(.*)\}, variableLabels: \{(.*)\}(?:, unit: "[^"]*")?\}$`)

// metricType tells the type of what a collector collects.
func metricType(c prometheus.Collector, name string) string {
	switch c.(type) {
	case *prometheus.CounterVec:
		return "counter"
	case *prometheus.GaugeVec, prometheus.Gauge: // a Gauge has a Counter's methods too
		return "gauge"
	case *prometheus.HistogramVec, prometheus.Histogram:
		return "histogram"
	case prometheus.Counter:
		return "counter"
	}
	// A collector of several: its figures are counters by their name, or gauges.
	if strings.HasSuffix(name, "_total") {
		return "counter"
	}
	return "gauge"
}

// metricRows describes everything that the program registers, by name.
func metricRows(t *testing.T, all []prometheus.Collector) []string {
	t.Helper()
	var rows []string
	for _, c := range all {
		descs := make(chan *prometheus.Desc)
		go func() {
			defer close(descs)
			c.Describe(descs)
		}()
		for d := range descs {
			m := descPattern.FindStringSubmatch(d.String())
			if m == nil || m[3] != "" {
				t.Errorf("a description of another form: %s", d)
				continue
			}
			name, kind, labels := m[1], metricType(c, m[1]), "-"
			if m[4] != "" {
				labels = "`" + strings.ReplaceAll(m[4], ",", "`, `") + "`"
			}
			if strings.HasSuffix(name, "_total") != (kind == "counter") {
				t.Errorf("%s is a %s: counters, and only they, end in _total", name, kind)
			}
			if !strings.HasPrefix(name, "keelstate_") {
				t.Errorf("%s lacks the prefix", name)
			}
			rows = append(rows, fmt.Sprintf("| `%s` | %s | %s | %s |\n", name, kind, labels, m[2]))
		}
	}
	slices.Sort(rows)
	return rows
}

// The page of metrics is exactly what the program exports: a name, a label or a
// type that changes breaks dashboards and alerts, and so this test.
func TestMetricsPageIsWhatIsExported(t *testing.T) {
	const page = "../../docs/metrics.md"
	r := &recorder{}
	driver := mem.NewDriver()
	n, err := cluster.New(cluster.Options{NodeID: "n1", DataDir: t.TempDir(), RaftAddr: "127.0.0.1:0", Driver: driver,
		Registerer: r, OnFatal: func(err error) { t.Error(err) }})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(n.Close(), driver.Close()); err != nil {
			t.Error(err)
		}
	}()
	if _, err := server.New(server.Node(n), server.Options{Registerer: r}); err != nil {
		t.Fatal(err)
	}
	if _, err := metered.NewMetrics(r); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	b.WriteString(`# Metrics

What a node exports at ` + "`/metrics`" + `, beside Go's own (` + "`go_*`, `process_*`" + `). Units are in the names; counters end in ` + "`_total`" + `. No label has the size of
keys or clients. A test of cmd/node holds this page to what is registered; ` + "`go test ./cmd/node -run Metrics -rewrite`" + ` writes it anew.

| metric | type | labels | meaning |
|---|---|---|---|
`)
	for _, row := range metricRows(t, r.all) {
		b.WriteString(row)
	}
	if *rewrite {
		if err := os.WriteFile(page, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, b.Bytes()) {
		t.Errorf("docs/metrics.md differs from what is exported; look at the change, then run with -rewrite. Exported:\n%s", b.Bytes())
	}
}
