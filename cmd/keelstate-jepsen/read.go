package main

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/internal/cliout"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/jepsen/report"
)

// runRecord is a run as output.
func runRecord(dir string, r *report.Run) record {
	t := r.Totals()
	return record{
		{Name: "directory", Value: dir}, {Name: "seed", Value: r.Seed}, {Name: "verdict", Value: string(r.Verdict)}, {Name: "text", Value: r.Text},
		{Name: "minutes", Value: math.Round(time.Duration(r.ElapsedNs).Minutes()*10) / 10}, {Name: "episodes", Value: t.Episodes},
		{Name: "operations", Value: t.Operations}, {Name: "ok", Value: t.OK}, {Name: "failed", Value: t.Failed}, {Name: "unknown", Value: t.Unknown},
		{Name: "injections", Value: t.Injections}, {Name: "faults", Value: t.Faults}, {Name: "skipped", Value: t.Skipped, Wide: true},
		{Name: "missing", Value: cliout.Phrases(r.Missing), Wide: true}, {Name: "repeat", Value: r.Repeat},
	}
}

// resultRecord is a verdict of an episode as output.
func resultRecord(e *report.Episode, r check.Result) record {
	details := []check.Detail{}
	details = append(details, r.Details...)
	return record{
		{Name: "episode", Value: e.Number}, {Name: "name", Value: r.Name}, {Name: "verdict", Value: string(r.Verdict)},
		{Name: "ok", Value: r.OK}, {Name: "failed", Value: r.Failed}, {Name: "unknown", Value: r.Unknown},
		{Name: "elapsedMs", Value: r.Elapsed.Milliseconds(), Wide: true}, {Name: "text", Value: r.Text}, {Name: "details", Value: details, Wide: true},
	}
}

func (a *app) checkCommand() *cobra.Command {
	var limit time.Duration
	c := &cobra.Command{
		Use:   "check DIR",
		Short: "Judge the saved histories of a run again",
		Long: `check reads the histories in the folder of a run and judges them again. What only the
run could see (how the cluster healed, hashes, deaths, logs) is taken from run.json.
Nothing in the folder is changed.`,
		Example: "  keelstate-jepsen check jepsen-7\n  keelstate-jepsen check jepsen-7 --limit 10m -o json",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if limit <= 0 {
				return usage(errors.New("--limit: must be positive"))
			}
			run, err := report.LoadRun(args[0])
			if err != nil {
				return err
			}
			if err := again(cmd, run, args[0], limit); err != nil {
				return err
			}
			var items []record
			for i := range run.Episodes {
				for _, res := range run.Episodes[i].Results {
					items = append(items, resultRecord(&run.Episodes[i], res))
				}
			}
			run.Judge()
			if err := a.printList("Verdict", items); err != nil {
				return err
			}
			return verdictError(run.Verdict, run.Text)
		},
	}
	c.Flags().DurationVar(&limit, "limit", 2*time.Minute, "bound of each checker; one that cannot decide in it says unknown")
	return c
}

// again replaces the results of the checkers.
func again(cmd *cobra.Command, run *report.Run, dir string, limit time.Duration) error {
	whole := wholeEpisodes(dir)
	for i := range run.Episodes {
		e := &run.Episodes[i]
		if err := cmd.Context().Err(); err != nil {
			return err
		}
		if text := whole(e.Number); text != "" {
			e.Results = append(e.Results, check.Result{Name: "timeline", Verdict: check.Unknown, Text: text})
		}
		h, err := report.LoadHistory(dir, e)
		if err != nil { // what the run said of it stays, but is no pass
			e.Results = append(e.Results, check.Result{Name: "history", Verdict: check.Unknown, Text: err.Error()})
			e.Judge()
			continue
		}
		wanted := run.Workloads()
		var others []check.Result
		for _, old := range e.Results {
			if _, checked := check.For(old.Name); checked {
				wanted = append(wanted, old.Name)
			} else {
				others = append(others, old)
			}
		}
		results := check.Judge(h, check.Options{Limit: limit}, wanted...)
		if text := notTheirs(e, h); text != "" {
			results = append(results, check.Result{Name: "history", Verdict: check.Unknown, Text: text})
		}
		for _, name := range run.Looked() {
			if !slices.ContainsFunc(others, func(r check.Result) bool { return r.Name == name }) {
				others = append(others, check.Result{Name: name, Verdict: check.Unknown, Text: report.RunFile + " does not say"})
			}
		}
		e.Results = append(results, others...)
		e.Judge()
	}
	return nil
}

// notTheirs says why a history is not, or not all of, what the run recorded in
// an episode.
func notTheirs(e *report.Episode, h *history.History) string {
	ok, failed, unknown := 0, 0, 0
	for i := range h.Ops {
		switch h.Ops[i].Outcome {
		case history.OK:
			ok++
		case history.Fail:
			failed++
		default:
			unknown++
		}
	}
	switch {
	case !h.Complete:
		return "it ends early"
	case h.Header.Seed != int64(e.Seed):
		return fmt.Sprintf("%s is that of another episode: its seed is %d, not %d (%s)", e.History, h.Header.Seed, e.Seed, h.Header.Note)
	case ok != e.OK || failed != e.Failed || unknown != e.Unknown:
		return fmt.Sprintf("%s has %d operations that are ok, %d failed and %d unknown; the run recorded %d, %d and %d", e.History,
			ok, failed, unknown, e.OK, e.Failed, e.Unknown)
	default:
		return ""
	}
}

// wholeEpisodes reads the timeline of a folder; the function that it returns says
// why there is nothing, or not all, of an episode in it.
func wholeEpisodes(dir string) func(episode int) string {
	events, err := report.LoadEvents(dir)
	if err != nil {
		return func(int) string { return err.Error() }
	}
	judged := map[int]bool{}
	for _, v := range events {
		if v.Type == report.EventPhase && strings.HasSuffix(v.Text, ": "+report.LastPhase) {
			judged[v.Episode] = true
		}
	}
	return func(episode int) string {
		if !judged[episode] {
			return report.TimelineFile + " does not have all of the episode"
		}
		return ""
	}
}

func (a *app) reportCommand() *cobra.Command {
	var ledger bool
	c := &cobra.Command{
		Use:     "report DIR",
		Short:   "Make the page of a run again, and sum it up",
		Long:    `report makes report.html of the other files in the folder of a run, and prints its sums.`,
		Example: "  keelstate-jepsen report jepsen-7\n  keelstate-jepsen report jepsen-7 -o json --columns verdict,operations",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			run, err := report.LoadRun(args[0])
			if err != nil {
				return err
			}
			if err := report.WritePage(args[0]); err != nil {
				return err
			}
			a.prose("wrote " + filepath.Join(args[0], report.PageFile))
			if ledger {
				_, err := fmt.Fprintln(a.stdout, run.LedgerRow())
				return err
			}
			return a.printOne("Run", runRecord(args[0], run))
		},
	}
	c.Flags().BoolVar(&ledger, "ledger", false, "print a row for the table of jepsen/LEDGER.md instead")
	return c
}
