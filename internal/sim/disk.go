package sim

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/keelstate/keelstate/internal/vfs"
)

// disk holds the Raft log of one host. Its files outlive the host's process:
// each life begins with what the crash of the life before left.
type disk struct {
	mu    sync.Mutex // never held while waiting
	rng   *rand.Rand
	files *vfs.Mem
	life  *life
}

// life is the disk as one process sees it.
type life struct {
	d    *disk
	dead chan struct{} // closed by end

	// Guarded by d.mu.
	ended     bool
	slow      time.Duration // upper bound of a write's or fsync's delay
	hung      chan struct{} // writes and fsyncs wait for it; nil if not hung
	failing   int           // so many fsyncs from now fail
	countdown int           // of writes and fsyncs until the process dies; 0 = not armed
	struck    chan struct{} // closed when countdown struck
	failures  int           // fsyncs that failed
}

func newDisk(seed uint64) *disk {
	return &disk{rng: rand.New(rand.NewPCG(seed, 0xd15c)), files: vfs.NewMem()}
}

// begin starts the life of a process and returns its file system.
func (d *disk) begin() vfs.FS {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := &life{d: d, dead: make(chan struct{})}
	d.life = l
	return vfs.Faulty(d.files, l.fault)
}

// end kills the process: the files are those of a crash now. What the process
// still does to its own has no effect, but no error either: raft panics when it
// cannot store its term, and here that would be the end of the simulation.
func (d *disk) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.life == nil || d.life.ended {
		return
	}
	d.life.ended = true
	d.files = d.files.CrashClone(d.rng.Int64())
	close(d.life.dead) // what waits goes on, on files that nobody sees any more
	d.life.wake()
}

// lose removes everything. The process must have ended.
func (d *disk) lose() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files = vfs.NewMem()
}

// arm makes the process die within one of the next n writes and fsyncs, at the
// n-th; the channel is closed then.
func (d *disk) arm(n int) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.life.countdown, d.life.struck = n, make(chan struct{})
	return d.life.struck
}

// set changes how the disk of this life behaves.
func (d *disk) set(f func(l *life)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.life != nil {
		f(d.life)
	}
}

// hang makes writes and fsyncs wait until wake or end.
func (l *life) hang() {
	if l.hung == nil && !l.ended {
		l.hung = make(chan struct{})
	}
}

func (l *life) wake() {
	if l.hung != nil {
		close(l.hung)
		l.hung = nil
	}
}

// fault is the predicate of one life's file system.
func (l *life) fault(op vfs.Op) vfs.Fault {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	if l.ended {
		return vfs.Fault{}
	}
	changes := op.Kind == vfs.OpWrite || op.Kind == vfs.OpSync || op.Kind == vfs.OpSyncDir
	if !changes {
		return vfs.Fault{}
	}
	if l.countdown > 0 {
		if l.countdown--; l.countdown == 0 {
			close(l.struck)
			return vfs.Fault{Wait: l.dead} // for the end, which comes next
		}
	}
	var f vfs.Fault
	if l.slow > 0 {
		f.Delay = time.Duration(l.d.rng.Int64N(int64(l.slow)))
	}
	if l.hung != nil {
		f.Wait = l.hung
	}
	return f
}
