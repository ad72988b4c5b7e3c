package mutants

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Mutant is one planted bug.
type Mutant struct {
	// Name is that of the patch without its ending, as 01-skip-log-fsync.
	Name                string
	Rule, Breaks, Sees  string
	UnitPackage, UnitRE string
	// BySteps, BySim and ByJepsen say which harness can see it.
	BySteps, BySim, ByJepsen bool
	// Faults are for a real-process run; empty for all.
	Faults string
	// Flags are more of such a run.
	Flags string
	// Kind is that of the simulated runs that it needs; empty for any.
	Kind string

	files []filePatch
}

// filePatch changes one file, which is relative to the module and has slashes.
type filePatch struct {
	path  string
	hunks []hunk
}

type hunk struct {
	at       int // line of the old text, from 0
	old, new []string
}

// Load reads all patches of a directory, in order of their names.
func Load(dir string) ([]*Mutant, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.patch"))
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var out []*Mutant
	for _, n := range names {
		raw, err := os.ReadFile(n)
		if err != nil {
			return nil, err
		}
		m, err := Parse(strings.TrimSuffix(filepath.Base(n), ".patch"), string(raw))
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", n, err)
		}
		out = append(out, m)
	}
	return out, nil
}

// Parse reads one patch.
func Parse(name, text string) (*Mutant, error) {
	m := &Mutant{Name: name}
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	k := 0
	for ; k < len(lines) && !strings.HasPrefix(lines[k], "--- "); k++ {
		if lines[k] == "" {
			continue
		}
		if err := m.head(lines[k]); err != nil {
			return nil, err
		}
	}
	switch {
	case m.Rule == "" || m.Breaks == "" || m.Sees == "" || m.UnitPackage == "":
		return nil, fmt.Errorf("the head needs Rule, Breaks, Sees and Unit")
	case !m.BySteps && !m.BySim && !m.ByJepsen:
		return nil, fmt.Errorf("By names no harness")
	}
	return m, m.diff(lines[k:])
}

func (m *Mutant) head(line string) error {
	key, value, ok := strings.Cut(line, ": ")
	if !ok {
		return fmt.Errorf("%q is not Key: value", line)
	}
	switch key {
	case "Rule":
		m.Rule = value
	case "Breaks":
		m.Breaks = value
	case "Sees":
		m.Sees = value
	case "Unit":
		m.UnitPackage, m.UnitRE, _ = strings.Cut(value, " ")
	case "By":
		for _, h := range strings.Fields(value) {
			switch h {
			case "steps":
				m.BySteps = true
			case "sim":
				m.BySim = true
			case "jepsen":
				m.ByJepsen = true
			default:
				return fmt.Errorf("there is no harness %q", h)
			}
		}
	case "Faults":
		m.Faults = value
	case "Flags":
		m.Flags = value
	case "Kind":
		m.Kind = value
	default:
		return fmt.Errorf("the head has no key %q", key)
	}
	return nil
}

var hunkHead = regexp.MustCompile(`^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@`)

func (m *Mutant) diff(lines []string) error {
	for _, l := range lines {
		var f *filePatch
		var h *hunk
		if n := len(m.files); n > 0 {
			f = &m.files[n-1]
			if n := len(f.hunks); n > 0 {
				h = &f.hunks[n-1]
			}
		}
		switch at := hunkHead.FindStringSubmatch(l); {
		case strings.HasPrefix(l, "--- a/"):
			m.files = append(m.files, filePatch{path: strings.TrimPrefix(l, "--- a/")})
		case f == nil:
			return fmt.Errorf("%q is before the first file", l)
		case strings.HasPrefix(l, "+++ b/"):
			if l[len("+++ b/"):] != f.path {
				return fmt.Errorf("%s becomes another file", f.path)
			}
		case at != nil:
			n, err := strconv.Atoi(at[1])
			if err != nil {
				return err
			}
			f.hunks = append(f.hunks, hunk{at: max(n-1, 0)})
		case h == nil:
			return fmt.Errorf("%q is before the first hunk of %s", l, f.path)
		case l == "" || l[0] == ' ':
			h.old, h.new = append(h.old, strings.TrimPrefix(l, " ")), append(h.new, strings.TrimPrefix(l, " "))
		case l[0] == '-':
			h.old = append(h.old, l[1:])
		case l[0] == '+':
			h.new = append(h.new, l[1:])
		default:
			return fmt.Errorf("%q is no line of a diff", l)
		}
	}
	if len(m.files) == 0 {
		return fmt.Errorf("nothing is changed")
	}
	return nil
}

// Paths are the files that the mutant changes.
func (m *Mutant) Paths() []string {
	var out []string
	for _, f := range m.files {
		out = append(out, f.path)
	}
	return out
}

// Apply returns the changed text of every file, by path. root is the module's
// directory.
func (m *Mutant) Apply(root string) (map[string]string, error) {
	out := map[string]string{}
	for _, f := range m.files {
		raw, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(f.path)))
		if err != nil {
			return nil, fmt.Errorf("applying %s: %w", m.Name, err)
		}
		text, err := f.apply(string(raw))
		if err != nil {
			return nil, fmt.Errorf("applying %s: %w", m.Name, err)
		}
		out[f.path] = text
	}
	return out, nil
}

func (f *filePatch) apply(text string) (string, error) {
	lines := strings.Split(text, "\n")
	shift := 0
	for k, h := range f.hunks {
		at := find(lines, h.old, h.at+shift)
		if at < 0 || len(h.old) == 0 {
			return "", fmt.Errorf("hunk %d of %s: its lines are not there; make the patch anew", k+1, f.path)
		}
		lines = slices.Concat(lines[:at], h.new, lines[at+len(h.old):])
		shift = at - h.at + len(h.new) - len(h.old)
	}
	return strings.Join(lines, "\n"), nil
}

// find is where want is in lines, nearest to near; -1 if nowhere.
func find(lines, want []string, near int) int {
	best, distance := -1, 0
	for i := 0; i+len(want) <= len(lines); i++ {
		if d := max(i-near, near-i); (best < 0 || d < distance) && slices.Equal(lines[i:i+len(want)], want) {
			best, distance = i, d
		}
	}
	return best
}
