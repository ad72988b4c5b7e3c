package snapshot_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
	"github.com/keelstate/keelstate/objectstore/retry"
	"github.com/keelstate/keelstate/snapshot"
)

// fullSize has files of sizes round every limit of packing and of the stores'
// parts (B51).
func fullSize() content {
	const mib = 1 << 20
	c := content{"CURRENT": []byte("MANIFEST-000005\n"), "OPTIONS-000003": objectstoretest.Pattern(7000), "keelstate-engine": {}}
	for i, n := range []int64{1, 128*kib - 1, 128 * kib, 128*kib + 1, mib - 1, mib, mib + 1, 4*mib - 1, 4 * mib, 4*mib + 1,
		5*mib - 1, 5 * mib, 5*mib + 1, 16*mib - 1, 16 * mib, 16*mib + 1, 64 * mib} {
		c[fmt.Sprintf("%06d.sst", i)] = objectstoretest.Pattern(n)
	}
	return c
}

// moody fails calls at random: before or after the effect, slowly, and with bodies
// that are cut, break, or lie.
type moody struct {
	mu  sync.Mutex
	rnd *rand.Rand
}

func (m *moody) hook(op fault.Op, _ string) (f fault.Fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch m.rnd.IntN(24) {
	case 0:
		f.Err = fault.Trouble("refused")
	case 1, 2:
		f.After = fault.Trouble("the connection broke")
	case 3:
		f.Delay = time.Duration(m.rnd.IntN(3000)) * time.Microsecond
	case 4, 5:
		kinds := []fault.BodyKind{fault.BodyCut, fault.BodyBroken, fault.BodyFlip}
		f.Body = fault.Body{Kind: kinds[m.rnd.IntN(3)], At: m.rnd.Int64N(1 << m.rnd.IntN(26))}
	}
	if op != fault.OpGet {
		f.Body = fault.Body{}
	}
	return f
}

// A checkpoint of full size ends well in a store that fails all the time, in a
// bounded number of tries of the same attempt; so does its restore, which never
// gives a wrong file its name, and whatever is in the store has the bytes of its
// name.
func TestFullSizeOverAFailingStore(t *testing.T) {
	const tries = 60
	c := fullSize()
	dir := c.write(t)
	inner := openStore(t)
	sick := &moody{rnd: rand.New(rand.NewPCG(4, 51))}
	var store objectstore.Store = retry.Wrap(fault.Wrap(inner, sick.hook), retry.Options{Attempts: 3, First: time.Microsecond, Longest: time.Millisecond})
	reg := registry{}
	for attempt := uint64(1); attempt <= 2; attempt++ {
		m := c.whole()
		o := snapshot.UploadOptions{Store: store, Prefix: cluster, Attempt: attempt, Known: reg.known, CheckReused: true}
		u, err := snapshot.Upload(testCtx(t), dir, m, o)
		for n := 1; err != nil; n++ {
			// A body that is read to compare it may be cut or lie, twice: then the
			// object counts as another's, for this time.
			if n == tries || !errors.Is(err, base.ErrObjectStore) && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrConflict) {
				t.Fatalf("try %d: %v", n, err)
			}
			u, err = snapshot.Upload(testCtx(t), dir, m, o)
		}
		if attempt == 2 && (u.NewBytes != 0 || len(u.New) != 1) {
			t.Errorf("the second checkpoint stored %d bytes in %+v", u.NewBytes, u.New)
		}
		reg.add(u)
		checkNames(t, inner)
		key := putCheckpoint(t, inner, checkpointOf(attempt, m, u))
		if v, err := snapshot.VerifyCheckpoint(testCtx(t), inner, key, snapshot.VerifyOptions{Full: true}); err != nil || v.Files != len(c) {
			t.Errorf("%v %+v", err, v)
		}
		if attempt == 2 {
			break
		}
		out := filepath.Join(t.TempDir(), "restored")
		src := snapshot.StoreSource(store, m)
		err = snapshot.Fetch(testCtx(t), src, m, out, snapshot.FetchOptions{Parallel: 4})
		for n := 1; err != nil; n++ {
			if n == tries {
				t.Fatalf("try %d: %v", n, err)
			}
			err = snapshot.Fetch(testCtx(t), src, m, out, snapshot.FetchOptions{Parallel: 4})
		}
		c.checkDir(t, out)
	}
}
