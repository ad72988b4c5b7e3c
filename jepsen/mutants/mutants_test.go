package mutants_test

import (
	"flag"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"os/exec"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/mutants"
)

const root = "../.."

var vetAll = flag.Bool("mutants.vet-all", false, "vet the packages of every mutant, not of a few")

func load(t *testing.T) []*mutants.Mutant {
	t.Helper()
	ms, err := mutants.Load(".")
	if err != nil {
		t.Fatal(err)
	}
	return ms
}

// TestEveryPatchApplies holds MU1 for the patches of this tree.
func TestEveryPatchApplies(t *testing.T) {
	ms := load(t)
	if len(ms) < 20 {
		t.Fatalf("%d mutants, at least 20 are wanted", len(ms))
	}
	for _, m := range ms {
		files, err := m.Apply(root)
		if err != nil {
			t.Error(err)
			continue
		}
		for name, text := range files {
			if strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "jepsen/") || strings.HasPrefix(name, "internal/sim/") {
				t.Errorf("%s changes %s: not the product but what tests it", m.Name, name)
			}
			if strings.HasSuffix(name, ".go") {
				if _, err := parser.ParseFile(token.NewFileSet(), name, text, 0); err != nil {
					t.Errorf("%s: %v", m.Name, err)
				}
			}
		}
	}
}

// TestMutantsBuild vets the patched packages of a few mutants, drawn anew each
// time, or of all.
func TestMutantsBuild(t *testing.T) {
	ms := load(t)
	if !*vetAll {
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		rand.New(rand.NewPCG(seed, 0)).Shuffle(len(ms), func(i, j int) { ms[i], ms[j] = ms[j], ms[i] })
		ms = ms[:min(3, len(ms))]
	}
	for _, m := range ms {
		t.Run(m.Name, func(t *testing.T) {
			overlay, err := m.Overlay(root, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			// Without tests: some do not build with an unexported name less.
			args := []string{"build", "-overlay", overlay}
			for _, p := range m.Paths() {
				args = append(args, "./"+path.Dir(p))
			}
			cmd := exec.Command("go", args...)
			cmd.Dir = root
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("go %s: %v\n%s", strings.Join(args, " "), err, out)
			}
		})
	}
}

const sample = `Rule: R
Breaks: b
Sees: s
Unit: ./p TestX
By: sim
Faults: kill

--- a/mutants_sample.txt
+++ b/mutants_sample.txt
@@ -2,3 +2,3 @@
 b
-c
+C
 d
`

func TestParseRefusesWhatIsNoPatch(t *testing.T) {
	if m, err := mutants.Parse("x", sample); err != nil || m.UnitRE != "TestX" || m.Faults != "kill" || !m.BySim || m.ByJepsen {
		t.Fatalf("%+v %v", m, err)
	}
	for _, c := range []struct{ name, old, new string }{
		{"no rule", "Rule: R\n", ""},
		{"no harness", "By: sim", "By: "},
		{"unknown harness", "By: sim", "By: luck"},
		{"unknown key", "Faults: kill", "Fault: kill"},
		{"no key", "Faults: kill", "kill"},
		{"another file", "+++ b/mutants_sample.txt", "+++ b/other.txt"},
		{"no hunk", "@@ -2,3 +2,3 @@\n", ""},
		{"no line of a diff", "+C", "*C"},
		{"no diff", sample[strings.Index(sample, "---"):], ""},
	} {
		if _, err := mutants.Parse("x", strings.Replace(sample, c.old, c.new, 1)); err == nil {
			t.Errorf("%s: accepted", c.name)
		}
	}
}
