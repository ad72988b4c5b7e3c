package sim

import (
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

// TestLooksTellFallsAndTwoLeaders holds SM5.
func TestLooksTellFallsAndTwoLeaders(t *testing.T) {
	w := &world{trace: newTrace(io.Discard)}
	see := func(host int, replica string, term uint64, leads bool) string {
		w.findings = nil
		clear(w.looks.told)
		w.looks.saw(w, host, 1, base.ReplicaID(replica), term, leads)
		return strings.Join(w.findings, "; ")
	}
	for _, c := range []struct {
		name, replica string
		host          int
		term          uint64
		leads         bool
		want          string
	}{
		{"the first look at a replica", "a", 0, 5, true, ""},
		{"another replica is behind", "b", 1, 3, false, ""},
		{"a replica that has just been made", "c", 2, 0, false, ""},
		{"it catches up", "b", 1, 5, false, ""},
		{"a second leader in a term", "b", 1, 5, true, "S1 has two leaders in term 5: n1 and n2"},
		{"the next term", "b", 1, 6, true, ""},
		{"a start from nothing", "b", 1, 0, false, "the term of S1 at n2 fell from 6 to 0"},
		{"a step back", "a", 0, 4, false, "the term of S1 at n1 fell from 5 to 4"},
	} {
		if got := see(c.host, c.replica, c.term, c.leads); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// TestSchemesAreFaults: what squalls prefer is among the faults.
func TestSchemesAreFaults(t *testing.T) {
	for _, s := range schemes {
		if !slices.ContainsFunc(allFaults(), func(f fault) bool { return f.kind == s && f.weight > 0 }) {
			t.Errorf("there is no fault %q", s)
		}
	}
}
