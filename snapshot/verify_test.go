package snapshot_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/snapshot"
)

// twoShards stores a checkpoint of two shards; the second has files of the sample
// and one of its own.
func twoShards(t testing.TB, s objectstore.Store, number uint64) (*snapshot.Checkpoint, string) {
	t.Helper()
	cp := &snapshot.Checkpoint{ClusterID: cluster, Number: number, Incarnation: 2, FormatVersion: 1, M: 1024, Engine: "rocks"}
	for i, r := range []keygroup.Range{{Lo: 0, Hi: 600}, {Lo: 600, Hi: 1024}} {
		c := sampleContent()
		for name := range c { // nothing is shared
			c[name] = append([]byte{byte(i), byte(number)}, c[name]...)
		}
		m := c.manifest()
		m.Group, m.Range = base.GroupID(i+1), r
		u := mustUpload(t, c.write(t), m, uploadOptions(s, 10*number+uint64(i), nil))
		one := checkpointOf(number, m, u)
		cp.Shards = append(cp.Shards, one.Shards[0])
	}
	return cp, putCheckpoint(t, s, cp)
}

func verify(t testing.TB, s objectstore.Store, key string, full bool) (*snapshot.Verification, error) {
	t.Helper()
	return snapshot.VerifyCheckpoint(testCtx(t), s, key, snapshot.VerifyOptions{Full: full})
}

// expectBad demands that exactly one object is bad, with a fault of those given,
// and that the error names it (SN10).
func expectBad(t testing.TB, v *snapshot.Verification, err error, key string, faults ...snapshot.Fault) {
	t.Helper()
	if err == nil || !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), key) {
		t.Errorf("the error is %v", err)
	}
	if v == nil || len(v.Bad) != 1 || v.Bad[0].Key != key || !slices.Contains(faults, v.Bad[0].Fault) || v.Bad[0].Why == "" {
		t.Errorf("%+v, want %s to be %v", v, key, faults)
	}
}

// SN10: every object, damaged in every way, is named, and by the full look every
// damage is found; afterwards all is well again.
func TestVerifyNamesEveryBadObject(t *testing.T) {
	s := openStore(t)
	twoShards(t, s, 1)
	cp, meta := twoShards(t, s, 2)
	manifests := []string{cp.Shards[0].ManifestKey, cp.Shards[1].ManifestKey}
	read := append(slices.Clone(manifests), meta) // also by the quick look
	wanted, files := slices.Clone(read), map[string]int{}
	for i := range manifests {
		for _, f := range readManifest(t, s, manifests[i]).Files {
			if f.Object != "" {
				wanted = append(wanted, f.Object)
				files[f.Object]++
			}
		}
	}
	slices.Sort(wanted)
	wanted = slices.Compact(wanted)
	if len(wanted) != 7 { // a large file and a pack for each shard
		t.Fatalf("wanted are %v", wanted)
	}
	for _, key := range wanted {
		for _, how := range []struct {
			name   string
			change func(b []byte) []byte
			faults []snapshot.Fault
			full   bool // only the full look can see it, but for what is read anyway
		}{
			{"missing", nil, []snapshot.Fault{snapshot.FaultMissing}, false},
			{"empty", func([]byte) []byte { return nil }, []snapshot.Fault{snapshot.FaultShort, snapshot.FaultDamaged}, false},
			{"short", func(b []byte) []byte { return b[:len(b)-1] }, []snapshot.Fault{snapshot.FaultShort, snapshot.FaultDamaged}, false},
			{"long", func(b []byte) []byte { return append(b, 0) }, []snapshot.Fault{snapshot.FaultDamaged}, false},
			{"first bit", func(b []byte) []byte { b[0] ^= 1; return b }, []snapshot.Fault{snapshot.FaultDamaged}, true},
			{"last bit", func(b []byte) []byte { b[len(b)-1] ^= 0x80; return b }, []snapshot.Fault{snapshot.FaultDamaged}, true},
			{"zeros", func(b []byte) []byte { return make([]byte, len(b)) }, []snapshot.Fault{snapshot.FaultDamaged}, true},
		} {
			putBack := s.keep(t, key)
			if how.change == nil {
				if err := os.Remove(s.path(key)); err != nil {
					t.Fatal(err)
				}
			} else {
				s.change(t, key, how.change)
			}
			v, err := verify(t, s, meta, true)
			expectBad(t, v, err, key, how.faults...)
			v, err = verify(t, s, meta, false)
			switch {
			case err != nil:
				expectBad(t, v, err, key, how.faults...)
			case how.name == "long" && files[key] > 1: // a pack whose parts are all there
			case !how.full || slices.Contains(read, key):
				t.Errorf("%s %s passed the quick look", how.name, key)
			}
			putBack()
		}
	}
	for _, full := range []bool{false, true} {
		if v, err := verify(t, s, meta, full); err != nil || v.Objects != 7 || v.Files != 12 || len(v.Bad) != 0 {
			t.Errorf("in the end: %v %+v", err, v)
		}
	}
}

// All bad objects are named, not only the first.
func TestVerifyNamesAllBadObjects(t *testing.T) {
	s := openStore(t)
	_, meta := twoShards(t, s, 1)
	want := []string{}
	for _, key := range keysOf(t, s) {
		if key != meta && !slices.Contains(manifestKeys(t, s, meta), key) {
			want = append(want, key)
			s.change(t, key, func(b []byte) []byte { b[0] ^= 1; return b })
		}
	}
	v, err := verify(t, s, meta, true)
	var got []string
	for _, b := range v.Bad {
		got = append(got, b.Key)
		if !strings.Contains(err.Error(), b.Key) {
			t.Errorf("%s is not in %v", b.Key, err)
		}
	}
	if !slices.Equal(got, want) || len(want) != 4 {
		t.Errorf("bad are %v, want %v", got, want)
	}
	if err := s.Delete(context.Background(), want...); err != nil {
		t.Fatal(err)
	}
	if v, err := verify(t, s, meta, false); err == nil || len(v.Bad) != len(want) {
		t.Errorf("%v %+v", err, v)
	}
}

// However much is bad, the error stays short; the list has all.
func TestVerifyErrorIsBounded(t *testing.T) {
	v := &snapshot.Verification{}
	if err := v.Err(); err != nil {
		t.Error(err)
	}
	for i := range 100_000 {
		v.Bad = append(v.Bad, snapshot.BadObject{Key: snapshot.ObjectKey(cluster, sha256.Sum256([]byte{byte(i)}), uint64(i+1)), Fault: snapshot.FaultMissing, Why: "no such object"})
	}
	err := v.Err()
	if err == nil || len(err.Error()) > 16*kib || !strings.Contains(err.Error(), "100000 bad objects") || !strings.Contains(err.Error(), "and 99950 more") {
		t.Errorf("%.300v", err)
	}
}

func manifestKeys(t testing.TB, s objectstore.Store, meta string) (keys []string) {
	t.Helper()
	raw, err := objectstore.ReadAll(testCtx(t), s, meta, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	c, err := snapshot.DecodeCheckpoint(raw)
	if err != nil {
		t.Fatal(err)
	}
	for i := range c.Shards {
		keys = append(keys, c.Shards[i].ManifestKey)
	}
	return keys
}

// What is whole and right, but belongs to another checkpoint, shard or cluster, is
// foreign.
func TestVerifyRefusesForeignObjects(t *testing.T) {
	copyOf := func(c *snapshot.Checkpoint) *snapshot.Checkpoint {
		d := *c
		d.Shards = slices.Clone(c.Shards)
		return &d
	}
	put := func(t *testing.T, s objectstore.Store, key string, b []byte) {
		t.Helper()
		if err := s.Put(testCtx(t), key, objectstore.Bytes(b)); err != nil {
			t.Fatal(err)
		}
	}
	// manifestOf stores a changed manifest and lets the checkpoint name it.
	manifestOf := func(t *testing.T, s objectstore.Store, c *snapshot.Checkpoint, prefix string, change func(m *snapshot.Manifest)) string {
		t.Helper()
		m := readManifest(t, s, c.Shards[0].ManifestKey)
		change(m)
		raw := mustEncode(t, m)
		sh := &c.Shards[0]
		sh.ManifestSHA256, sh.ManifestSize = sha256.Sum256(raw), int64(len(raw))
		sh.ManifestKey = snapshot.ObjectKey(prefix, sh.ManifestSHA256, 99)
		put(t, s, sh.ManifestKey, raw)
		return sh.ManifestKey
	}
	const number = 5
	for name, spoil := range map[string]func(t *testing.T, s objectstore.Store, c *snapshot.Checkpoint) (bad string, faults []snapshot.Fault){
		"the other shard's manifest": func(t *testing.T, _ objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			a, b := &c.Shards[0], &c.Shards[1]
			a.ManifestKey, a.ManifestSHA256, a.ManifestSize, a.FullBytes = b.ManifestKey, b.ManifestSHA256, b.ManifestSize, b.FullBytes
			return b.ManifestKey, []snapshot.Fault{snapshot.FaultForeign}
		},
		"a manifest of another cluster": func(t *testing.T, s objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			return manifestOf(t, s, c, "another", func(*snapshot.Manifest) {}), []snapshot.Fault{snapshot.FaultForeign}
		},
		"a manifest under a name that is not ours": func(t *testing.T, _ objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			c.Shards[0].ManifestKey = cluster + "/some-manifest"
			return c.Shards[0].ManifestKey, []snapshot.Fault{snapshot.FaultForeign}
		},
		"another sum": func(t *testing.T, _ objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			c.Shards[0].ManifestSHA256[0] ^= 1
			return c.Shards[0].ManifestKey, []snapshot.Fault{snapshot.FaultForeign}
		},
		"another size": func(t *testing.T, _ objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			c.Shards[0].ManifestSize++
			return c.Shards[0].ManifestKey, []snapshot.Fault{snapshot.FaultShort}
		},
		"another index": func(t *testing.T, _ objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			c.Shards[0].Index++
			return c.Shards[0].ManifestKey, []snapshot.Fault{snapshot.FaultForeign}
		},
		"another birth": func(t *testing.T, _ objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			c.Shards[0].Birth++
			return c.Shards[0].ManifestKey, []snapshot.Fault{snapshot.FaultForeign}
		},
		"an older incarnation": func(t *testing.T, s objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			return manifestOf(t, s, c, cluster, func(m *snapshot.Manifest) { m.Incarnation-- }), []snapshot.Fault{snapshot.FaultForeign}
		},
		"another engine": func(t *testing.T, s objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			return manifestOf(t, s, c, cluster, func(m *snapshot.Manifest) { m.Engine = "mem" }), []snapshot.Fault{snapshot.FaultForeign}
		},
		"a file less than were counted": func(t *testing.T, s objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			return manifestOf(t, s, c, cluster, func(m *snapshot.Manifest) { m.Files = m.Files[1:] }), []snapshot.Fault{snapshot.FaultForeign}
		},
		"a file without a place": func(t *testing.T, s objectstore.Store, c *snapshot.Checkpoint) (string, []snapshot.Fault) {
			return manifestOf(t, s, c, cluster, func(m *snapshot.Manifest) { m.Files[0].Object = "" }), []snapshot.Fault{snapshot.FaultDamaged}
		},
		"a file in another cluster's object": func(t *testing.T, s objectstore.Store, c *snapshot.Checkpoint) (bad string, _ []snapshot.Fault) {
			manifestOf(t, s, c, cluster, func(m *snapshot.Manifest) {
				f := &m.Files[0]
				raw, err := objectstore.ReadAll(testCtx(t), s, f.Object, 1<<20)
				if err != nil {
					t.Fatal(err)
				}
				bad = snapshot.ObjectKey("another", sha256.Sum256(raw), 3)
				put(t, s, bad, raw)
				f.Object = bad
			})
			return bad, []snapshot.Fault{snapshot.FaultForeign}
		},
		"a file in an object that is not ours": func(t *testing.T, s objectstore.Store, c *snapshot.Checkpoint) (bad string, _ []snapshot.Fault) {
			bad = cluster + "/a-copy"
			manifestOf(t, s, c, cluster, func(m *snapshot.Manifest) { m.Files[0].Object = bad })
			return bad, []snapshot.Fault{snapshot.FaultForeign}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t)
			good, _ := twoShards(t, s, 1)
			c := copyOf(good)
			c.Number = number
			bad, faults := spoil(t, s, c)
			meta := putCheckpoint(t, s, c)
			for _, full := range []bool{false, true} {
				v, err := verify(t, s, meta, full)
				expectBad(t, v, err, bad, faults...)
			}
		})
	}
	// The metadata itself, of another number or cluster.
	s := openStore(t)
	c, _ := twoShards(t, s, 1)
	for _, key := range []string{snapshot.MetadataKey(cluster, 2), snapshot.MetadataKey("another", 1)} {
		put(t, s, key, mustEncodeCheckpoint(t, c))
		v, err := verify(t, s, key, true)
		if err == nil || len(v.Bad) == 0 || !slices.ContainsFunc(v.Bad, func(b snapshot.BadObject) bool { return b.Key == key && b.Fault == snapshot.FaultForeign }) {
			t.Errorf("%s: %v %+v", key, err, v)
		}
	}
	for _, key := range []string{"", "x", cluster + "/checkpoints/1/_metadata", c.Shards[0].ManifestKey} {
		if v, err := verify(t, s, key, true); v != nil || !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%q: %v %+v", key, err, v)
		}
	}
}

// A manifest that is whole in itself, but not the one that was stored, is damaged,
// whatever it says.
func TestVerifyRefusesAnotherManifestUnderTheName(t *testing.T) {
	s := openStore(t)
	c, meta := twoShards(t, s, 1)
	key := c.Shards[0].ManifestKey
	m := readManifest(t, s, key)
	m.Files[0].SHA256[0] ^= 1
	s.change(t, key, func([]byte) []byte { return mustEncode(t, m) })
	v, err := verify(t, s, meta, false)
	expectBad(t, v, err, key, snapshot.FaultDamaged)
}

// A place in the middle of a pack that holds another file's bytes is found by the
// full look, though the pack is right.
func TestVerifyLooksAtPartsOfPacks(t *testing.T) {
	s := openStore(t)
	c := content{"a.sst": []byte("aaaa"), "b.sst": []byte("bbbb"), "c.sst": []byte("cccc")}
	m := c.whole()
	u := mustUpload(t, c.write(t), m, uploadOptions(s, 1, nil))
	m.Files[1].Offset++
	raw := mustEncode(t, m)
	u.ManifestSHA256, u.ManifestSize = sha256.Sum256(raw), int64(len(raw))
	u.ManifestKey = snapshot.ObjectKey(cluster, u.ManifestSHA256, 2)
	if err := s.Put(testCtx(t), u.ManifestKey, objectstore.Bytes(raw)); err != nil {
		t.Fatal(err)
	}
	meta := putCheckpoint(t, s, checkpointOf(1, m, u))
	v, err := verify(t, s, meta, true)
	expectBad(t, v, err, m.Files[1].Object, snapshot.FaultDamaged)
	if !strings.Contains(err.Error(), "b.sst") {
		t.Error(err)
	}
}

// A fault on the way that goes is not the object's: a second look decides. One
// that stays is.
func TestVerifyLooksTwice(t *testing.T) {
	inner := openStore(t)
	_, meta := twoShards(t, inner, 1)
	for _, kind := range []fault.BodyKind{fault.BodyCut, fault.BodyFlip} {
		for at := 1; ; at++ {
			hook := &calls{at: at, on: []fault.Op{fault.OpGet}, fault: func() fault.Fault {
				return fault.Fault{Body: fault.Body{Kind: kind, At: 2}}
			}}
			v, err := verify(t, fault.Wrap(inner, hook.hook), meta, true)
			if err != nil {
				t.Fatalf("%s of body %d: %v %+v", kind, at, err, v)
			}
			if at > hook.n {
				break
			}
		}
		// The one that stays; each object in turn.
		for _, key := range keysOf(t, inner) {
			v, err := verify(t, fault.Wrap(inner, func(op fault.Op, k string) fault.Fault {
				if op == fault.OpGet && k == key {
					return fault.Fault{Body: fault.Body{Kind: kind, At: 2}}
				}
				return fault.Fault{}
			}), meta, true)
			expectBad(t, v, err, key, snapshot.FaultShort, snapshot.FaultDamaged)
		}
	}
}

// A store that does not answer makes no object bad, and no checkpoint good.
func TestVerifyWithoutAnAnswer(t *testing.T) {
	inner := openStore(t)
	_, meta := twoShards(t, inner, 1)
	for _, bad := range []fault.Fault{{Err: fault.Trouble("refused")}, {Body: fault.Body{Kind: fault.BodyBroken, At: 3}}} {
		for at := 1; ; at++ {
			hook := &calls{at: at, fault: func() fault.Fault { return bad }}
			v, err := verify(t, fault.Wrap(inner, hook.hook), meta, true)
			if at > hook.n {
				if err != nil {
					t.Fatal(err)
				}
				break
			}
			failed := hook.seen[at-1]
			if bad.Body.Kind != "" && !strings.HasPrefix(failed, "get") {
				continue
			}
			if !errors.Is(err, base.ErrObjectStore) || errors.Is(err, base.ErrCorrupt) || len(v.Bad) != 0 {
				t.Fatalf("%s failed: %v %+v", failed, err, v)
			}
		}
	}
	for at := 1; at <= 10; at++ {
		ctx, cancel := context.WithCancel(testCtx(t))
		hook := &calls{at: at, fault: func() fault.Fault { cancel(); return fault.Fault{} }}
		v, err := snapshot.VerifyCheckpoint(ctx, fault.Wrap(inner, hook.hook), meta, snapshot.VerifyOptions{Full: true})
		if !errors.Is(err, context.Canceled) || len(v.Bad) != 0 {
			t.Errorf("cancelled at call %d: %v %+v", at, err, v)
		}
		cancel()
	}
}

// A newer format is no damage.
func TestVerifyOfANewerFormat(t *testing.T) {
	s := openStore(t)
	c, meta := twoShards(t, s, 1)
	newer := func(b []byte) []byte { b[4] = 3; return reseal(b) }
	putBack := s.keep(t, meta)
	s.change(t, meta, newer)
	if v, err := verify(t, s, meta, true); !errors.Is(err, base.ErrFormatVersion) || errors.Is(err, base.ErrCorrupt) || v == nil {
		t.Error(err)
	}
	putBack()
	// A manifest that a newer build wrote, under its right name.
	raw, err := os.ReadFile(s.path(c.Shards[0].ManifestKey))
	if err != nil {
		t.Fatal(err)
	}
	raw = newer(bytes.Clone(raw))
	c.Number, c.Shards[0].ManifestSHA256 = 2, sha256.Sum256(raw)
	c.Shards[0].ManifestKey = snapshot.ObjectKey(cluster, c.Shards[0].ManifestSHA256, 77)
	if err := s.Put(testCtx(t), c.Shards[0].ManifestKey, objectstore.Bytes(raw)); err != nil {
		t.Fatal(err)
	}
	if _, err := verify(t, s, putCheckpoint(t, s, c), true); !errors.Is(err, base.ErrFormatVersion) || errors.Is(err, base.ErrCorrupt) {
		t.Error(err)
	}
}

// Progress counts every object once, up to all.
func TestVerifyProgress(t *testing.T) {
	s := openStore(t)
	_, meta := twoShards(t, s, 1)
	var told []string
	v, err := snapshot.VerifyCheckpoint(testCtx(t), s, meta, snapshot.VerifyOptions{Progress: func(done, all int) {
		told = append(told, fmt.Sprintf("%d/%d", done, all))
	}})
	if want := []string{"1/1", "2/3", "3/3", "4/7", "5/7", "6/7", "7/7"}; err != nil || !slices.Equal(told, want) {
		t.Errorf("%v: told %v, want %v", err, told, want)
	}
	if v.Bytes <= v.ReadBytes || v.ReadBytes == 0 || v.Full || v.Checkpoint == nil || v.Requests != 10 {
		t.Errorf("%+v", v)
	}
}
