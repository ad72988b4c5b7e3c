package fault

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
)

func wrap(t testing.TB, hook Hook) *Store {
	t.Helper()
	f, err := file.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := Wrap(f, hook)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// OFT1
func TestWithoutFaultsItIsTheStore(t *testing.T) {
	objectstoretest.Run(t, objectstoretest.Options{Open: func(t testing.TB) objectstore.Store {
		return wrap(t, func(Op, string) Fault { return Fault{} })
	}})
}

// OFT2, B52: a body that is cut, breaks, stalls or lies is never taken for whole.
func TestBodies(t *testing.T) {
	var next Fault
	s := wrap(t, func(op Op, _ string) Fault {
		if op == OpGet {
			return next
		}
		return Fault{}
	})
	body := objectstoretest.Pattern(100_000)
	if err := s.Put(context.Background(), "k", objectstore.Bytes(body)); err != nil {
		t.Fatal(err)
	}
	get := func(ctx context.Context, length int64) ([]byte, error) {
		r, err := s.Get(ctx, "k", 0, length)
		if err != nil {
			return nil, err
		}
		b, err := io.ReadAll(r)
		return b, errors.Join(err, r.Close())
	}
	for _, at := range []int64{0, 1, 60_000, 99_999} {
		for _, length := range []int64{-1, 100_000} {
			next = Fault{Body: Body{Kind: BodyCut, At: at}}
			if b, err := get(context.Background(), length); !errors.Is(err, base.ErrCorrupt) || int64(len(b)) != at {
				t.Errorf("cut at %d: %d bytes, %v", at, len(b), err)
			}
			next.Body.Kind = BodyBroken
			if _, err := get(context.Background(), length); !errors.Is(err, base.ErrObjectStore) {
				t.Errorf("broken at %d: %v", at, err)
			}
			next.Body.Kind = BodyFlip
			if b, err := get(context.Background(), length); err != nil || bytes.Equal(b, body) || len(b) != len(body) {
				t.Errorf("flipped at %d: %d bytes, %v", at, len(b), err)
			}
			next.Body.Kind = BodyStall
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
			if _, err := get(ctx, length); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("stalled at %d: %v", at, err)
			}
			cancel()
		}
	}
	next = Fault{Body: Body{Kind: BodyStall, At: 5}}
	r, err := s.Get(context.Background(), "k", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(5*time.Millisecond, func() { _ = r.Close() })
	if _, err := io.ReadAll(r); !errors.Is(err, base.ErrClosed) {
		t.Errorf("a stalled body that is closed: %v", err)
	}
}

// OFT3: each call fails before or after its effect.
func TestCalls(t *testing.T) {
	var next Fault
	s := wrap(t, func(Op, string) Fault { f := next; next = Fault{}; return f })
	ctx := context.Background()
	trouble := Trouble("test")
	next = Fault{Err: trouble}
	if err := s.Put(ctx, "k", objectstore.Bytes(nil)); !errors.Is(err, base.ErrObjectStore) {
		t.Error(err)
	}
	if _, err := s.Stat(ctx, "k"); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("it was stored: %v", err)
	}
	next = Fault{After: trouble}
	if err := s.Put(ctx, "k", objectstore.Bytes(nil)); !errors.Is(err, trouble) {
		t.Error(err)
	}
	if _, err := s.Stat(ctx, "k"); err != nil {
		t.Errorf("it was not stored: %v", err)
	}
	for _, key := range []string{"l", "m", "n"} {
		if err := s.Put(ctx, key, objectstore.Bytes(nil)); err != nil {
			t.Fatal(err)
		}
	}
	next = Fault{Items: 2}
	n := 0
	var last error
	for _, err := range s.List(ctx, "", "") {
		n, last = n+1, err
	}
	if n != 3 || !errors.Is(last, base.ErrObjectStore) {
		t.Errorf("the list broke off after %d, with %v", n, last)
	}
	next = Fault{Items: 1}
	if err := s.Delete(ctx, "l", "m", "n"); !errors.Is(err, base.ErrObjectStore) {
		t.Error(err)
	}
	for key, there := range map[string]bool{"l": false, "m": true, "n": true} {
		if _, err := s.Stat(ctx, key); (err == nil) != there {
			t.Errorf("%s after half a deletion: %v", key, err)
		}
	}
	next = Fault{Delay: time.Hour}
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	if _, err := s.Stat(short, "k"); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}
