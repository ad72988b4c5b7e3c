package failpoint_test

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/failpoint"
)

var rewrite = flag.Bool("rewrite", false, "rewrite docs/failpoints.md")

const root = "../.."

// kinds of the functions that name a point.
var kinds = map[string]failpoint.Kind{"Hit": failpoint.KindHit, "Err": failpoint.KindErr, "Int": failpoint.KindInt}

// use is one call that names a point.
type use struct {
	name, at string
	kind     failpoint.Kind
}

// usesIn finds the calls of a file; a name that is no literal is an error.
func usesIn(path string, src []byte) (uses []use, bad []string, err error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, path, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, nil, err
	}
	imported := false
	for _, i := range f.Imports {
		if strings.HasSuffix(i.Path.Value, `/internal/failpoint"`) {
			if imported = true; i.Name != nil {
				bad = append(bad, path+": failpoint is imported under another name")
			}
		}
	}
	if !imported {
		return nil, nil, nil
	}
	ast.Inspect(f, func(n ast.Node) bool {
		s, ok := n.(*ast.SelectorExpr)
		if x, isIdent := ast.Node(nil), false; ok {
			x = s.X
			var id *ast.Ident
			if id, isIdent = x.(*ast.Ident); !isIdent || id.Name != "failpoint" {
				ok = false
			}
		}
		if ok {
			if _, names := kinds[s.Sel.Name]; names {
				bad = append(bad, fset.Position(n.Pos()).String()) // struck off below if it is called with a literal
			}
		}
		return true
	})
	ast.Inspect(f, func(n ast.Node) bool {
		c, ok := n.(*ast.CallExpr)
		if !ok || len(c.Args) == 0 {
			return true
		}
		s, ok := c.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		id, ok := s.X.(*ast.Ident)
		kind, names := kinds[s.Sel.Name]
		if !ok || id.Name != "failpoint" || !names {
			return true
		}
		at := fset.Position(c.Pos()).String()
		lit, ok := c.Args[0].(*ast.BasicLit)
		if !ok {
			return true
		}
		name, err := strconv.Unquote(lit.Value)
		if err != nil {
			return true
		}
		bad = slices.DeleteFunc(bad, func(b string) bool { return b == at })
		uses = append(uses, use{name, at, kind})
		return true
	})
	for i, b := range bad {
		if !strings.Contains(b, ": failpoint") {
			bad[i] = b + ": the name of a failpoint is no literal"
		}
	}
	return uses, bad, nil
}

// check compares uses with the registry (FP2).
func check(uses []use, points []failpoint.Point) (bad []string) {
	byName := make(map[string]failpoint.Point)
	for _, p := range points {
		if _, twice := byName[p.Name]; twice || p.At == "" || strings.ContainsAny(p.Name, "=;@*() ") || strings.Count(p.Name, ".") < 1 {
			bad = append(bad, fmt.Sprintf("%+v: registered twice, without words, or badly named", p))
		}
		byName[p.Name] = p
	}
	seen := make(map[string]string)
	for _, u := range uses {
		p, ok := byName[u.name]
		switch {
		case !ok:
			bad = append(bad, fmt.Sprintf("%s: %q is not registered", u.at, u.name))
		case p.Kind != u.kind:
			bad = append(bad, fmt.Sprintf("%s: %q is registered as %s, used as %s", u.at, u.name, p.Kind, u.kind))
		case seen[u.name] != "":
			bad = append(bad, fmt.Sprintf("%s: %q is also used at %s", u.at, u.name, seen[u.name]))
		}
		seen[u.name] = u.at
	}
	for name := range byName {
		if seen[name] == "" {
			bad = append(bad, name+": registered, but nowhere in the product")
		}
	}
	return bad
}

// TestRegistry is FP2.
func TestRegistry(t *testing.T) {
	var uses []use
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); n != ".." && strings.HasPrefix(n, ".") || n == "testdata" || path == filepath.Join(root, "internal", "failpoint") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		more, bad, err := usesIn(path, src)
		for _, b := range bad {
			t.Error(b)
		}
		uses = append(uses, more...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range check(uses, failpoint.Points()) {
		t.Error(b)
	}
}

// TestRegistryRules: each rule of FP2 can be broken.
func TestRegistryRules(t *testing.T) {
	head := "package x\nimport \"github.com/keelstate/keelstate/internal/failpoint\"\n"
	points := []failpoint.Point{{Name: "a.b", Kind: failpoint.KindHit, At: "x"}}
	for _, c := range []struct {
		name, src string
		bad       int
	}{
		{"right", head + `func f() { failpoint.Hit("a.b") }`, 0},
		{"unused", head + `var _ = failpoint.Enabled`, 1},
		{"unknown", head + `func f() { failpoint.Hit("a.b"); failpoint.Hit("a.c") }`, 1},
		{"twice", head + `func f() { failpoint.Hit("a.b"); failpoint.Hit("a.b") }`, 1},
		{"kind", head + `func f() error { return failpoint.Err("a.b") }`, 1},
		{"no literal", head + `func f(s string) { failpoint.Hit("a.b"); failpoint.Hit(s) }`, 1},
		{"as a value", head + `func f() { failpoint.Hit("a.b"); g := failpoint.Hit; g("z.z") }`, 1},
		{"another name", "package x\nimport fp \"github.com/keelstate/keelstate/internal/failpoint\"\nfunc f() { fp.Hit(\"a.b\") }", 2},
	} {
		uses, bad, err := usesIn("x.go", []byte(c.src))
		if err != nil {
			t.Fatal(err)
		}
		if bad = append(bad, check(uses, points)...); len(bad) != c.bad {
			t.Errorf("%s: %q, want %d", c.name, bad, c.bad)
		}
	}
}

// TestPage: docs/failpoints.md lists what is registered.
func TestPage(t *testing.T) {
	path := filepath.Join(root, "docs", "failpoints.md")
	const begin, end = "<!-- points -->\n", "<!-- end of points -->\n"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := strings.Cut(string(text), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("%s has no list between %q and %q", path, begin, end)
	}
	var b strings.Builder
	b.WriteString(before + begin + "| point | is | when |\n|---|---|---|\n")
	for _, p := range failpoint.Points() {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", p.Name, p.Kind, p.At)
	}
	b.WriteString(end + after)
	if b.String() == string(text) {
		return
	}
	if !*rewrite {
		t.Fatalf("%s is out of date: go test ./internal/failpoint -run TestPage -rewrite", path)
	}
	if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestFreeWithoutTag is FP1 for a small program that has every kind of call; the
// node itself is looked at by internal/crashtest.
func TestFreeWithoutTag(t *testing.T) {
	for _, tags := range []string{"", "failpoints"} {
		bin := filepath.Join(t.TempDir(), "calls")
		out, err := exec.Command("go", "build", "-tags", tags, "-o", bin, "./testdata/calls").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		b, err := os.ReadFile(bin)
		if err != nil {
			t.Fatal(err)
		}
		code, err := exec.Command("go", "tool", "objdump", "-s", "^main.calls$", bin).Output()
		if err != nil {
			t.Fatal(err)
		}
		names, called := 0, bytes.Contains(code, []byte("internal/failpoint."))
		for _, p := range failpoint.Points() {
			if bytes.Contains(b, []byte(p.Name)) {
				names++
			}
		}
		if on := tags != ""; !bytes.Contains(code, []byte("TEXT main.calls")) || called != on || on && names != len(failpoint.Points()) || !on && names != 0 {
			t.Errorf("tags %q: %d names in the binary, called: %v\n%s", tags, names, called, code)
		}
	}
}
