package rocks

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/engine"
)

// niceness returns the names of this process's threads that are nicer than itself, by
// how much.
func niceness(t *testing.T) map[string]int {
	t.Helper()
	own, err := unix.Getpriority(unix.PRIO_PROCESS, os.Getpid())
	must(t, err)
	tasks, err := os.ReadDir("/proc/self/task")
	must(t, err)
	out := map[string]int{}
	for _, task := range tasks {
		id, err := strconv.Atoi(task.Name())
		must(t, err)
		name, err := os.ReadFile(filepath.Join("/proc/self/task", task.Name(), "comm"))
		prio, perr := unix.Getpriority(unix.PRIO_PROCESS, id)
		if errors.Is(err, os.ErrNotExist) || errors.Is(perr, unix.ESRCH) {
			continue // it has ended
		}
		must(t, errors.Join(err, perr))
		if prio != own {
			out[strings.TrimSpace(string(name))] = own - prio // the call gives 20 minus the niceness
		}
	}
	return out
}

// RocksDB's own compactions run on threads that give way to all others; flushes, and
// the callers of a compaction that was asked for, do not.
func TestCompactionsGiveWay(t *testing.T) {
	d := newTestDriver(t, Options{})
	s := openTest(t, d, t.TempDir())
	const family = engine.FamilyID(7)
	must(t, s.EnsureFamily(family, engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: 1}))
	rounds := 0
	round := func() {
		rounds++
		var b engine.Batch
		for i := range 50 {
			b.Put(family, fmt.Appendf(nil, "%03d", i), fmt.Appendf(nil, "%d", rounds))
		}
		must(t, s.Write(&b))
		must(t, s.Flush())
	}
	round()
	round()
	must(t, s.Compact())
	for deadline := time.Now().Add(30 * time.Second); len(niceness(t)) == 0; round() {
		if time.Now().After(deadline) {
			t.Fatalf("after %d flushes no thread gives way", rounds)
		}
	}
	must(t, s.Compact())
	for name, by := range niceness(t) {
		if !strings.HasPrefix(name, "rocksdb:low") || by != 10 && by != 19 {
			t.Errorf("thread %q is nicer than the process by %d, only those of compactions should be, by 10", name, by)
		}
	}
}
