package objectstore_test

import (
	"context"
	"errors"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/objectstore/file"
)

// odd is a store that breaks one promise.
type odd struct {
	objectstore.Store
	replaces, otherBytes, emptyList, keeps bool
}

func (o odd) Put(ctx context.Context, key string, body objectstore.Body) error {
	err := o.Store.Put(ctx, key, body)
	if o.replaces && errors.Is(err, base.ErrConflict) {
		return nil
	}
	return err
}

func (o odd) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if o.otherBytes {
		return io.NopCloser(strings.NewReader("other bytes")), nil
	}
	return o.Store.Get(ctx, key, offset, length)
}

func (o odd) List(ctx context.Context, prefix, after string) iter.Seq2[objectstore.Object, error] {
	if o.emptyList {
		return func(func(objectstore.Object, error) bool) {}
	}
	return o.Store.List(ctx, prefix, after)
}

func (o odd) Delete(ctx context.Context, keys ...string) error {
	if o.keeps {
		return nil
	}
	return o.Store.Delete(ctx, keys...)
}

func left(t *testing.T, s objectstore.Store) (all []string) {
	t.Helper()
	for o, err := range s.List(context.Background(), "", "") {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, o.Key)
	}
	return all
}

func TestProbeFindsWhatAStoreBreaks(t *testing.T) {
	for _, c := range []struct {
		name string
		odd  odd
		want string
	}{
		{"all is well", odd{}, ""},
		{"it replaces", odd{replaces: true}, "If-None-Match"},
		{"other bytes", odd{otherBytes: true}, "other bytes"},
		{"empty list", odd{emptyList: true}, "list"},
		{"it keeps", odd{keeps: true}, "deleted"},
	} {
		f, err := file.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		c.odd.Store = f
		err = objectstore.Probe(context.Background(), c.odd)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		} else if !errors.Is(err, base.ErrObjectStore) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := left(t, f); (len(got) > 0) != c.odd.keeps {
			t.Errorf("%s: left %v", c.name, got)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Whatever a store refuses, the probe tells of it.
func TestProbeOfAStoreThatFails(t *testing.T) {
	for _, op := range []fault.Op{fault.OpPut, fault.OpGet, fault.OpStat, fault.OpList, fault.OpDelete} {
		f, err := file.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		s := fault.Wrap(f, func(o fault.Op, _ string) fault.Fault {
			if o == op {
				return fault.Fault{Err: fault.Trouble("down")}
			}
			return fault.Fault{}
		})
		if err := objectstore.Probe(context.Background(), s); !errors.Is(err, base.ErrObjectStore) {
			t.Errorf("%v: %v", op, err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// What killed probes left goes with a later one; what is young may be another
// node's, and what lies elsewhere is nobody's business here.
func TestProbeTidiesUp(t *testing.T) {
	dir := t.TempDir()
	f, err := file.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for key, age := range map[string]time.Duration{"old": 2 * time.Hour, "young": time.Minute, "../elsewhere": 1000 * time.Hour} {
		key = filepath.Join(objectstore.ProbePrefix, key)
		if err := f.Put(context.Background(), key, objectstore.Bytes(nil)); err != nil {
			t.Fatal(err)
		}
		then := time.Now().Add(-age)
		if err := os.Chtimes(filepath.Join(dir, key), then, then); err != nil {
			t.Fatal(err)
		}
	}
	if err := objectstore.Probe(context.Background(), f); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(left(t, f), " "); got != "elsewhere keelstate-probe/young" {
		t.Errorf("left: %s", got)
	}
}
