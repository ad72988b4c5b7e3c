package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

// trees makes count directories below dir, each with a directory in it and two files of size bytes.
func trees(t *testing.T, dir string, count, size int) []string {
	t.Helper()
	var out []string
	for i := range count {
		tree := filepath.Join(dir, fmt.Sprintf("tree-%d", i))
		if err := os.MkdirAll(filepath.Join(tree, "files"), 0o750); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"a", filepath.Join("files", "b")} {
			path := filepath.Join(tree, name)
			if err := os.WriteFile(path, []byte("x"), 0o640); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(path, int64(size)); err != nil {
				t.Fatal(err)
			}
		}
		out = append(out, tree)
	}
	return out
}

func entries(t *testing.T, dir string) int {
	t.Helper()
	names, err := dirNames(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return len(names)
}

func newTestRemover(t *testing.T, dir string, hurry bool) *remover {
	t.Helper()
	m, err := newRemover(filepath.Join(dir, removedDir), slog.New(slog.DiscardHandler), func() bool { return hurry })
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// What is removed is gone from its place at once, under a name that nobody else has,
// and its content goes at the pace, or as fast as it can where room is short.
func TestRemoverTakesItsTime(t *testing.T) {
	const size, count = 32 << 20, 4 // sparse
	for _, hurry := range []bool{false, true} {
		t.Run(fmt.Sprintf("hurry=%t", hurry), func(t *testing.T) {
			dir := t.TempDir()
			all := trees(t, dir, count, size)
			synctest.Test(t, func(t *testing.T) {
				m := newTestRemover(t, dir, hurry)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				for _, tree := range all {
					if err := m.remove(tree); err != nil {
						t.Fatal(err)
					}
					if _, err := os.Lstat(tree); !os.IsNotExist(err) {
						t.Fatalf("%s is still there: %v", tree, err)
					}
				}
				if got := entries(t, m.dir); got != count {
					t.Fatalf("%d directories were put aside, want %d", got, count)
				}
				start := time.Now()
				go m.run(ctx)
				synctest.Wait()
				if hurry {
					if got := entries(t, m.dir); got != 0 {
						t.Fatalf("%d are left where room is short", got)
					}
					return
				}
				for entries(t, m.dir) > 0 {
					time.Sleep(10 * time.Millisecond)
					synctest.Wait()
				}
				due := time.Duration(2 * count * size * int(time.Second) / removePace)
				if took := time.Since(start); took < due-20*time.Millisecond || took > due+100*time.Millisecond {
					t.Errorf("%d bytes took %s, at the pace it is %s", 2*count*size, took, due)
				}
			})
		})
	}
}

// One of several links gives no room back, and is not waited for.
func TestRemoverDoesNotWaitForLinks(t *testing.T) {
	dir := t.TempDir()
	tree := trees(t, dir, 1, 64<<20)[0]
	for _, name := range []string{"a", filepath.Join("files", "b")} {
		if err := os.Link(filepath.Join(tree, name), filepath.Join(dir, filepath.Base(name))); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		m := newTestRemover(t, dir, false)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if err := m.remove(tree); err != nil {
			t.Fatal(err)
		}
		go m.run(ctx)
		synctest.Wait()
		if got := entries(t, m.dir); got != 0 {
			t.Errorf("%d are left; it waits for room that links do not give", got)
		}
	})
}

// What one process has put aside and not removed, or half removed, the next one
// removes, and gives no name of it to anything else meanwhile.
func TestRemoverGoesOnAfterARestart(t *testing.T) {
	dir := t.TempDir()
	all := trees(t, dir, 4, 1)
	first := newTestRemover(t, dir, false)
	for _, tree := range all[:3] {
		if err := first.remove(tree); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(filepath.Join(first.dir, "1", "a")); err != nil {
		t.Fatal(err)
	}
	second := newTestRemover(t, dir, false)
	if err := second.remove(all[3]); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, second.dir); got != 4 {
		t.Fatalf("%d are put aside, want 4", got)
	}
	synctest.Test(t, func(t *testing.T) {
		m := newTestRemover(t, dir, false)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go m.run(ctx)
		synctest.Wait()
		if got := entries(t, m.dir); got != 0 {
			t.Errorf("%d are left after the restart", got)
		}
	})
}

// What cannot be put aside is removed where it is, and what is not there is no error.
func TestRemoverWithoutAPlaceToPutThings(t *testing.T) {
	dir := t.TempDir()
	tree := trees(t, dir, 1, 1)[0]
	m := newTestRemover(t, dir, false)
	if err := m.remove(filepath.Join(dir, "nothing")); err != nil {
		t.Errorf("removing what is not there: %v", err)
	}
	if err := os.RemoveAll(m.dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(m.dir, nil, 0o640); err != nil {
		t.Fatal(err)
	}
	if err := m.remove(tree); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(tree); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", tree, err)
	}
}
