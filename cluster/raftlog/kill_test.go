package raftlog

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

const killGroups = 4

// killChild is the process that is killed: each group appends entries, raises its
// term and truncates, and prints what was acknowledged. It never returns.
func killChild(dir string) {
	l, err := Open(dir, Options{SegmentBytes: 64 << 10, GarbageBytes: 64 << 10})
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	var out sync.Mutex
	var wg sync.WaitGroup
	for id := range base.GroupID(killGroups) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			g := l.Group(id)
			for {
				last, _ := g.LastIndex()
				term, _ := g.GetUint64([]byte(keyCurrentTerm))
				err := g.SetUint64([]byte(keyCurrentTerm), term+1)
				if err == nil {
					err = g.StoreLogs(entries(last+1, last+10, term+1))
				}
				if err == nil && last > 200 {
					err = g.DeleteRange(0, last-200)
				}
				if err != nil {
					fmt.Println("error", err)
					os.Exit(1)
				}
				out.Lock()
				fmt.Printf("ack %d %d %d\n", id, last+10, term+1)
				out.Unlock()
			}
		}()
	}
	wg.Wait()
}

// TestKillKeepsWhatWasAcknowledged kills a writing process with SIGKILL, on the
// real file system, again and again on the same log.
func TestKillKeepsWhatWasAcknowledged(t *testing.T) {
	dir := t.TempDir()
	acked := map[base.GroupID][2]uint64{}
	for round := range 5 {
		runAndKill(t, dir, 150+round*70, acked)
		l, err := Open(dir, Options{SegmentBytes: 64 << 10, GarbageBytes: 64 << 10})
		must(t, err)
		for id, a := range acked {
			g := l.Group(id)
			last, err := g.LastIndex()
			must(t, err)
			term, err := g.GetUint64([]byte(keyCurrentTerm))
			must(t, err)
			if last < a[0] || term < a[1] {
				t.Fatalf("round %d, %s: entry %d, term %d; acknowledged %d, %d", round, id, last, term, a[0], a[1])
			}
			first, err := g.FirstIndex()
			must(t, err)
			for i := first; i <= last; i++ {
				var e raft.Log
				must(t, g.GetLog(i, &e))
				if string(e.Data) != fmt.Sprintf("d%d.%d", i, e.Term) {
					t.Fatalf("round %d: entry %d of %s is %q", round, i, id, e.Data)
				}
			}
		}
		must(t, l.Close())
	}
}

// runAndKill starts the child, notes lines acknowledgements, and kills it.
func runAndKill(t *testing.T, dir string, lines int, acked map[base.GroupID][2]uint64) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "RAFTLOG_KILL_DIR="+dir)
	pipe, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	killed := false
	seen := 0
	for sc := bufio.NewScanner(pipe); sc.Scan(); {
		var id base.GroupID
		var last, term uint64
		if strings.HasPrefix(sc.Text(), "error") {
			t.Errorf("child: %s", sc.Text())
		}
		if n, _ := fmt.Sscanf(sc.Text(), "ack %d %d %d", &id, &last, &term); n != 3 {
			continue // the last line may be cut
		}
		acked[id] = [2]uint64{max(acked[id][0], last), max(acked[id][1], term)}
		if seen++; seen >= lines && !killed {
			must(t, cmd.Process.Kill())
			killed = true
		}
	}
	if !killed {
		must(t, cmd.Process.Kill())
	}
	_ = cmd.Wait() // killed
	if seen < lines {
		t.Fatalf("the child acknowledged %d times, want %d", seen, lines)
	}
}
