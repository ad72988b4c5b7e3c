package file

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// List implements objectstore.Store. It holds the names of one folder at each
// depth in memory. An object that is stored or deleted meanwhile may be in it or
// not.
func (s *Store) List(ctx context.Context, prefix, after string) iter.Seq2[objectstore.Object, error] {
	return func(yield func(objectstore.Object, error) bool) {
		err := s.enter(ctx)
		if err == nil {
			err = objectstore.CheckPrefix(prefix)
		}
		if err == nil {
			l := &lister{ctx: ctx, s: s, prefix: prefix, after: after, yield: yield}
			// The folder of the prefix holds all that can begin with it.
			_, err = l.folder(path.Dir(prefix + "x"))
		}
		if err != nil {
			yield(objectstore.Object{}, fmt.Errorf("listing objects at %q: %w", prefix, err))
		}
	}
}

type lister struct {
	ctx           context.Context
	s             *Store
	prefix, after string
	yield         func(objectstore.Object, error) bool
}

// folder lists what is in a folder; it says whether more is wanted.
func (l *lister) folder(folder string) (bool, error) {
	if err := l.ctx.Err(); err != nil {
		return false, err
	}
	entries, err := fs.ReadDir(l.s.root.FS(), folder)
	if err != nil {
		if err = absent("listing folder "+folder, err); errors.Is(err, base.ErrNotFound) {
			return true, nil // nothing there yet, or not any more
		}
		return false, err
	}
	// In the order of keys a folder stands where its name with a slash does.
	key := func(e fs.DirEntry) string {
		k := path.Join(folder, e.Name())
		if e.IsDir() {
			k += "/"
		}
		return k
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(key(a), key(b)) })
	for _, e := range entries {
		more, err := l.entry(e, key(e))
		if err != nil || !more {
			return false, err
		}
	}
	return true, nil
}

func (l *lister) entry(e fs.DirEntry, key string) (bool, error) {
	if hidden(e.Name()) {
		return true, nil
	}
	if e.IsDir() {
		// Keys below it may match if one text begins with the other; all are
		// passed already if they come before after and cannot begin like it.
		if !strings.HasPrefix(key, l.prefix) && !strings.HasPrefix(l.prefix, key) {
			return true, nil
		}
		if key < l.after && !strings.HasPrefix(l.after, key) {
			return true, nil
		}
		return l.folder(strings.TrimSuffix(key, "/"))
	}
	if !strings.HasPrefix(key, l.prefix) || key <= l.after || !e.Type().IsRegular() {
		return true, nil
	}
	info, err := e.Info()
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil // deleted meanwhile
	}
	if err != nil {
		return false, failed("looking at "+key, err)
	}
	return l.yield(objectstore.Object{Key: key, Size: info.Size(), Modified: info.ModTime()}, nil), nil
}
