package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/keelstate/keelstate/internal/failpoint"
)

// removedDir, in the data directory, has what nobody looks at any more, until it is
// removed: at once by name, in its own time by content.
const removedDir = "removed"

// removePace is how many bytes a second are given back to the file system. An fsync
// waits for the journal, and the journal for what it frees: a gigabyte at once was
// seen to hold up every other write of the disk for a second.
const removePace = 256 << 20

// remover removes directories beside everything else, one after another.
type remover struct {
	dir    string
	logger *slog.Logger
	// hurry says that room counts for more than who else writes.
	hurry func() bool
	// some has a token while there may be something to remove.
	some chan struct{}

	mu struct {
		sync.Mutex
		queue []string
		// next names what is put aside next; no two have one name.
		next uint64
	}
}

// newRemover finds in dir what an earlier process has not come to.
func newRemover(dir string, logger *slog.Logger, hurry func() bool) (*remover, error) {
	m := &remover{dir: dir, logger: logger, hurry: hurry, some: make(chan struct{}, 1)}
	names, err := dirNames(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("looking for what is to be removed: %w", err)
	}
	for _, name := range names {
		m.mu.queue = append(m.mu.queue, filepath.Join(dir, name))
		if n, err := strconv.ParseUint(name, 10, 64); err == nil && n >= m.mu.next {
			m.mu.next = n + 1
		}
	}
	if len(names) > 0 {
		m.some <- struct{}{}
	}
	return m, nil
}

// remove takes a directory away from its place and has it removed later. What
// cannot be put aside, on another volume say, is removed at once. It is not made durable that it is
// gone: whoever names it must be able to do without, and to remove it again.
func (m *remover) remove(path string) error {
	if err := os.MkdirAll(m.dir, 0o750); err != nil {
		return os.RemoveAll(path)
	}
	m.mu.Lock()
	aside := filepath.Join(m.dir, strconv.FormatUint(m.mu.next, 10))
	m.mu.next++
	m.mu.Unlock()
	switch err := os.Rename(path, aside); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return os.RemoveAll(path)
	}
	failpoint.Hit("cluster.remove.aside")
	m.mu.Lock()
	m.mu.queue = append(m.mu.queue, aside)
	m.mu.Unlock()
	select {
	case m.some <- struct{}{}:
	default:
	}
	return nil
}

// run removes what there is until ctx ends; what is left then is removed by the
// next process.
func (m *remover) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.some:
		}
		for path := m.take(); path != ""; path = m.take() {
			if err := m.removeSlowly(ctx, path); err != nil {
				m.logger.Warn("removing what is not used any more; it is tried again at the next start", "path", path, "error", err)
			}
			if ctx.Err() != nil {
				return
			}
		}
	}
}

// take returns what is to be removed next, "" if there is nothing.
func (m *remover) take() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.mu.queue) == 0 {
		return ""
	}
	path := m.mu.queue[0]
	m.mu.queue = m.mu.queue[1:]
	return path
}

// removeSlowly removes the files of a tree at the pace, then the tree.
func (m *remover) removeSlowly(ctx context.Context, root string) error {
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		freed, err := freedBy(e)
		if err == nil {
			err = os.Remove(path)
		}
		if err != nil {
			return err
		}
		return m.pause(ctx, freed)
	})
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(root)
}

// freedBy is how many bytes the file system gets back with a file: none with one of
// several hard links.
func freedBy(e fs.DirEntry) (int64, error) {
	info, err := e.Info()
	if err != nil {
		return 0, err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
		return 0, nil
	}
	return info.Size(), nil
}

// pause waits as long as the bytes that were removed take at the pace.
func (m *remover) pause(ctx context.Context, bytes int64) error {
	wait := time.Duration(float64(bytes) / removePace * float64(time.Second))
	if wait < time.Millisecond || m.hurry() {
		return ctx.Err()
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
