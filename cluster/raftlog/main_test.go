package raftlog

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

func TestMain(m *testing.M) {
	if dir := os.Getenv("RAFTLOG_KILL_DIR"); dir != "" {
		killChild(dir)
		return
	}
	goleak.VerifyTestMain(m)
}

// entry makes an entry of a chosen type with readable data.
func entry(i, term uint64, typ raft.LogType, data string) *raft.Log {
	return &raft.Log{Index: i, Term: term, Type: typ, Data: []byte(data)}
}

// entries makes the commands lo to hi.
func entries(lo, hi, term uint64) []*raft.Log {
	var out []*raft.Log
	for i := lo; i <= hi; i++ {
		out = append(out, entry(i, term, raft.LogCommand, fmt.Sprintf("d%d.%d", i, term)))
	}
	return out
}

func mustOpen(t testing.TB, fsys vfs.FS, opt Options) *Log {
	t.Helper()
	opt.FS = fsys
	l, err := Open("log", opt)
	if err != nil {
		t.Fatalf("opening: %v", err)
	}
	return l
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// small gives many segments and no idle marks.
func small() Options {
	return Options{SegmentBytes: 4 << 10, GarbageBytes: 8 << 10, MarkDelay: -1, CacheBytes: -1}
}

// describe reads all that a group holds into one comparable text.
func describe(g *GroupLog) (string, error) {
	st, ok := g.State()
	if !ok {
		return "none", nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "gen %d tomb %t", st.Generation, st.Tombstoned)
	if st.First > 0 {
		for i := st.First; i <= st.Last; i++ {
			var e raft.Log
			if err := g.GetLog(i, &e); err != nil {
				return "", err
			}
			fmt.Fprintf(&b, " %d:%d:%d:%s", e.Index, e.Term, e.Type, e.Data)
		}
	}
	for _, k := range sortedKeys(g.mu.stable) {
		fmt.Fprintf(&b, " %s=%x", k, g.mu.stable[k])
	}
	return b.String(), nil
}

func describeAll(t testing.TB, l *Log) map[base.GroupID]string {
	t.Helper()
	out := map[base.GroupID]string{}
	for _, st := range l.Groups() {
		d, err := describe(l.Group(st.ID))
		must(t, err)
		out[st.ID] = d
	}
	return out
}

// waitFor polls a condition that another goroutine brings about.
func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("waited 10 s for: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}
