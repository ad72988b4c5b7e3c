package rocks

import (
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/keelstate/keelstate/engine"
)

// B59: everything that reads a whole family, on every kind of memtable, before
// any flush.
func TestFullReadsOfAnUnflushedFamilyAreComplete(t *testing.T) {
	for _, use := range []engine.Use{engine.UseScanned, engine.UsePoint} {
		t.Run(fmt.Sprintf("use %d", use), func(t *testing.T) {
			d := newTestDriver(t, Options{})
			s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
			must(t, s.EnsureFamily(1, engine.FamilyOptions{Use: use, GroupWidth: 1}))
			var want []string
			for i := range 100 {
				k := fmt.Sprintf("%c%s", i%7, escaped(fmt.Sprintf("key%03d", i)))
				put(t, s, 1, k, "v")
				want = append(want, k+"=v")
			}
			slices.Sort(want)
			full := func(what string, r engine.Reader) {
				t.Helper()
				if got := collect(t, r, 1, nil, nil, engine.ScanOptions{}); !slices.Equal(got, want) {
					t.Errorf("%s: %d keys", what, len(got))
				}
			}
			full("scan", s)
			v, err := s.NewView()
			must(t, err)
			defer v.Close()
			put(t, s, 1, "\x09later", "v")
			full("view", v)
			var b engine.Batch
			b.Delete(1, []byte("\x09later"))
			must(t, s.Write(&b))
			to := filepath.Join(t.TempDir(), "c")
			must(t, s.Checkpoint(to))
			full("checkpoint", openTest(t, d, to))
		})
	}
}

// B59: a key never goes missing while others enter its bucket.
func TestReaderNeverMissesAKeyWhileItsBucketGrows(t *testing.T) {
	const rounds, added = 4, 10_000
	d := newTestDriver(t, Options{FamilyBufferBytes: 64 << 20, MemoryBytes: 256 << 20})
	s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
	for round := range rounds {
		f := engine.FamilyID(round + 1)
		must(t, s.EnsureFamily(f, engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: 1}))
		// One key, so one prefix and one bucket; the namespaces follow.
		bucket := "\x03" + escaped("k")
		k1 := []byte(bucket + "m")
		put(t, s, f, string(k1), "v")
		var done atomic.Bool
		var wg sync.WaitGroup
		var reads, missed atomic.Int64
		started := make(chan struct{})
		var once sync.Once
		wg.Go(func() {
			for !done.Load() {
				_, ok, err := s.Get(f, k1)
				vs, merr := s.MultiGet(f, [][]byte{k1})
				in := collectKeys(s, f, k1, append(slices.Clone(k1), 0))
				if err != nil || merr != nil || !ok || len(vs) != 1 || vs[0] == nil || in != 1 {
					missed.Add(1)
				}
				reads.Add(1)
				once.Do(func() { close(started) })
			}
		})
		<-started
		for i := range added {
			put(t, s, f, fmt.Sprintf("%s%c%05d", bucket, 'a'+i%26, i*7919%added), "w")
		}
		done.Store(true)
		wg.Wait()
		if missed.Load() > 0 || reads.Load() == 0 {
			t.Fatalf("round %d: missed %d of %d reads", round, missed.Load(), reads.Load())
		}
		must(t, s.DropFamily(f))
	}
}

func collectKeys(r engine.Reader, f engine.FamilyID, lo, hi []byte) int {
	it := r.Scan(f, lo, hi, engine.ScanOptions{KeysOnly: true})
	defer it.Close()
	n := 0
	for it.Next() {
		n++
	}
	return n
}
