package mutants

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
)

// Overlay writes the patched files into dir and returns the file for -overlay of
// go build, vet and test. A nil mutant, the control, changes nothing.
func (m *Mutant) Overlay(root, dir string) (string, error) {
	replace := map[string]string{}
	if m != nil {
		root, err := filepath.Abs(root)
		if err != nil {
			return "", err
		}
		files, err := m.Apply(root)
		if err != nil {
			return "", err
		}
		for path, text := range files {
			to := filepath.Join(dir, strings.ReplaceAll(path, "/", "__"))
			if err := os.WriteFile(to, []byte(text), 0o644); err != nil {
				return "", err
			}
			replace[filepath.Join(root, filepath.FromSlash(path))] = to
		}
	}
	raw, err := json.MarshalIndent(map[string]any{"Replace": replace}, "", "  ")
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "overlay.json")
	return file, os.WriteFile(file, raw, 0o644)
}
