package lint

import (
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

// dependency is a row of docs/dependencies.md.
type dependency struct{ module, licence, reason string }

// licences that the product and its tests may link.
var goodLicences = map[string]bool{
	"Apache-2.0": true, "MIT": true, "BSD-2-Clause": true, "BSD-3-Clause": true, "ISC": true, "MPL-2.0": true, "Unlicense": true,
}

// badLicenceTexts give away the licences that the product must not carry, in
// whatever file a module keeps its terms.
var badLicenceTexts = []string{
	"GNU AFFERO GENERAL PUBLIC LICENSE", "Business Source License", "Server Side Public License", "GNU GENERAL PUBLIC LICENSE",
}

// readDependencies reads the rows "| `module` | licence | reason |".
func readDependencies(text string) ([]dependency, error) {
	var rows []dependency
	for n, line := range strings.Split(text, "\n") {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) < 2 || !strings.HasPrefix(strings.TrimSpace(cells[1]), "`") {
			continue
		}
		if len(cells) != 5 {
			return nil, fmt.Errorf("line %d: a row has three cells: module, licence, reason", n+1)
		}
		rows = append(rows, dependency{
			module:  strings.Trim(strings.TrimSpace(cells[1]), "`"),
			licence: strings.TrimSpace(cells[2]),
			reason:  strings.TrimSpace(cells[3]),
		})
	}
	return rows, nil
}

// checkDependencies applies LI8: direct holds the modules that the product or
// its tests import, known those that go.mod requires at all.
func checkDependencies(direct, known map[string]bool, rows []dependency) []string {
	var bad []string
	listed := make(map[string]bool)
	for _, r := range rows {
		if listed[r.module] {
			bad = append(bad, r.module+" is listed twice")
		}
		listed[r.module] = true
		if !goodLicences[r.licence] {
			bad = append(bad, fmt.Sprintf("%s has the licence %q, which is not among those allowed", r.module, r.licence))
		}
		if r.reason == "" {
			bad = append(bad, r.module+" is listed without a reason")
		}
		if !known[r.module] {
			bad = append(bad, r.module+" is listed, but go.mod does not require it")
		}
	}
	for m := range direct {
		if !listed[m] {
			bad = append(bad, m+" is a direct dependency and not listed in docs/dependencies.md")
		}
	}
	sort.Strings(bad)
	return bad
}

// checkLicenceFiles reads the terms of a module and looks for forbidden ones.
func checkLicenceFiles(module, dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var bad []string
	found := false
	for _, e := range entries {
		name := strings.ToUpper(e.Name())
		if e.IsDir() || !strings.HasPrefix(name, "LICEN") && !strings.HasPrefix(name, "COPYING") && !strings.HasPrefix(name, "UNLICENSE") {
			continue
		}
		found = true
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		head := string(text[:min(len(text), 2000)])
		for _, phrase := range badLicenceTexts {
			if strings.Contains(strings.ToUpper(head), strings.ToUpper(phrase)) {
				bad = append(bad, fmt.Sprintf("%s: %s says %q", module, e.Name(), phrase))
			}
		}
	}
	if !found {
		bad = append(bad, module+" has no licence file")
	}
	return bad, nil
}
