package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/s3server"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
	"github.com/keelstate/keelstate/objectstore/retry"
)

func TestMain(m *testing.M) {
	uploadIfAsked()
	goleak.VerifyTestMain(m)
}

func options(server *s3server.Server, prefix string) Options {
	return Options{
		Endpoint: server.Endpoint, Bucket: s3server.Bucket, Prefix: prefix, Insecure: true, Region: "us-east-1",
		AccessKey: s3server.AccessKey, SecretKey: s3server.SecretKey, PartBytes: minPartBytes,
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

func keys(t testing.TB, s objectstore.Store) []string {
	t.Helper()
	var all []string
	for o, err := range s.List(context.Background(), "", "") {
		must(t, err)
		all = append(all, o.Key)
	}
	return all
}

func read(s objectstore.Store, key string) ([]byte, error) {
	r, err := s.Get(context.Background(), key, 0, -1)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	return b, errors.Join(err, r.Close())
}

func sweep(t testing.TB, s objectstore.Store) int {
	t.Helper()
	// The gateway's clock is ours, but it tells whole seconds.
	n, err := s.Sweep(context.Background(), "", time.Now().Add(time.Minute))
	must(t, err)
	return n
}

// hinted says whether an error is one of the store's with such a hint.
func hinted(err error, hint string) bool {
	var detail *base.Error
	return errors.Is(err, base.ErrObjectStore) && errors.As(err, &detail) && strings.Contains(detail.Hint, hint)
}

// The store is wrapped as in a node. Of a put below a folder that another call's
// deletion is just removing the gateway may keep what it notes beside the bytes: it
// then refuses the key for good, for an object that is not there.
func TestConformance(t *testing.T) {
	server := s3server.Run(t)
	var n atomic.Int32
	objectstoretest.Run(t, objectstoretest.Options{
		Open: func(t testing.TB) objectstore.Store {
			s, err := Open(options(server, fmt.Sprintf("suite/%d", n.Add(1))))
			must(t, err)
			return retry.Wrap(s, retry.Options{First: 10 * time.Millisecond, Longest: 50 * time.Millisecond})
		},
		Sizes:       []int64{minPartBytes*2 - 1, minPartBytes * 2, minPartBytes*2 + 1},
		FoldersStay: true,
	})
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty.pem")
	must(t, os.WriteFile(empty, []byte("no certificate"), 0o600))
	good := Options{Endpoint: "127.0.0.1:1", Bucket: "bucket", AccessKey: "k", SecretKey: "wrong-secret", Insecure: true}
	for name, c := range map[string]struct {
		change func(*Options)
		hint   string
	}{
		"with a scheme":      {func(o *Options) { o.Endpoint = "http://x" }, "scheme"},
		"with a path":        {func(o *Options) { o.Endpoint = "x/y" }, "scheme"},
		"with a name":        {func(o *Options) { o.Endpoint = "me@x" }, "scheme"},
		"no bucket":          {func(o *Options) { o.Bucket = "" }, "letters"},
		"bucket with slash":  {func(o *Options) { o.Bucket = "a/../b" }, "letters"},
		"bucket of dots":     {func(o *Options) { o.Bucket = "a..b" }, "letters"},
		"an address":         {func(o *Options) { o.Bucket = "10.0.0.1" }, "letters"},
		"bad prefix":         {func(o *Options) { o.Prefix = "../x" }, "parts"},
		"prefix with slash":  {func(o *Options) { o.Prefix = "x/" }, "parts"},
		"half a key":         {func(o *Options) { o.SecretKey = "" }, "both"},
		"key, anonymous":     {func(o *Options) { o.Anonymous = true }, "anonymous"},
		"small parts":        {func(o *Options) { o.PartBytes = 1 }, "5 MiB"},
		"negative idle":      {func(o *Options) { o.Idle = -1 }, "more than 0"},
		"CA without TLS":     {func(o *Options) { o.CAFile = empty }, "TLS"},
		"CA is not there":    {func(o *Options) { o.CAFile, o.Insecure = "/nonexistent", false }, "/nonexistent"},
		"CA has none inside": {func(o *Options) { o.CAFile, o.Insecure = empty, false }, "no certificate"},
	} {
		o := good
		c.change(&o)
		s, err := Open(o)
		if err == nil {
			_ = s.Close()
		}
		var detail *base.Error
		if !errors.Is(err, base.ErrInvalid) || !errors.As(err, &detail) || !strings.Contains(detail.Hint, c.hint) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && strings.Contains(err.Error(), "wrong-secret") {
			t.Errorf("%s: the secret is in %v", name, err)
		}
	}
}

// What is wrong with a service is found by its use, and by Probe, with a hint.
func TestProbe(t *testing.T) {
	server := s3server.Run(t)
	good := options(server, "probed")
	must(t, objectstore.Probe(context.Background(), open(t, good)))
	if got := keys(t, open(t, good)); len(got) != 0 {
		t.Errorf("the probe left %v", got)
	}
	for name, c := range map[string]struct {
		change func(*Options)
		hint   string
	}{
		"another bucket": {func(o *Options) { o.Bucket = "not-there" }, "create bucket not-there"},
		"wrong secret":   {func(o *Options) { o.SecretKey = "wrong-secret" }, "credentials"},
		"wrong key":      {func(o *Options) { o.AccessKey = "nobody" }, "credentials"},
		"anonymous":      {func(o *Options) { o.Anonymous, o.AccessKey, o.SecretKey = true, "", "" }, "credentials"},
		"nobody there":   {func(o *Options) { o.Endpoint = "127.0.0.1:1" }, "127.0.0.1:1"},
		"TLS":            {func(o *Options) { o.Insecure = false }, server.Endpoint},
	} {
		o := good
		c.change(&o)
		s := open(t, o)
		err := objectstore.Probe(context.Background(), s)
		if !hinted(err, c.hint) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && (strings.Contains(err.Error(), s3server.SecretKey) || strings.Contains(err.Error(), "wrong-secret")) {
			t.Errorf("%s: the secret is in %v", name, err)
		}
		for _, err := range s.List(context.Background(), "", "") {
			if !errors.Is(err, base.ErrObjectStore) {
				t.Errorf("%s: a list: %v", name, err)
			}
		}
	}
}

func TestReadOnlyService(t *testing.T) {
	server := s3server.Run(t)
	s := open(t, options(server, "ro"))
	must(t, s.Put(context.Background(), "k", objectstore.Bytes([]byte("v"))))
	server.Stop()
	server.StartReadOnly()
	for name, err := range map[string]error{
		"probe":  objectstore.Probe(context.Background(), s),
		"put":    s.Put(context.Background(), "l", objectstore.Bytes([]byte("v"))),
		"parts":  s.Put(context.Background(), "l", objectstore.Bytes(objectstoretest.Pattern(minPartBytes+1))),
		"delete": s.Delete(context.Background(), "k"),
	} {
		if !errors.Is(err, base.ErrObjectStore) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got, err := read(s, "k"); err != nil || string(got) != "v" {
		t.Errorf("read %q, %v", got, err)
	}
}

// B54: 2,500 objects are three pages, and three batches of a deletion.
func TestManyPages(t *testing.T) {
	s := open(t, options(s3server.Run(t), ""))
	var want []string
	var wg sync.WaitGroup
	for part := range 10 {
		for i := range 250 {
			want = append(want, fmt.Sprintf("pages/%d/%03d", part, i))
		}
		wg.Go(func() {
			for i := range 250 {
				if err := s.Put(context.Background(), fmt.Sprintf("pages/%d/%03d", part, i), objectstore.Bytes([]byte{1})); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := keys(t, s); !slices.Equal(got, want) {
		t.Fatalf("%d objects, want %d", len(got), len(want))
	}
	must(t, s.Delete(context.Background(), append(want[1:], want[1:3]...)...)) // some twice
	if got := keys(t, s); !slices.Equal(got, want[:1]) {
		t.Errorf("left: %v", got)
	}
}

// at calls a function once, when the byte at an offset is read first.
type at struct {
	io.ReaderAt
	offset int64
	once   *sync.Once
	do     func()
}

func (a at) ReadAt(p []byte, off int64) (int, error) {
	if off <= a.offset && a.offset < off+int64(len(p)) {
		a.once.Do(a.do)
	}
	return a.ReaderAt.ReadAt(p, off)
}

// B56: the gateway dies in the middle of an upload in parts, and comes back.
func TestCrashOfTheServiceBetweenParts(t *testing.T) {
	server := s3server.Run(t)
	s := open(t, options(server, "crash"))
	b := objectstore.Bytes(objectstoretest.Pattern(3*minPartBytes + 17))
	source := b.Reader
	b.Reader = at{source, minPartBytes + 1, new(sync.Once), server.Stop}
	if err := s.Put(context.Background(), "k", b); !hinted(err, server.Endpoint) {
		t.Errorf("put while the service dies: %v", err)
	}
	server.Start()
	if got := keys(t, s); len(got) != 0 {
		t.Errorf("there is %v", got)
	}
	if n := sweep(t, s); n != 1 {
		t.Errorf("%d uploads were left, want the one that could not be aborted", n)
	}
	// With repeats, as a node has them, the call outlives the crash.
	b.Reader = at{source, minPartBytes + 1, new(sync.Once), func() { server.Stop(); server.Start() }}
	must(t, retry.Wrap(s, retry.Options{}).Put(context.Background(), "k", b))
	got, err := read(s, "k")
	must(t, err)
	if !bytes.Equal(got, objectstoretest.Pattern(b.Size)) {
		t.Error("other bytes came back")
	}
	sweep(t, s)
	if n := sweep(t, s); n != 0 {
		t.Errorf("%d uploads are still left", n)
	}
}

// OS1, OS6: whenever the gateway dies, an object is there whole or not at all.
func TestKillOfTheServiceDuringPuts(t *testing.T) {
	server := s3server.Run(t)
	s := open(t, options(server, "kill"))
	sizes := []int64{0, 10, 200_000, minPartBytes - 1, minPartBytes + 1, 2*minPartBytes + 1}
	told := make(map[string]bool)
	for round := range 6 {
		var mu sync.Mutex
		var wg sync.WaitGroup
		done := make(chan struct{}, len(sizes))
		for i, size := range sizes {
			wg.Go(func() {
				key := fmt.Sprintf("%d/%d", round, i)
				err := s.Put(context.Background(), key, objectstore.Bytes(objectstoretest.Pattern(size)))
				mu.Lock()
				defer mu.Unlock()
				told[key] = err == nil
				done <- struct{}{}
			})
		}
		for range round { // dies after none, one, two... have ended
			<-done
		}
		server.Stop()
		wg.Wait()
		server.Start()
	}
	stored := 0
	for round := range 6 {
		for i, size := range sizes {
			key := fmt.Sprintf("%d/%d", round, i)
			got, err := read(s, key)
			switch {
			case err == nil && bytes.Equal(got, objectstoretest.Pattern(size)):
				stored++
			case errors.Is(err, base.ErrNotFound) && !told[key]:
			default:
				t.Errorf("%s (put returned: %v): %d bytes of %d, %v", key, told[key], len(got), size, err)
			}
		}
	}
	t.Logf("%d of %d objects were stored", stored, 6*len(sizes))
	sweep(t, s)
	if n := sweep(t, s); n != 0 {
		t.Errorf("%d uploads are left", n)
	}
}
