//go:build !failpoints

package failpoint_test

import (
	"os/exec"
	"testing"
)

// TestWithTag runs the tests of the other build, and sees that it vets.
func TestWithTag(t *testing.T) {
	for _, args := range [][]string{{"vet", "-tags", "failpoints", "."}, {"test", "-tags", "failpoints", "-count=1", "."}} {
		if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
			t.Errorf("go %v: %v\n%s", args, err, out)
		}
	}
}
