//go:build !failpoints

package main

import (
	"bytes"
	"os"
	"regexp"
	"testing"
)

// TestFreeOfFailpoints: no name of a failpoint is in this binary, which has the
// whole node in it (FP1).
func TestFreeOfFailpoints(t *testing.T) {
	page, err := os.ReadFile("../../docs/failpoints.md")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile("(?m)^\\| `([a-z-]+(\\.[a-z-]+)+)` ").FindAllSubmatch(page, -1)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	binary, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	if len(names) < 30 || !bytes.Contains(binary, []byte("putting the files of %s aside")) {
		t.Fatalf("%d names; is the product in the binary?", len(names))
	}
	for _, n := range names {
		if bytes.Contains(binary, n[1]) {
			t.Errorf("the name %s is in the binary", n[1])
		}
	}
}
