//go:build linux

package faultfs

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Op is a kind of call that a rule can hit.
type Op string

// The kinds of calls. A rule without any hits all of them.
const (
	OpRead    Op = "read"
	OpWrite   Op = "write" // also truncate and fallocate
	OpSync    Op = "sync"  // fsync and fdatasync of a file
	OpSyncDir Op = "syncdir"
	OpOpen    Op = "open"
	OpCreate  Op = "create" // also mkdir
	OpRename  Op = "rename" // also link
	OpRemove  Op = "remove" // also rmdir
)

var allOps = []Op{OpRead, OpWrite, OpSync, OpSyncDir, OpOpen, OpCreate, OpRename, OpRemove}

// Rule is one fault. Exactly one of Errno, Delay, Stall, Lie and Flip is set.
type Rule struct {
	Ops []Op `json:"ops,omitempty"`
	// Path is a glob over the path below the mount, in which * also matches /.
	// Empty matches everything.
	Path string `json:"path,omitempty"`
	// Skip lets the first calls pass that would match; Count then hits only so
	// many, or all if it is 0.
	Skip  int `json:"skip,omitempty"`
	Count int `json:"count,omitempty"`

	// Errno is the name of the error to return, such as EIO or ENOSPC. A failed
	// sync also dooms what it should have made durable (FF4).
	Errno string `json:"errno,omitempty"`
	// Delay passes before the call is made.
	Delay time.Duration `json:"delay,omitempty"`
	// Stall holds the call until the rule is removed.
	Stall bool `json:"stall,omitempty"`
	// Lie makes a sync succeed without making anything durable.
	Lie bool `json:"lie,omitempty"`
	// Flip inverts one bit of what a read returns.
	Flip *Flip `json:"flip,omitempty"`
}

// Flip names a bit of a file: bit 0 to 7 of the byte at Offset.
type Flip struct {
	Offset int64 `json:"offset"`
	Bit    uint8 `json:"bit"`
}

// validate returns what is wrong with a rule and the error number it names.
func (r Rule) validate() (syscall.Errno, error) {
	kinds := 0
	for _, set := range []bool{r.Errno != "", r.Delay > 0, r.Stall, r.Lie, r.Flip != nil} {
		if set {
			kinds++
		}
	}
	if kinds != 1 {
		return 0, fmt.Errorf("a rule has exactly one fault, not %d", kinds)
	}
	for _, op := range r.Ops {
		if !slices.Contains(allOps, op) {
			return 0, fmt.Errorf("no operation is called %q", op)
		}
	}
	if r.Skip < 0 || r.Count < 0 {
		return 0, fmt.Errorf("skip %d and count %d must not be negative", r.Skip, r.Count)
	}
	if r.Flip != nil && (r.Flip.Bit > 7 || r.Flip.Offset < 0) {
		return 0, fmt.Errorf("no bit %d at %d", r.Flip.Bit, r.Flip.Offset)
	}
	if r.Errno == "" {
		return 0, nil
	}
	for e := syscall.Errno(1); e < 200; e++ {
		if unix.ErrnoName(e) == r.Errno {
			return e, nil
		}
	}
	return 0, fmt.Errorf("no error is called %q", r.Errno)
}

// matches applies the path's glob.
func (r Rule) matches(op Op, file string) bool {
	if len(r.Ops) > 0 && !slices.Contains(r.Ops, op) {
		return false
	}
	if r.Lie && op != OpSync && op != OpSyncDir || r.Flip != nil && op != OpRead {
		return false
	}
	return r.Path == "" || glob(r.Path, file)
}

// glob matches with * over anything; between the stars path.Match decides.
func glob(pattern, name string) bool {
	pattern, name = strings.ReplaceAll(pattern, "/", "\x00"), strings.ReplaceAll(name, "/", "\x00")
	ok, err := path.Match(pattern, name)
	return err == nil && ok
}

// active is a rule in force.
type active struct {
	Rule
	errno    syscall.Errno
	seen     int
	hits     int
	released chan struct{}
}

// rules are the faults of one mount.
type rules struct {
	// some is how many rules there are, so that a call without faults is cheap.
	some atomic.Int32
	// stalled is how many calls wait now.
	stalled atomic.Int32

	mu struct {
		sync.Mutex
		last  int
		list  map[int]*active
		abort chan struct{} // closed to end all stalls with an error
	}
}

func newRules() *rules {
	r := &rules{}
	r.mu.list = make(map[int]*active)
	r.mu.abort = make(chan struct{})
	return r
}

func (r *rules) add(rule Rule) (int, error) {
	errno, err := rule.validate()
	if err != nil {
		return 0, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.last++
	r.mu.list[r.mu.last] = &active{Rule: rule, errno: errno, released: make(chan struct{})}
	r.some.Store(int32(len(r.mu.list)))
	return r.mu.last, nil
}

// remove ends a rule and returns how many calls it hit. Removing it again does
// nothing.
func (r *rules) remove(id int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.mu.list[id]
	if a == nil {
		return 0
	}
	close(a.released)
	delete(r.mu.list, id)
	r.some.Store(int32(len(r.mu.list)))
	return a.hits
}

func (r *rules) clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, a := range r.mu.list {
		close(a.released)
		delete(r.mu.list, id)
	}
	r.some.Store(0)
}

func (r *rules) hits(id int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a := r.mu.list[id]; a != nil {
		return a.hits
	}
	return 0
}

// abortStalled ends the calls that are stalled or delayed now with EIO.
func (r *rules) abortStalled() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.mu.abort)
	r.mu.abort = make(chan struct{})
}

// effect is what the rules make of one call.
type effect struct {
	errno syscall.Errno
	lie   bool
	flips []Flip
}

// apply waits as the rules say and returns what else they want. It is called
// without any lock.
func (r *rules) apply(op Op, file func() string) effect {
	if r.some.Load() == 0 {
		return effect{}
	}
	var e effect
	delay, stalls, abort := r.decide(op, file(), &e)
	if delay == 0 && len(stalls) == 0 {
		return e
	}
	r.stalled.Add(1)
	defer r.stalled.Add(-1)
	if delay > 0 {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-abort:
			return effect{errno: syscall.EIO}
		}
	}
	for _, s := range stalls {
		select {
		case <-s:
		case <-abort:
			return effect{errno: syscall.EIO}
		}
	}
	return e
}

func (r *rules) decide(op Op, file string, e *effect) (time.Duration, []chan struct{}, chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var delay time.Duration
	var stalls []chan struct{}
	for id := 1; id <= r.mu.last; id++ {
		a := r.mu.list[id]
		if a == nil || !a.matches(op, file) {
			continue
		}
		if a.seen++; a.seen <= a.Skip || a.Count > 0 && a.hits >= a.Count {
			continue
		}
		a.hits++
		delay += a.Delay
		e.lie = e.lie || a.Lie
		if a.Stall {
			stalls = append(stalls, a.released)
		}
		if e.errno == 0 {
			e.errno = a.errno
		}
		if a.Flip != nil {
			e.flips = append(e.flips, *a.Flip)
		}
	}
	return delay, stalls, r.mu.abort
}
