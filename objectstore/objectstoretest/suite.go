// Package objectstoretest holds the tests that every store of objects passes.
//
// It must not know a concrete store.
//
// Concurrency: Run uses its stores from many goroutines where it tests that.
package objectstoretest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Options say how to test a store.
type Options struct {
	// Open returns an empty store; the suite closes it.
	Open func(t testing.TB) objectstore.Store
	// Sizes are sizes of objects round the store's own limits, beside the usual.
	Sizes []int64
	// FoldersStay says that puts and deletions beside one another may not take the
	// last object out of a folder: the service, not the store, is wrong about it.
	FoldersStay bool
}

// Run runs all tests on stores that o opens.
func Run(t *testing.T, o Options) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, s objectstore.Store)
	}{
		{"whole objects", func(t *testing.T, s objectstore.Store) { wholeObjects(t, s, o.Sizes) }},
		{"ranges", ranges},
		{"put if absent", putIfAbsent},
		{"one of many puts", func(t *testing.T, s objectstore.Store) { oneOfMany(t, s, o.FoldersStay) }},
		{"bodies that are not what they say", wrongBodies},
		{"keys", keys},
		{"order of a list", listOrder},
		{"more than a page", manyObjects},
		{"model", model},
		{"end of the context", contexts},
		{"closed", closed},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := o.Open(t)
			defer func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			}()
			test.run(t, s)
		})
	}
}

// Pattern returns n bytes that differ from place to place.
func Pattern(n int64) []byte {
	b := make([]byte, n)
	src := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)})
	_, _ = src.Read(b)
	return b
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wants(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

func read(s objectstore.Store, key string, offset, length int64) ([]byte, error) {
	r, err := s.Get(context.Background(), key, offset, length)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	return b, errors.Join(err, r.Close())
}

func list(s objectstore.Store, prefix, after string) (keys []string, err error) {
	for o, err := range s.List(context.Background(), prefix, after) {
		if err != nil {
			return keys, err
		}
		keys = append(keys, o.Key)
	}
	return keys, nil
}

// OS1, B51: sizes round the limits of parts and buffers come back as they were.
func wholeObjects(t *testing.T, s objectstore.Store, more []int64) {
	ctx := context.Background()
	sizes := []int64{0, 1, 4095, 4096, 4097, 128<<10 - 1, 128 << 10, 128<<10 + 1, 5<<20 - 1, 5 << 20, 5<<20 + 1}
	for i, n := range append(sizes, more...) {
		key := fmt.Sprintf("sizes/%d-%d", n, i)
		want := Pattern(n)
		began := time.Now()
		must(t, s.Put(ctx, key, objectstore.Bytes(want)))
		got, err := read(s, key, 0, -1)
		must(t, err)
		if !bytes.Equal(got, want) {
			t.Errorf("%s: other bytes came back", key)
		}
		o, err := s.Stat(ctx, key)
		must(t, err)
		if o.Key != key || o.Size != n {
			t.Errorf("%s is %+v", key, o)
		}
		// S3 tells whole seconds, and a store has its own clock.
		if d := o.Modified.Sub(began); d < -time.Minute || d > time.Minute {
			t.Errorf("%s was modified %v after its put", key, d)
		}
	}
}

func ranges(t *testing.T, s objectstore.Store) {
	body := Pattern(1000)
	must(t, s.Put(context.Background(), "r", objectstore.Bytes(body)))
	for _, c := range []struct {
		offset, length int64
		err            error
	}{
		{0, 1000, nil}, {0, -1, nil}, {0, 0, nil}, {1, 1, nil}, {999, 1, nil}, {500, -1, nil}, {1000, 0, nil}, {1000, -1, nil},
		{0, 1001, base.ErrCorrupt}, {999, 2, base.ErrCorrupt}, {1000, 1, base.ErrCorrupt}, {1001, -1, base.ErrCorrupt},
		{1001, 0, base.ErrCorrupt}, {1 << 62, 1 << 62, base.ErrCorrupt}, {-1, 1, base.ErrInvalid}, {0, -2, base.ErrInvalid},
	} {
		got, err := read(s, "r", c.offset, c.length)
		if !errors.Is(err, c.err) {
			t.Errorf("%d from %d: %v, want %v", c.length, c.offset, err, c.err)
			continue
		}
		if c.err != nil {
			continue
		}
		want := body[c.offset:]
		if c.length >= 0 {
			want = want[:c.length]
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%d from %d: other bytes", c.length, c.offset)
		}
	}
	// A reader that is closed half way leaves nothing behind.
	r, err := s.Get(context.Background(), "r", 0, -1)
	must(t, err)
	_, err = io.ReadFull(r, make([]byte, 10))
	must(t, errors.Join(err, r.Close()))
}

// OS2: B47.
func putIfAbsent(t *testing.T, s objectstore.Store) {
	ctx := context.Background()
	must(t, s.Put(ctx, "k", objectstore.Bytes([]byte("first"))))
	for _, again := range []string{"first", "second", ""} {
		wants(t, "putting "+again, s.Put(ctx, "k", objectstore.Bytes([]byte(again))), base.ErrConflict)
	}
	got, err := read(s, "k", 0, -1)
	must(t, err)
	if string(got) != "first" {
		t.Errorf("now %q", got)
	}
	must(t, s.Delete(ctx, "k", "never-there"))
	must(t, s.Delete(ctx, "k"))
	must(t, s.Delete(ctx))
	_, err = s.Stat(ctx, "k")
	wants(t, "stat after delete", err, base.ErrNotFound)
	_, err = read(s, "k", 0, -1)
	wants(t, "get after delete", err, base.ErrNotFound)
	must(t, s.Put(ctx, "k", objectstore.Bytes([]byte("again"))))
}

func oneOfMany(t *testing.T, s objectstore.Store, foldersStay bool) {
	for round := range 5 {
		key := fmt.Sprintf("race/%d", round)
		if foldersStay {
			must(t, s.Put(context.Background(), key+"-side/stays", objectstore.Bytes(nil)))
		}
		var wg sync.WaitGroup
		var won atomic.Int32
		for i := range 8 {
			wg.Go(func() {
				// Writers of one folder, which a deletion takes away again.
				side := fmt.Sprintf("race/%d-side/%d", round, i)
				if err := errors.Join(s.Put(context.Background(), side, objectstore.Bytes(nil)), s.Delete(context.Background(), side)); err != nil {
					t.Error(err)
				}
				err := s.Put(context.Background(), key, objectstore.Bytes(Pattern(int64(1000+i))))
				switch {
				case err == nil:
					won.Add(int32(100 + i))
				case !errors.Is(err, base.ErrConflict):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		winner := int64(won.Load() - 100)
		if winner < 0 || winner > 7 {
			t.Fatalf("not exactly one put won: %d", winner)
		}
		got, err := read(s, key, 0, -1)
		must(t, err)
		if !bytes.Equal(got, Pattern(1000+winner)) {
			t.Error("it holds another body than the winner's")
		}
	}
}

// OS1, B56: a source that shrinks, grows or changes is no object.
func wrongBodies(t *testing.T, s objectstore.Store) {
	ctx := context.Background()
	good := objectstore.Bytes(Pattern(300_000))
	for name, change := range map[string]func(*objectstore.Body){
		"shorter":    func(b *objectstore.Body) { b.Size++ },
		"longer":     func(b *objectstore.Body) { b.Size-- },
		"other hash": func(b *objectstore.Body) { b.SHA256[31] ^= 1 },
		"empty":      func(b *objectstore.Body) { b.Size = 0 },
	} {
		b := good
		change(&b)
		wants(t, name, s.Put(ctx, "wrong", b), base.ErrCorrupt)
		_, err := s.Stat(ctx, "wrong")
		wants(t, name+": stat", err, base.ErrNotFound)
	}
	wants(t, "no reader", s.Put(ctx, "wrong", objectstore.Body{Size: 1}), base.ErrInvalid)
	b := good
	b.Size = -1
	wants(t, "negative size", s.Put(ctx, "wrong", b), base.ErrInvalid)
	b = good
	broken := errors.New("the source broke")
	b.Reader = brokenReader{broken}
	wants(t, "broken source", s.Put(ctx, "wrong", b), broken)
	got, err := list(s, "", "")
	if err != nil || len(got) != 0 {
		t.Errorf("there is %v, %v", got, err)
	}
	if _, err := s.Sweep(ctx, "", time.Now().Add(time.Hour)); err != nil {
		t.Error(err)
	}
	must(t, s.Put(ctx, "wrong", good)) // the key is free
}

type brokenReader struct{ err error }

func (r brokenReader) ReadAt(p []byte, off int64) (int, error) {
	if n := 100_000 - off; n < int64(len(p)) {
		return int(max(n, 0)), r.err
	}
	return len(p), nil
}

// OS5
func keys(t *testing.T, s objectstore.Store) {
	ctx := context.Background()
	part := strings.Repeat("p", objectstore.MaxPartBytes)
	long := "folder/" + strings.Repeat(part+"/", 4)
	long += strings.Repeat("q", objectstore.MaxKeyBytes-len(long))
	for _, key := range []string{"a", "a-b/c_d/e.f", "0", "A..b", "-", part, long} {
		must(t, s.Put(ctx, key, objectstore.Bytes([]byte(key))))
		got, err := read(s, key, 0, -1)
		if err != nil || string(got) != key {
			t.Errorf("%q: %q, %v", key, got, err)
		}
	}
	for _, key := range []string{"", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/.b", ".uploads/x", "a b", "a\x00", "a\\b",
		"ä", "a%2f", "a?b", part + "p", long + "q", "a\n"} {
		_, err := s.Stat(ctx, key)
		wants(t, fmt.Sprintf("stat of %q", key), err, base.ErrInvalid)
		_, err = s.Get(ctx, key, 0, -1)
		wants(t, fmt.Sprintf("get of %q", key), err, base.ErrInvalid)
		wants(t, fmt.Sprintf("put of %q", key), s.Put(ctx, key, objectstore.Bytes(nil)), base.ErrInvalid)
		wants(t, fmt.Sprintf("delete of %q", key), s.Delete(ctx, "a", key), base.ErrInvalid)
	}
	for _, prefix := range []string{"/", "../", "a/../", ".up", "a//", "*"} {
		_, err := list(s, prefix, "")
		wants(t, fmt.Sprintf("list at %q", prefix), err, base.ErrInvalid)
		_, err = s.Sweep(ctx, prefix, time.Now())
		wants(t, fmt.Sprintf("sweep at %q", prefix), err, base.ErrInvalid)
	}
	if _, err := s.Stat(ctx, "a"); err != nil {
		t.Errorf("a refused deletion has deleted: %v", err)
	}
}

// OS4: the order is that of the keys' bytes, not of folders.
func listOrder(t *testing.T, s objectstore.Store) {
	all := []string{"a", "a-b", "a.b", "a0", "b-c/d", "b.c", "b/c", "b/c-d", "b/c.d/e", "b/c0", "b0/c", "c/d/e/f", "c/d/e0", "c/d0"}
	for _, i := range rand.Perm(len(all)) {
		must(t, s.Put(context.Background(), all[i], objectstore.Bytes([]byte{1})))
	}
	slices.Sort(all)
	for _, prefix := range []string{"", "a", "a-", "b", "b/", "b/c", "b/c-", "c/d/e", "c/d/e/", "nothing", "b/c.d/"} {
		for _, after := range append([]string{"", "0", "zzz", "b/", "b", "b/c.d/e/x"}, all...) {
			var want []string
			for _, k := range all {
				if strings.HasPrefix(k, prefix) && k > after {
					want = append(want, k)
				}
			}
			got, err := list(s, prefix, after)
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("prefix %q after %q: %v, %v; want %v", prefix, after, got, err, want)
			}
		}
	}
	n := 0
	for range s.List(context.Background(), "", "") {
		if n++; n == 3 {
			break
		}
	}
	if n != 3 {
		t.Errorf("stopped after %d", n)
	}
}

// B54: pages of 1,000 are the store's affair.
func manyObjects(t *testing.T, s objectstore.Store) {
	ctx := context.Background()
	var all []string
	for i := range 2001 {
		all = append(all, fmt.Sprintf("many/%05d", i))
	}
	var wg sync.WaitGroup
	for part := range slices.Chunk(all, 251) {
		wg.Go(func() {
			for _, k := range part {
				if err := s.Put(ctx, k, objectstore.Bytes([]byte(k))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	must(t, s.Put(ctx, "other", objectstore.Bytes(nil)))
	wg.Wait()
	for _, n := range []int{1, 999, 1001} { // 2,001, 2,000, then 1,001 are there
		got, err := list(s, "many/", "")
		if err != nil || !slices.Equal(got, all) {
			t.Fatalf("%d objects, %v; want %d", len(got), err, len(all))
		}
		if got, err := list(s, "many/", all[len(all)-2]); err != nil || len(got) != 1 {
			t.Fatalf("after the last but one: %v, %v", got, err)
		}
		must(t, s.Delete(ctx, all[:n]...))
		all = all[n:]
	}
	got, err := list(s, "", "")
	if err != nil || !slices.Equal(got, []string{"other"}) {
		t.Errorf("left: %v, %v", got, err)
	}
}

// A store does what a map does.
func model(t *testing.T, s objectstore.Store) {
	ctx := context.Background()
	round := 0
	rapid.Check(t, func(rt *rapid.T) {
		round++
		folder := fmt.Sprintf("m%d/", round)
		want := make(map[string]string)
		key := rapid.Custom(func(rt *rapid.T) string {
			return folder + rapid.SampledFrom([]string{"a", "b/c", "b/d", "b-c", "b.c/d", "e/f/g", "e/f/h"}).Draw(rt, "key")
		})
		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			k := key.Draw(rt, "key")
			old, has := want[k]
			switch rapid.SampledFrom([]string{"put", "get", "delete", "list"}).Draw(rt, "op") {
			case "put":
				v := rapid.StringN(0, 50, 200).Draw(rt, "value")
				err := s.Put(ctx, k, objectstore.Bytes([]byte(v)))
				if has != errors.Is(err, base.ErrConflict) || !has && err != nil {
					rt.Fatalf("put of %s, which is there: %v: %v", k, has, err)
				}
				if !has {
					want[k] = v
				}
			case "get":
				got, err := read(s, k, 0, -1)
				if has && (err != nil || string(got) != old) || !has && !errors.Is(err, base.ErrNotFound) {
					rt.Fatalf("get of %s: %q, %v; want %q, %v", k, got, err, old, has)
				}
			case "delete":
				if err := s.Delete(ctx, k); err != nil {
					rt.Fatal(err)
				}
				delete(want, k)
			case "list":
				var keys []string
				for k := range want {
					keys = append(keys, k)
				}
				slices.Sort(keys)
				got, err := list(s, folder, "")
				if err != nil || !slices.Equal(got, keys) {
					rt.Fatalf("list: %v, %v; want %v", got, err, keys)
				}
			}
		}
	})
}

func contexts(t *testing.T, s objectstore.Store) {
	ctx, cancel := context.WithCancel(context.Background())
	must(t, s.Put(ctx, "k", objectstore.Bytes([]byte("v"))))
	cancel()
	wants(t, "put", s.Put(ctx, "l", objectstore.Bytes([]byte("v"))), context.Canceled)
	_, err := s.Get(ctx, "k", 0, -1)
	wants(t, "get", err, context.Canceled)
	_, err = s.Stat(ctx, "k")
	wants(t, "stat", err, context.Canceled)
	for _, err := range s.List(ctx, "", "") {
		wants(t, "list", err, context.Canceled)
	}
	wants(t, "delete", s.Delete(ctx, "k"), context.Canceled)
	_, err = s.Sweep(ctx, "", time.Now())
	wants(t, "sweep", err, context.Canceled)
	// A put that is given up half way leaves no object.
	ctx, cancel = context.WithCancel(context.Background())
	b := objectstore.Bytes(Pattern(1 << 20))
	b.Reader = cancelReader{b.Reader, cancel}
	wants(t, "put that is given up", s.Put(ctx, "l", b), context.Canceled)
	got, err := list(s, "", "")
	if err != nil || !slices.Equal(got, []string{"k"}) {
		t.Errorf("there is %v, %v", got, err)
	}
}

// cancelReader gives its caller up at the first read.
type cancelReader struct {
	io.ReaderAt
	cancel func()
}

func (r cancelReader) ReadAt(p []byte, off int64) (int, error) {
	r.cancel()
	return r.ReaderAt.ReadAt(p, off)
}

func closed(t *testing.T, s objectstore.Store) {
	ctx := context.Background()
	must(t, s.Close())
	must(t, s.Close())
	wants(t, "put", s.Put(ctx, "l", objectstore.Bytes([]byte("v"))), base.ErrClosed)
	_, err := s.Get(ctx, "k", 0, -1)
	wants(t, "get", err, base.ErrClosed)
	_, err = s.Stat(ctx, "k")
	wants(t, "stat", err, base.ErrClosed)
	_, err = list(s, "", "")
	wants(t, "list", err, base.ErrClosed)
	wants(t, "delete", s.Delete(ctx, "k"), base.ErrClosed)
	_, err = s.Sweep(ctx, "", time.Now())
	wants(t, "sweep", err, base.ErrClosed)
}
