package raftlog

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/internal/vfs"
)

// Options tune a Log. The zero value is the documented default.
type Options struct {
	// FS is where the log lives; default the operating system.
	FS vfs.FS
	// SegmentBytes is the size at which a segment is sealed; default 64 MiB,
	// at most 1 GiB.
	SegmentBytes int64
	// CacheBytes bounds the memory for the newest entries of all groups
	// together; default 64 MiB. Negative: no cache.
	CacheBytes int
	// MaxBatchBytes bounds one write; a batch takes at least one call. Default
	// 8 MiB, at most 64 MiB.
	MaxBatchBytes int
	// PreallocateBytes is how far the newest segment is filled with zeros ahead of
	// its records; default 512 KiB, at most MaxPreallocateBytes. Negative: not
	// at all.
	PreallocateBytes int64
	// GarbageBytes is how far the files may exceed twice the live bytes before
	// the compactor rewrites; default four segments.
	GarbageBytes int64
	// MarkDelay is the idle time after which a mark record makes damage to the
	// last batch detectable; default 50 ms. Negative: only Close writes one.
	MarkDelay time.Duration
	// OnFailure is called once, on a goroutine of its own, when a write or an
	// fsync has failed and the log is dead.
	OnFailure func(error)
	// OnFull is called on the committer's goroutine at each try to write that a
	// full disk refused; the write waits and is tried again (RL11). It may make
	// room; it must not call the log.
	OnFull func()
	// FullRetry is the time between two tries on a full disk; default 200 ms.
	FullRetry time.Duration
	// OnCorrupt is called on the goroutine that found it, for each damaged
	// entry that a read meets. It must not block and not call the log.
	OnCorrupt func(group base.GroupID, err error)
	// Metrics receives observations; nil fields are skipped.
	Metrics Metrics

	// ident replaces the random identity of a new log; golden files need it.
	ident *logID
}

// MaxPreallocateBytes bounds Options.PreallocateBytes.
const MaxPreallocateBytes = 1 << 20

// EnsureDefaults fills what is zero.
func (o *Options) EnsureDefaults() {
	if o.FS == nil {
		o.FS = vfs.OS
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = failpoint.Int("raftlog.segment-bytes", 64<<20)
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = 64 << 20
	}
	if o.MaxBatchBytes == 0 {
		o.MaxBatchBytes = 8 << 20
	}
	if o.PreallocateBytes == 0 {
		o.PreallocateBytes = 512 << 10
	}
	if o.GarbageBytes == 0 {
		o.GarbageBytes = 4 * o.SegmentBytes
	}
	if o.MarkDelay == 0 {
		o.MarkDelay = 50 * time.Millisecond
	}
	if o.FullRetry == 0 {
		o.FullRetry = 200 * time.Millisecond
	}
}

// Validate returns all problems of options with their defaults filled.
func (o *Options) Validate() error {
	var errs []error
	if o.SegmentBytes < 4<<10 || o.SegmentBytes > 1<<30 {
		errs = append(errs, base.Invalid("SegmentBytes", "give 4 KiB to 1 GiB"))
	}
	if o.MaxBatchBytes < 0 || o.MaxBatchBytes > 64<<20 {
		errs = append(errs, base.Invalid("MaxBatchBytes", "give up to 64 MiB"))
	}
	if o.PreallocateBytes > MaxPreallocateBytes {
		errs = append(errs, base.Invalid("PreallocateBytes", "give up to 1 MiB"))
	}
	if o.GarbageBytes < 0 {
		errs = append(errs, base.Invalid("GarbageBytes", "give 0 or more"))
	}
	return errors.Join(errs...)
}

// Log is the one log of a node. Make it with Open; Close it when all raft
// instances on it are shut down.
type Log struct {
	dir   string
	opt   Options
	ident logID
	fresh bool
	lock  io.Closer

	cacheShare atomic.Int64 // cache budget of one group in bytes
	failure    atomic.Pointer[failure]

	// base and inflight serve OldestPendingSync: nanoseconds after base at
	// which the batch in flight began to be written, 0 if none is.
	base     time.Time
	inflight atomic.Int64

	queue  opQueue
	commit committer     // owned by the committer goroutine
	kick   chan struct{} // capacity 1: the compactor has something to look at
	stop   chan struct{} // closed by Close when the committer has ended
	// closing is closed by Close before that: no write waits for space any more.
	closing chan struct{}
	// running says that the committer runs; before, Open waits for nothing.
	running bool
	wg      sync.WaitGroup

	mu struct {
		sync.RWMutex
		groups   map[base.GroupID]*GroupLog
		segments []*segment // by number, contiguous; the last is active
	}
}

type failure struct{ err error }

// Open recovers the log in dir, making the directory if it is missing, and
// starts its goroutines. A damaged log is base.ErrCorrupt, with file and offset,
// a newer format base.ErrFormatVersion; nothing is changed then.
func Open(dir string, opt Options) (*Log, error) {
	opt.EnsureDefaults()
	if err := opt.Validate(); err != nil {
		return nil, fmt.Errorf("opening the raft log: %w", err)
	}
	if err := vfs.MkdirAllDurable(opt.FS, dir, 0o755); err != nil {
		return nil, fmt.Errorf("making the raft log directory %s: %w", dir, err)
	}
	lock, err := opt.FS.Lock(filepath.Join(dir, "LOCK"))
	if err != nil {
		return nil, fmt.Errorf("opening the raft log: %w", err)
	}
	l := &Log{
		dir: dir, opt: opt, lock: lock, base: time.Now(),
		kick: make(chan struct{}, 1), stop: make(chan struct{}), closing: make(chan struct{}),
	}
	l.mu.groups = map[base.GroupID]*GroupLog{}
	l.queue.wake = make(chan struct{}, 1)
	if err := l.recover(); err != nil {
		for _, s := range l.mu.segments {
			err = errors.Join(err, s.file.Close())
		}
		return nil, errors.Join(fmt.Errorf("recovering the raft log in %s: %w", dir, err), lock.Close())
	}
	l.resizeCaches()
	l.running = true
	l.wg.Add(2)
	go l.runCommitter()
	go l.runCompactor()
	return l, nil
}

// Close waits for the calls under way, makes the tail provable, and releases the
// directory. Later calls return base.ErrClosed. A hung disk hangs Close.
func (l *Log) Close() error {
	if !l.queue.close() {
		return nil
	}
	close(l.closing)
	l.wg.Wait()
	var errs []error
	l.mu.Lock()
	segments := l.mu.segments
	l.mu.segments = nil
	l.mu.Unlock()
	for _, s := range segments {
		errs = append(errs, s.release())
	}
	errs = append(errs, l.lock.Close())
	return errors.Join(errs...)
}

// ID is the random identity of the log, made when it was first opened, as 32
// hexadecimal digits. A caller that remembers it elsewhere can tell that the log
// was lost and made anew.
func (l *Log) ID() string { return l.ident.String() }

// Fresh says that this Open made the log: the directory held none.
func (l *Log) Fresh() bool { return l.fresh }

// Err is nil while the log works; else it wraps base.ErrDiskFailed and the cause.
func (l *Log) Err() error {
	if f := l.failure.Load(); f != nil {
		return f.err
	}
	return nil
}

// fail makes the log dead (RL4). Only the first cause counts.
func (l *Log) fail(doing string, cause error) error {
	f := &failure{err: fmt.Errorf("%s: %w: %w", doing, base.ErrDiskFailed, cause)}
	if !l.failure.CompareAndSwap(nil, f) {
		return l.Err()
	}
	if l.opt.OnFailure != nil {
		go l.opt.OnFailure(f.err)
	}
	return f.err
}

// withSpace does one step of writing, again and again while a full disk refuses
// it (RL11): what was not written was not promised, so it may wait; it counts as
// a write under way, whose age shows. Any other error is the end of the log.
func (l *Log) withSpace(doing string, step func() error) error {
	for {
		err := step()
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.ENOSPC) || !l.running {
			return l.fail(doing, err)
		}
		if l.opt.OnFull != nil {
			l.opt.OnFull()
		}
		select {
		case <-l.closing:
			return l.fail(doing, err)
		case <-time.After(l.opt.FullRetry):
		}
	}
}

// OldestPendingSync is the age of the write and fsync that is under way, 0 if
// none is. A node whose disk hangs sees it grow and falls silent.
func (l *Log) OldestPendingSync() time.Duration {
	at := l.inflight.Load()
	if at == 0 {
		return 0
	}
	return max(time.Since(l.base)-time.Duration(at), 1)
}

// Group returns the handle of a group, the same one each time. The group comes
// to be with its first write, under generation 0, or by CreateGroup.
func (l *Log) Group(id base.GroupID) *GroupLog {
	l.mu.RLock()
	g := l.mu.groups[id]
	l.mu.RUnlock()
	if g != nil {
		return g
	}
	l.mu.Lock()
	g = l.mu.groups[id]
	if g == nil {
		g = newGroupLog(l, id)
		l.mu.groups[id] = g
	}
	l.mu.Unlock()
	l.resizeCaches()
	return g
}

// allGroups lists the handles by id.
func (l *Log) allGroups() []*GroupLog {
	l.mu.RLock()
	groups := make([]*GroupLog, 0, len(l.mu.groups))
	for _, g := range l.mu.groups {
		groups = append(groups, g)
	}
	l.mu.RUnlock()
	sort.Slice(groups, func(i, j int) bool { return groups[i].id < groups[j].id })
	return groups
}

// resizeCaches shares the cache budget out to the groups.
func (l *Log) resizeCaches() {
	groups := l.allGroups()
	share := int64(max(l.opt.CacheBytes, 0) / max(len(groups), 1))
	l.cacheShare.Store(share)
	for _, g := range groups {
		g.trimCache(int(share))
	}
}

// GroupState describes one group of the log.
type GroupState struct {
	ID base.GroupID
	// Generation is what CreateGroup gave, else 0.
	Generation uint64
	// Tombstoned: the group was deleted and holds nothing.
	Tombstoned bool
	// First and Last are the indices of the entries held, 0 if none.
	First, Last uint64
	// Bytes is the encoded size of the entries held.
	Bytes uint64
}

// Groups lists all groups that the log knows durably, tombstones included, by id.
func (l *Log) Groups() []GroupState {
	var out []GroupState
	for _, g := range l.allGroups() {
		if st, ok := g.state(); ok {
			out = append(out, st)
		}
	}
	return out
}

// CreateGroup makes a group durably, empty, under a generation. It does nothing
// if the group exists under that generation. A tombstoned group comes back only
// under a higher one (R3); anything else is base.ErrConflict.
func (l *Log) CreateGroup(id base.GroupID, generation uint64) error {
	g := l.Group(id)
	failpoint.Hit("raftlog.create-group.begin")
	if err := l.do(newUint64Op(opCreate, g, recCreate, generation)); err != nil {
		return fmt.Errorf("creating generation %d of %s in the raft log: %w", generation, id, err)
	}
	return nil
}

// Tombstone deletes a group's entries and stable values and leaves a durable
// mark. Whoever writes to the group afterwards gets base.ErrNoSuchShard.
func (l *Log) Tombstone(id base.GroupID) error {
	g := l.Group(id)
	failpoint.Hit("raftlog.tombstone.begin")
	if err := l.do(newRecordOp(opTombstone, g, recTombstone, nil)); err != nil {
		return fmt.Errorf("deleting %s from the raft log: %w", id, err)
	}
	return nil
}

// SpaceStats is the space that the log takes.
type SpaceStats struct {
	Segments  int
	FileBytes int64 // of all segments
	LiveBytes int64 // of live entries
}

// Space says how much space the log takes.
func (l *Log) Space() SpaceStats {
	l.mu.RLock()
	defer l.mu.RUnlock()
	st := SpaceStats{Segments: len(l.mu.segments)}
	for _, s := range l.mu.segments {
		st.FileBytes += s.size.Load()
		st.LiveBytes += s.live.Load()
	}
	return st
}

// segmentByID finds a segment and takes a reference, or returns nil.
func (l *Log) segmentByID(id uint32) *segment {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if len(l.mu.segments) == 0 || id < l.mu.segments[0].id {
		return nil
	}
	k := id - l.mu.segments[0].id
	if int(k) >= len(l.mu.segments) {
		return nil
	}
	s := l.mu.segments[k]
	s.acquire()
	return s
}

func (l *Log) kickCompactor() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}
