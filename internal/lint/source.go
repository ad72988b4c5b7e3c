package lint

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// pure are the packages under LI4, with what is below them.
var pure = []string{"keygroup", "broadcast", "raftfsm"}

// impureFiles of pure packages are exempt: they adapt the core to the world.
var impureFiles = map[string]bool{"raftfsm/raftadapter.go": true}

var impureImports = []string{"math/rand", "math/rand/v2", "crypto/rand", "os", "net", "syscall", "unsafe", "runtime"}

// clockNames are the names of package time that read a clock or wait.
var clockNames = map[string]bool{
	"Now": true, "Since": true, "Until": true, "Sleep": true, "After": true, "AfterFunc": true,
	"Tick": true, "NewTicker": true, "NewTimer": true,
}

// sourceFile is a parsed file and its path relative to the module.
type sourceFile struct {
	rel  string
	fset *token.FileSet
	file *ast.File
}

func parseSource(rel string, text []byte) (sourceFile, error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, rel, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return sourceFile{}, fmt.Errorf("parsing %s: %w", rel, err)
	}
	return sourceFile{rel: rel, fset: fset, file: f}, nil
}

func (s sourceFile) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d", s.rel, s.fset.Position(n.Pos()).Line)
}

func (s sourceFile) isTest() bool { return strings.HasSuffix(s.rel, "_test.go") }

// imports lists the import paths of the file.
func (s sourceFile) imports() []string {
	var paths []string
	for _, i := range s.file.Imports {
		if p, err := strconv.Unquote(i.Path.Value); err == nil {
			paths = append(paths, p)
		}
	}
	return paths
}

// nameOf is the name under which the file knows an import, "" if it does not.
func (s sourceFile) nameOf(importPath string) string {
	for _, i := range s.file.Imports {
		if p, err := strconv.Unquote(i.Path.Value); err != nil || p != importPath {
			continue
		}
		if i.Name != nil {
			return i.Name.Name
		}
		return path.Base(importPath)
	}
	return ""
}

// checkPure applies LI4 to a file of a pure package.
func checkPure(s sourceFile) []string {
	var bad []string
	for _, p := range s.imports() {
		for _, banned := range impureImports {
			if under(p, banned) {
				bad = append(bad, fmt.Sprintf("%s: a pure package imports %s", s.rel, p))
				break
			}
		}
	}
	timeName := s.nameOf("time")
	if timeName == "." {
		bad = append(bad, fmt.Sprintf("%s: a pure package imports time under the name .", s.rel))
	}
	ast.Inspect(s.file, func(n ast.Node) bool {
		switch x := n.(type) {
		case *ast.GoStmt:
			bad = append(bad, s.at(x)+": a pure package starts a goroutine")
		case *ast.SelectorExpr:
			if id, ok := x.X.(*ast.Ident); ok && timeName != "" && id.Name == timeName && clockNames[x.Sel.Name] {
				bad = append(bad, fmt.Sprintf("%s: a pure package uses time.%s", s.at(x), x.Sel.Name))
			}
		}
		return true
	})
	return bad
}

// call is a place in a test that needs a line on a list of exceptions.
type call struct{ file, function, at string }

// findSleeps finds time.Sleep in a test file. Inside the function given to
// synctest.Test it waits in fake time, which is no wait at all.
func findSleeps(s sourceFile) []call {
	timeName, bubble := s.nameOf("time"), s.nameOf("testing/synctest")
	if timeName == "" || !s.isTest() {
		return nil
	}
	var found []call
	for _, d := range s.file.Decls {
		function := "(package level)"
		if f, ok := d.(*ast.FuncDecl); ok {
			function = f.Name.Name
		}
		ast.Inspect(d, func(n ast.Node) bool {
			switch x := n.(type) {
			case *ast.CallExpr:
				return bubble == "" || !isSelector(x.Fun, bubble, "Test")
			case *ast.SelectorExpr:
				if isSelector(x, timeName, "Sleep") {
					found = append(found, call{s.rel, function, s.at(x)})
				}
			}
			return true
		})
	}
	return found
}

func isSelector(e ast.Expr, pkg, name string) bool {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != name {
		return false
	}
	id, ok := sel.X.(*ast.Ident)
	return ok && id.Name == pkg
}

// timed are the packages under LI9, with what is below them.
var timed = []string{"cluster", "api", "client", "raftfsm", "cmd/node"}

// findWallClock finds where a file under LI9 takes the monotonic reading off a
// time: conversions to and from numbers, and Round(0).
func findWallClock(s sourceFile) []call {
	if !underAny(path.Dir(s.rel), timed) || s.isTest() {
		return nil
	}
	var found []call
	for _, d := range s.file.Decls {
		function := "(package level)"
		if f, ok := d.(*ast.FuncDecl); ok {
			function = f.Name.Name
		}
		ast.Inspect(d, func(n ast.Node) bool {
			c, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := c.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			switch sel.Sel.Name {
			case "Unix", "UnixMilli", "UnixMicro", "UnixNano":
				found = append(found, call{s.rel, function, s.at(c)})
			case "Round":
				if len(c.Args) == 1 {
					if zero, ok := c.Args[0].(*ast.BasicLit); ok && zero.Value == "0" {
						found = append(found, call{s.rel, function, s.at(c)})
					}
				}
			}
			return true
		})
	}
	return found
}

// findSkips finds calls of Skip, Skipf and SkipNow, except on a *rapid.T, where
// they only discard one draw. Harnesses that are no test files count as well.
func findSkips(s sourceFile) []call {
	var found []call
	for _, d := range s.file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		scopes := []*ast.FuncType{f.Type}
		var walk func(ast.Node) bool
		walk = func(n ast.Node) bool {
			switch x := n.(type) {
			case *ast.FuncLit:
				scopes = append(scopes, x.Type)
				ast.Inspect(x.Body, walk)
				scopes = scopes[:len(scopes)-1]
				return false
			case *ast.CallExpr:
				sel, ok := x.Fun.(*ast.SelectorExpr)
				if !ok || sel.Sel.Name != "Skip" && sel.Sel.Name != "Skipf" && sel.Sel.Name != "SkipNow" {
					return true
				}
				id, plain := sel.X.(*ast.Ident)
				if plain && !isTestingParam(scopes, id.Name) || !plain && !s.isTest() {
					return true
				}
				found = append(found, call{s.rel, f.Name.Name, s.at(x)})
			}
			return true
		}
		ast.Inspect(f.Body, walk)
	}
	return found
}

// isTestingParam says whether a name is, in the innermost function that has a
// parameter of this name, a testing.T, B, F or TB. A name that is no parameter
// may be anything, such as a scanner that skips bytes.
func isTestingParam(scopes []*ast.FuncType, name string) bool {
	for i := len(scopes) - 1; i >= 0; i-- {
		for _, field := range scopes[i].Params.List {
			for _, id := range field.Names {
				if id.Name != name {
					continue
				}
				typ := field.Type
				if star, ok := typ.(*ast.StarExpr); ok {
					typ = star.X
				}
				sel, ok := typ.(*ast.SelectorExpr)
				return ok && isSelector(sel, "testing", sel.Sel.Name)
			}
		}
	}
	return false
}

// checkAllowed compares what tests do with a list of exceptions (LI6): every
// call must be on it, and every line of it must be needed.
func checkAllowed(what, list string, calls []call, allowed map[string]string) []string {
	var bad []string
	used := make(map[string]bool)
	for _, c := range calls {
		key := c.file + " " + c.function
		if _, ok := allowed[key]; !ok {
			bad = append(bad, fmt.Sprintf("%s: %s %s, and %s does not say why it may", c.at, c.function, what, list))
		}
		used[key] = true
	}
	for key := range allowed {
		if !used[key] {
			bad = append(bad, fmt.Sprintf("%s allows %s, which is not needed", list, key))
		}
	}
	return bad
}

// readAllowed reads lines of "file function: reason".
func readAllowed(file string) (map[string]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	allowed := make(map[string]string)
	in := bufio.NewScanner(f)
	for n := 1; in.Scan(); n++ {
		line := strings.TrimSpace(in.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, reason, ok := strings.Cut(line, ": ")
		if !ok || len(strings.Fields(key)) != 2 || strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s:%d: want \"file function: reason\"", file, n)
		}
		allowed[key] = strings.TrimSpace(reason)
	}
	return allowed, in.Err()
}

// registryHosts matches hosts of package registries and mirrors (LI7). The
// product must build behind any mirror, so no file may insist on one. The
// escapes keep this file from matching itself.
var registryHosts = regexp.MustCompile(`(?i)\b(?:` + strings.Join([]string{
	`(?:proxy|sum)\.golang\.org`, `goproxy\.(?:io|cn)`, `(?:[a-z0-9-]+\.)?deb\.debian\.org`, `(?:ftp|security|snapshot)\.debian\.org`,
	`archive\.ubuntu\.com`, `security\.ubuntu\.com`, `registry\.npmjs\.org`, `registry\.yarnpkg\.com`, `pypi\.org`,
	`files\.pythonhosted\.org`, `crates\.io`, `registry-1\.docker\.io`, `index\.docker\.io`, `docker\.io`, `ghcr\.io`, `quay\.io`,
	`repo1?\.maven\.(?:apache\.)?org`, `rubygems\.org`, `buf\.build`,
}, "|") + `)\b`)

// checkHosts applies LI7 to one file.
func checkHosts(rel string, text []byte) []string {
	var bad []string
	for n, line := range strings.Split(string(text), "\n") {
		if host := registryHosts.FindString(line); host != "" {
			bad = append(bad, fmt.Sprintf("%s:%d: names the registry host %s", rel, n+1, host))
		}
	}
	return bad
}
