package snapshot_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/s3server"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
	"github.com/keelstate/keelstate/objectstore/s3"
	"github.com/keelstate/keelstate/snapshot"
)

// The same over a real service that speaks S3, which goes away in the middle of
// an upload: the attempt, begun again, ends well, a second checkpoint stores what
// is new only, and both restore and verify.
func TestCheckpointsInARealService(t *testing.T) {
	server := s3server.Run(t)
	store, err := s3.Open(s3.Options{Endpoint: server.Endpoint, Bucket: s3server.Bucket, Prefix: "some/where", Insecure: true, Region: "us-east-1",
		AccessKey: s3server.AccessKey, SecretKey: s3server.SecretKey})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	}()
	const mib = 1 << 20
	c := sampleContent()
	for name, n := range map[string]int64{"000001.sst": mib, "000002.sst": 5*mib + 1, "000003.sst": 17 * mib, "000004.sst": 2 * mib} {
		c[name] = objectstoretest.Pattern(n)
	}
	reg := registry{}
	options := func(attempt uint64) snapshot.UploadOptions {
		return snapshot.UploadOptions{Store: store, Prefix: cluster, Attempt: attempt, Known: reg.known, Parallel: 1}
	}
	var once sync.Once
	o := options(1)
	puts := 0
	o.Store = fault.Wrap(store, func(op fault.Op, _ string) fault.Fault {
		if op == fault.OpPut {
			if puts++; puts == 3 {
				once.Do(server.Stop)
			}
		}
		return fault.Fault{}
	})
	if err := mustFail(t, testCtx(t), c.write(t), c.whole(), o); !errors.Is(err, base.ErrObjectStore) {
		t.Fatal(err)
	}
	server.Start()
	first := c.whole()
	u1 := mustUpload(t, c.write(t), first, options(1))
	reg.add(u1)
	next := content{}
	for name, b := range c {
		next[name] = b
	}
	next["000009.sst"] = objectstoretest.Pattern(3 * mib)
	delete(next, "000002.sst")
	second := next.whole()
	u2 := mustUpload(t, next.write(t), second, options(2))
	if u2.NewBytes != 3*mib || u2.NewFiles != 1 {
		t.Errorf("the second upload: %+v", u2)
	}
	c.checkDir(t, restore(t, store, u1.ManifestKey))
	next.checkDir(t, restore(t, store, u2.ManifestKey))
	for i, u := range []*snapshot.Uploaded{u1, u2} {
		key := putCheckpoint(t, store, checkpointOf(uint64(i+1), []*snapshot.Manifest{first, second}[i], u))
		if v, err := snapshot.VerifyCheckpoint(testCtx(t), store, key, snapshot.VerifyOptions{Full: true}); err != nil || v.Objects != 1+len(u.New)+len(u.Reused) {
			t.Errorf("%v %+v", err, v)
		}
	}
	gone := u1.New[0].Key
	if err := store.Delete(testCtx(t), gone); err != nil {
		t.Fatal(err)
	}
	v, err := snapshot.VerifyCheckpoint(testCtx(t), store, snapshot.MetadataKey(cluster, 1), snapshot.VerifyOptions{})
	expectBad(t, v, err, gone, snapshot.FaultMissing)
}
