// Command calls has one call of each kind, for a look at what becomes of it.
package main

import (
	"fmt"

	"github.com/keelstate/keelstate/internal/failpoint"
)

func main() { fmt.Println(calls(4096)) }

//go:noinline
func calls(n int64) (int64, error) {
	failpoint.Hit("raftlog.append.after-sync")
	if err := failpoint.Err("raftlog.append.before-sync"); err != nil {
		return 0, err
	}
	return failpoint.Int("raftlog.segment-bytes", n), nil
}
