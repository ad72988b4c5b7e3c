package cluster

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

// logKit is a data directory of a node that was admitted, started three times,
// and made promises in two groups.
type logKit struct {
	t   *testing.T
	dir string
}

const logKitBoots = 3

func newLogKit(t *testing.T) *logKit {
	t.Helper()
	k := &logKit{t: t, dir: t.TempDir()}
	for range logKitBoots {
		n, err := k.open()
		if err != nil {
			t.Fatal(err)
		}
		if n.mu.identity.Cluster == "" {
			if err := n.changeIdentity(func(id *Identity) { id.Cluster, id.SystemGeneration = "c", 1 }); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(n.log.CreateGroup(0, 1), n.log.CreateGroup(7, 1)); err != nil {
			t.Fatal(err)
		}
		k.close(n)
	}
	return k
}

func (k *logKit) raftlog() string { return filepath.Join(k.dir, "raftlog") }

// node is a node on the directory as far as its identity is read.
func (k *logKit) node() *Node {
	k.t.Helper()
	n := &Node{opts: Options{DataDir: k.dir, Log: raftlog.Options{FS: vfs.OS}}, logger: slog.New(slog.NewTextHandler(io.Discard, nil)), rename: os.Rename}
	id, err := openIdentity(k.dir, "n1", "mem")
	if err != nil {
		k.t.Fatal(err)
	}
	n.mu.identity = *id
	return n
}

func (k *logKit) open() (*Node, error) {
	n := k.node()
	return n, n.openLog()
}

func (k *logKit) close(n *Node) {
	k.t.Helper()
	if err := n.log.Close(); err != nil {
		k.t.Fatal(err)
	}
}

// setBoots changes how many starts the directory's log has counted.
func (k *logKit) setBoots(boots uint64) {
	k.t.Helper()
	l, err := raftlog.Open(k.raftlog(), raftlog.Options{})
	if err == nil {
		err = errors.Join(l.Group(bootGroup).SetUint64([]byte(bootKey), boots), l.Close())
	}
	if err != nil {
		k.t.Fatal(err)
	}
}

// putAside is what keepLogAside does before the identity is changed.
func (k *logKit) putAside() {
	k.t.Helper()
	if err := os.Rename(k.raftlog(), k.raftlog()+".damaged-1"); err != nil {
		k.t.Fatal(err)
	}
}

func (k *logKit) forget() {
	k.t.Helper()
	if err := k.node().forgetLog(); err != nil {
		k.t.Fatal(err)
	}
}

// newLog makes a new log, as far as a crash lets it: 0 the directory, 1 the log,
// 2 the group of the boot count, 3 the count.
func (k *logKit) newLog(steps int) {
	k.t.Helper()
	if err := os.Mkdir(k.raftlog(), 0o750); err != nil {
		k.t.Fatal(err)
	}
	if steps == 0 {
		return
	}
	l, err := raftlog.Open(k.raftlog(), raftlog.Options{})
	if err == nil && steps >= 2 {
		err = l.CreateGroup(bootGroup, 1)
	}
	if err == nil && steps >= 3 {
		err = l.Group(bootGroup).SetUint64([]byte(bootKey), logKitBoots+1)
	}
	if err = errors.Join(err, l.Close()); err != nil {
		k.t.Fatal(err)
	}
}

func (k *logKit) asides() int {
	k.t.Helper()
	found, err := filepath.Glob(k.raftlog() + ".damaged-*")
	if err != nil {
		k.t.Fatal(err)
	}
	return len(found)
}

// R3, B08: wherever a crash or an error stops the exchange of a log that must
// not be followed, the next start neither follows that log nor takes the new one
// for damaged, and the node's replicas come back under new ids.
func TestOldRaftLogIsNeverFollowedWhereverItsExchangeStops(t *testing.T) {
	cases := []struct {
		name  string
		crash func(k *logKit)
		aside int // logs kept aside after the next start
	}{
		{"found", func(k *logKit) { k.setBoots(2) }, 1},
		{"forgotten but still there", func(k *logKit) { k.setBoots(2); k.forget() }, 1},
		{"forgotten without any count", func(k *logKit) { k.setBoots(0); k.forget() }, 1},
		{"aside", func(k *logKit) { k.putAside() }, 1},
		{"aside and forgotten", func(k *logKit) { k.putAside(); k.forget() }, 1},
	}
	for step := range 4 {
		cases = append(cases, struct {
			name  string
			crash func(k *logKit)
			aside int
		}{fmt.Sprintf("new log, step %d", step), func(k *logKit) { k.putAside(); k.forget(); k.newLog(step) }, 1})
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			k := newLogKit(t)
			c.crash(k)
			n, err := k.open()
			if err != nil {
				t.Fatal(err)
			}
			defer k.close(n)
			if holdsGroups(n.log) {
				t.Error("the old log is followed")
			}
			id, err := openIdentity(k.dir, "n1", "mem")
			if err != nil {
				t.Fatal(err)
			}
			if !id.Rejoin || id.SystemGeneration < 2 || id.RaftLog != n.log.ID() || id.Boots <= logKitBoots {
				t.Errorf("the identity is %+v", id)
			}
			if got := k.asides(); got != c.aside {
				t.Errorf("%d logs were kept aside, want %d", got, c.aside)
			}
		})
	}
}

// A log that cannot be renamed, as that of a mount point, is refused with what to
// do, start after start, until it is gone.
func TestRaftLogThatCannotBeKeptAsideStopsTheNode(t *testing.T) {
	for _, cause := range []error{syscall.EBUSY, syscall.EIO} {
		t.Run(strings.ReplaceAll(cause.Error(), "/", " or "), func(t *testing.T) {
			k := newLogKit(t)
			k.setBoots(1)
			for range 3 {
				n := k.node()
				n.rename = func(string, string) error { return cause }
				err := n.openLog()
				if !errors.Is(err, base.ErrDamaged) || !strings.Contains(err.Error(), "mount point") {
					t.Fatalf("opening: %v", err)
				}
			}
			if id := k.node().mu.identity; id.Rejoin || id.RaftLog == "" {
				t.Fatalf("the identity has forgotten a log that is still there: %+v", id)
			}
			names, err := dirNames(k.raftlog())
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range names { // what the hint says
				if err := os.Remove(filepath.Join(k.raftlog(), f)); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Mkdir(filepath.Join(k.raftlog(), "lost+found"), 0o700); err != nil {
				t.Fatal(err)
			}
			n, err := k.open()
			if err != nil {
				t.Fatal(err)
			}
			defer k.close(n)
			if id := n.mu.identity; !id.Rejoin || id.SystemGeneration != 2 || holdsGroups(n.log) {
				t.Fatalf("after the log was taken away: %+v", id)
			}
		})
	}
}

// The log that a node was stopped with is followed, also when it counted a start
// that the identity has not.
func TestNewestRaftLogIsFollowed(t *testing.T) {
	for _, boots := range []uint64{logKitBoots, logKitBoots + 1} {
		k := newLogKit(t)
		k.setBoots(boots)
		n, err := k.open()
		if err != nil {
			t.Fatal(err)
		}
		if id := n.mu.identity; id.Rejoin || id.Boots != boots+1 || !holdsGroups(n.log) || k.asides() != 0 {
			t.Errorf("%d starts counted: %+v", boots, id)
		}
		k.close(n)
	}
}

// A log whose reads fail is neither damaged nor another's: nothing is put aside,
// and the error says that it is the disk (cmd/node ends with its code for that).
func TestUnreadableLogAtTheStartIsAFailureOfTheDisk(t *testing.T) {
	k := newLogKit(t)
	for _, kind := range []vfs.OpKind{vfs.OpRead, vfs.OpOpen, vfs.OpOpenRW, vfs.OpList} {
		met := false
		n := k.node()
		n.opts.Log.FS = vfs.Faulty(vfs.OS, func(op vfs.Op) vfs.Fault {
			if op.Kind == kind && strings.Contains(op.Path, "raftlog") {
				met = true
				return vfs.Fault{Err: syscall.EIO}
			}
			return vfs.Fault{}
		})
		err := n.openLog()
		if err == nil {
			k.close(n)
		}
		if met && !errors.Is(err, syscall.EIO) {
			t.Errorf("%s: %v", kind, err)
		}
		if !met && kind == vfs.OpRead {
			t.Error("the log was opened without a read")
		}
	}
	if aside, err := filepath.Glob(k.raftlog() + ".damaged*"); err != nil || len(aside) > 0 {
		t.Errorf("%v was put aside, %v", aside, err)
	}
	n, err := k.open()
	if err != nil {
		t.Fatal(err)
	}
	k.close(n)
}
