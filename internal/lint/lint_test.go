package lint

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const root = "../.."

// repo is what the rules look at, read once.
type repo struct {
	module  string
	pkgs    []pkg // of the module
	all     []pkg // with tests' and all dependencies
	sources []sourceFile
	files   []string // tracked or about to be, relative to the root
}

var load = sync.OnceValues(func() (*repo, error) {
	r := &repo{}
	var err error
	if r.pkgs, err = goList(root, "./..."); err != nil {
		return nil, err
	}
	if r.all, err = goList(root, "-deps", "-test", "./..."); err != nil {
		return nil, err
	}
	for _, p := range r.pkgs {
		if p.Module != nil && p.Module.Main {
			r.module = p.Module.Path
		}
	}
	cmd := exec.Command("git", "ls-files", "-co", "--exclude-standard", "-z")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	for _, f := range strings.Split(strings.TrimRight(string(out), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(root, f))
		if os.IsNotExist(err) {
			continue // removed, not yet committed
		}
		if err != nil {
			return nil, err
		}
		r.files = append(r.files, f)
		if !strings.HasSuffix(f, ".go") || strings.Contains(f, "testdata/") {
			continue
		}
		s, err := parseSource(f, text)
		if err != nil {
			return nil, err
		}
		r.sources = append(r.sources, s)
	}
	return r, nil
})

func theRepo(t *testing.T) *repo {
	t.Helper()
	r, err := load()
	if err != nil {
		t.Fatal(err)
	}
	if r.module == "" || len(r.pkgs) < 5 || len(r.sources) < 20 {
		t.Fatalf("only %d packages and %d sources of module %q found: the rules would hold for nothing", len(r.pkgs), len(r.sources), r.module)
	}
	return r
}

func report(t *testing.T, bad []string) {
	t.Helper()
	slices.Sort(bad)
	for _, b := range bad {
		t.Error(b)
	}
}

// nested says whether a file belongs to a module below the main one.
func (r *repo) nested(file string) bool {
	for _, f := range r.files {
		if dir, ok := strings.CutSuffix(f, "/go.mod"); ok && under(file, dir) {
			return true
		}
	}
	return false
}

// LI1, LI2, LI3.
func TestDependencyGraph(t *testing.T) {
	r := theRepo(t)
	var edges []edge
	for _, s := range r.sources {
		if s.isTest() || r.nested(s.rel) {
			continue
		}
		for _, p := range s.imports() {
			e := edge{file: s.rel, from: filepath.ToSlash(filepath.Dir(s.rel)), target: p}
			if under(p, r.module) {
				e.inside, e.target = true, strings.TrimPrefix(strings.TrimPrefix(p, r.module), "/")
			}
			edges = append(edges, e)
		}
	}
	report(t, checkEdges(edges))
}

// LI4.
func TestPurePackages(t *testing.T) {
	r := theRepo(t)
	checked := 0
	var bad []string
	for _, s := range r.sources {
		if s.isTest() || impureFiles[s.rel] || !underAny(s.rel, pure) {
			continue
		}
		checked++
		bad = append(bad, checkPure(s)...)
	}
	if checked == 0 {
		t.Fatal("no file of a pure package was found")
	}
	report(t, bad)
}

// LI5.
func TestPackageNamesAndComments(t *testing.T) {
	r := theRepo(t)
	var bad []string
	for _, p := range r.pkgs {
		rel := p.rel(r.module)
		for _, element := range append(strings.Split(rel, "/"), p.Name) {
			if element == "util" || element == "utils" || element == "common" {
				bad = append(bad, rel+": a package must be named for what it provides")
			}
		}
		if p.Doc == "" && len(p.GoFiles)+len(p.CgoFiles) > 0 {
			bad = append(bad, rel+": the package has no doc comment (doc.go)")
		}
	}
	report(t, bad)
}

// LI6.
func TestSleepsAreAllowed(t *testing.T) {
	checkList(t, "sleeps", "allowed-sleeps.txt", findSleeps)
}

// LI6.
func TestSkipsAreAllowed(t *testing.T) {
	checkList(t, "skips", "allowed-skips.txt", findSkips)
}

// LI9.
func TestWallClockIsAllowed(t *testing.T) {
	checkList(t, "takes the monotonic reading off a time", "allowed-wallclock.txt", findWallClock)
}

func checkList(t *testing.T, what, list string, find func(sourceFile) []call) {
	t.Helper()
	allowed, err := readAllowed(filepath.Join("testdata", list))
	if err != nil {
		t.Fatal(err)
	}
	var calls []call
	for _, s := range theRepo(t).sources {
		calls = append(calls, find(s)...)
	}
	report(t, checkAllowed(what, list, calls, allowed))
}

// LI7.
func TestNoRegistryHosts(t *testing.T) {
	var bad []string
	for _, f := range theRepo(t).files {
		if f == "internal/lint/rules_test.go" {
			continue // its examples must break the rule
		}
		text, err := os.ReadFile(filepath.Join(root, f))
		if err != nil {
			t.Fatal(err)
		}
		bad = append(bad, checkHosts(f, text)...)
	}
	report(t, bad)
}

// LI8.
func TestDependenciesAreListed(t *testing.T) {
	r := theRepo(t)
	moduleOf := make(map[string]string) // import path -> module
	dirs := make(map[string]string)     // module -> directory
	for _, p := range r.all {
		if !p.Standard && p.Module != nil && !p.Module.Main {
			moduleOf[p.ImportPath] = p.Module.Path
			dirs[p.Module.Path] = p.Module.Dir
		}
	}
	direct := make(map[string]bool)
	for _, p := range r.pkgs {
		for _, list := range [][]string{p.Imports, p.TestImports, p.XTestImports} {
			for _, i := range list {
				if m := moduleOf[i]; m != "" {
					direct[m] = true
				}
			}
		}
	}
	if len(direct) == 0 {
		t.Fatal("no dependency was found")
	}
	known, err := requiredModules(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "docs", "dependencies.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows, err := readDependencies(string(text))
	if err != nil {
		t.Fatal(err)
	}
	bad := checkDependencies(direct, known, rows)
	for module, dir := range dirs {
		found, err := checkLicenceFiles(module, dir)
		if err != nil {
			t.Fatal(err)
		}
		bad = append(bad, found...)
	}
	report(t, bad)
}

// requiredModules reads the modules that go.mod requires.
func requiredModules(path string) (map[string]bool, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	known := make(map[string]bool)
	for _, line := range strings.Split(string(text), "\n") {
		fields := strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "require "))
		if len(fields) >= 2 && strings.HasPrefix(fields[1], "v") && strings.Contains(fields[0], ".") {
			known[fields[0]] = true
		}
	}
	return known, nil
}
