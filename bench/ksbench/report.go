package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

func reportCommand() *cobra.Command {
	return &cobra.Command{Use: "report FILE", Short: "Print a file of results as Markdown tables", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := os.Open(args[0])
			if err != nil {
				return err
			}
			defer f.Close()
			return report(cmd.OutOrStdout(), f)
		}}
}

// report prints the loads in the order measured, then the rest.
func report(w io.Writer, r io.Reader) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	head := "| mode | work | clients | shards | calls/s | keys/s | p50 ms | p99 ms | node CPU us/call | client CPU us/call | errors | load |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n"
	var slowest []int64
	var rest string
	var checkpoints cases
	for n := 1; lines.Scan(); n++ {
		var rec record
		if err := json.Unmarshal(lines.Bytes(), &rec); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		switch {
		case rec.Load != nil:
			l := rec.Load
			fmt.Fprintf(w, "%s| %s | %s | %d | %d | %.0f | %.0f | %.2f | %.2f | %.0f | %.0f | %d | %s |\n", head, l.Mode, l.Work, l.Clients, l.Shards,
				l.CallsPerSecond, l.KeysPerSecond, float64(l.P50us)/1e3, float64(l.P99us)/1e3, l.NodeCPUus, l.ClientCPUus, l.Errors, rec.LoadAvg)
			head = ""
		case rec.Resume != nil:
			slowest = append(slowest, rec.Resume.SlowestMs)
		case rec.Restart != nil:
			rest += fmt.Sprintf("- restart of %s: ready after %d ms, served as leader after %d ms, %.0f snapshots installed (load %s)\n",
				rec.Restart.Node, rec.Restart.ReadyMs, rec.Restart.ServedMs, rec.Restart.Installed, rec.LoadAvg)
		case rec.Figures != nil:
			checkpoints.add(rec.Figures, rec.LoadAvg)
		case rec.Fill != nil:
			rest += fmt.Sprintf("- fill: %d keys of %d bytes in %.1f s (load %s)\n", rec.Fill.Keys, rec.Fill.ValueBytes, rec.Fill.Seconds, rec.LoadAvg)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if len(slowest) > 0 {
		slices.Sort(slowest)
		rest += fmt.Sprintf("- writes resumed after SIGKILL of a leader: %d rounds, median %d ms, max %d ms\n", len(slowest),
			median(slowest), slowest[len(slowest)-1])
	}
	rest += checkpoints.String()
	if rest != "" {
		rest = "\n" + rest
	}
	_, err := io.WriteString(w, rest)
	return err
}

// median of a sorted list; of an even number the mean of the two in the middle.
func median(sorted []int64) int64 {
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// cases are what was measured of checkpoints, each case once, in the order seen.
type cases struct{ list []*caseRuns }

// caseRuns are the runs of one case.
type caseRuns struct {
	part, of, loads string
	runs            int
	names           []string
	values          map[string][]float64
}

func (c *cases) add(f *figures, load string) {
	at := slices.IndexFunc(c.list, func(r *caseRuns) bool { return r.part == f.Part && r.of == f.Case })
	if at < 0 {
		at = len(c.list)
		c.list = append(c.list, &caseRuns{part: f.Part, of: f.Case, values: map[string][]float64{}})
	}
	r := c.list[at]
	if r.loads != "" {
		r.loads += ", "
	}
	r.loads += load
	r.runs++
	for _, v := range f.Values {
		if _, known := r.values[v.Name]; !known {
			r.names = append(r.names, v.Name)
		}
		r.values[v.Name] = append(r.values[v.Name], v.Value)
	}
}

// String is a table with the medians of the runs.
func (c *cases) String() string {
	if len(c.list) == 0 {
		return ""
	}
	out := "| part | case | runs | medians | load |\n|---|---|---|---|---|\n"
	for _, r := range c.list {
		var all []string
		for _, name := range r.names {
			v := r.values[name]
			slices.Sort(v)
			all = append(all, name+" "+number((v[(len(v)-1)/2]+v[len(v)/2])/2))
		}
		out += fmt.Sprintf("| %s | %s | %d | %s | %s |\n", r.part, r.of, r.runs, strings.Join(all, ", "), r.loads)
	}
	return out
}
