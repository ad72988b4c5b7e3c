package main

import (
	"regexp"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/jepsen/report"
)

// telling ranks what a failure says: first a workload's anomaly, then an invariant
// of Raft or replicas that differ, then that the cluster does not serve or heal,
// then all else.
var telling = []*regexp.Regexp{
	regexp.MustCompile(`^(register|counter|list|map|bank|session): fail: `),
	regexp.MustCompile(`^the term of .* fell|two leaders in term|lost its open request|^replicas of .* differ|^hashes: fail: |takes no write for|^seed \d+: `),
	regexp.MustCompile(`: fail: |does not start|ended itself|is not ready`),
	regexp.MustCompile(`panic: |a goroutine is left|stands still|DATA RACE`),
	regexp.MustCompile(`: unknown: |verdict[=: ]*fail`),
	regexp.MustCompile(`--- FAIL`),
}

// evidence is what tells the most of the output of a test that failed.
func evidence(out string) string {
	if said := entries(out); rank(said[0]) < len(telling) {
		return tell(said)
	}
	return lastLine(out)
}

// tell is the most telling of what was said, and who else failed.
func tell(said []string) string {
	slices.SortStableFunc(said, func(a, b string) int { return rank(a) - rank(b) })
	var others []string
	for _, s := range said[1:] {
		if name, _, ok := strings.Cut(s, ": fail: "); ok && !strings.Contains(name, " ") && !slices.Contains(others, name) && !strings.HasPrefix(said[0], name+":") {
			others = append(others, name)
		}
	}
	text := short(said[0])
	if others != nil {
		text += " (and " + strings.Join(others, ", ") + ")"
	}
	return text
}

func rank(s string) int {
	for k, re := range telling {
		if re.MatchString(s) {
			return k
		}
	}
	return len(telling)
}

// place is where go test says that a line was logged.
var place = regexp.MustCompile(`^\s*[a-z_]+_test\.go:\d+: `)

// entries are the messages of a test's output, of one or more lines each, the
// most telling first. There is at least one.
func entries(out string) []string {
	var all []string
	for _, l := range strings.Split(out, "\n") {
		if at := place.FindString(l); at != "" {
			all = append(all, l[len(at):])
		} else if len(all) > 0 && strings.HasPrefix(l, "        ") {
			all[len(all)-1] += "\n" + l
		} else {
			all = append(all, l)
		}
	}
	for k, s := range all {
		all[k], _, _ = strings.Cut(s, " [{Verdict:") // details, of which the text has the first
	}
	slices.SortStableFunc(all, func(a, b string) int { return rank(a) - rank(b) })
	return all
}

// runSaid are the failures in the folder of a real-process run; nil if it has
// none that can be read.
func runSaid(dir string) []string {
	run, err := report.LoadRun(dir)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range run.Episodes {
		for _, r := range e.Results {
			if r.Verdict == "fail" {
				out = append(out, r.Name+": fail: "+r.Text)
			}
		}
	}
	return out
}

func lastLine(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	return short(lines[len(lines)-1])
}

// maxEvidence bounds a cell of the table, in characters.
const maxEvidence = 320

func short(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > maxEvidence {
		return string(r[:maxEvidence]) + "…"
	}
	return s
}
