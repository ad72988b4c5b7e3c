package snapshot_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/snapshot"
)

// What is uploaded comes back, and a second checkpoint uploads what is new only.
func TestUploadAndRestore(t *testing.T) {
	s, reg := openStore(t), registry{}
	first := sampleContent()
	m := first.whole()
	u := mustUpload(t, first.write(t), m, uploadOptions(s, 1, reg))
	reg.add(u)
	var all int64
	for _, b := range first {
		all += int64(len(b))
	}
	if u.FullBytes != all || u.NewBytes != all || u.Files != len(first) || u.NewFiles != len(first)-1 || len(u.Reused) != 0 || u.Requests != 3 {
		t.Errorf("the first upload: %+v", u)
	}
	var stored []string
	for _, o := range u.New {
		stored = append(stored, o.Key)
	}
	slices.Sort(stored)
	if have := keysOf(t, s); !slices.Equal(have, stored) {
		t.Errorf("the store has %v, the report says %v", have, stored)
	}
	if err := m.CheckPlaces(); err != nil {
		t.Error(err)
	}
	first.checkDir(t, restore(t, s, u.ManifestKey))

	second := sampleContent()
	second["000011.sst"] = bytes.Repeat([]byte("new"), 5000)
	second["CURRENT"] = []byte("MANIFEST-000012\n")
	delete(second, "000009.sst")
	m2 := second.whole()
	u2 := mustUpload(t, second.write(t), m2, uploadOptions(s, 2, reg))
	if u2.NewBytes != 15_000+16 || u2.NewFiles != 2 || len(u2.New) != 3 || len(u2.Reused) != 2 {
		t.Errorf("the second upload: %+v", u2)
	}
	second.checkDir(t, restore(t, s, u2.ManifestKey))
	first.checkDir(t, restore(t, s, u.ManifestKey))

	for i, up := range []*snapshot.Uploaded{u, u2} {
		c := checkpointOf(uint64(i+1), []*snapshot.Manifest{m, m2}[i], up)
		key := putCheckpoint(t, s, c)
		for _, full := range []bool{false, true} {
			v, err := snapshot.VerifyCheckpoint(testCtx(t), s, key, snapshot.VerifyOptions{Full: full})
			if err != nil || v.Objects != 1+len(up.New)+len(up.Reused) || v.Files != len(first) {
				t.Errorf("checkpoint %d, full %v: %v %+v", c.Number, full, err, v)
			}
		}
	}
}

// A pack that is byte for byte another new file is one object with it, is reported
// once, and gives all three files back.
func TestPackThatEqualsAnotherFile(t *testing.T) {
	s := openStore(t)
	c := content{"1.sst": []byte("aa"), "2.sst": []byte("a"), "3.sst": bytes.Repeat([]byte("a"), 3)}
	o := uploadOptions(s, 1, registry{})
	o.PackBelow = 3
	m := c.whole()
	u := mustUpload(t, c.write(t), m, o)
	if len(u.New) != 2 || len(u.New[0].Parts) != 2 || u.NewBytes != 6 {
		t.Errorf("stored %+v, want one object of two parts and the manifest", u)
	}
	c.checkDir(t, restore(t, s, u.ManifestKey))
}

// Small files are put together, and the rest of them is not left alone.
func TestSmallFilesArePacked(t *testing.T) {
	for _, c := range []struct {
		name        string
		sizes       []int
		below, goal int64
		objects     int
		want        []int // the objects' sizes, in any order
	}{
		{"nothing", nil, 10, 100, 0, nil},
		{"empty files only", []int{0, 0}, 10, 100, 0, nil},
		{"one small file", []int{3}, 10, 100, 0, []int{3}},
		{"the bound is open", []int{9, 10, 9, 11}, 10, 100, 0, []int{10, 11, 18}},
		{"a pack is closed at its target", []int{9, 9, 9, 9}, 10, 18, 0, []int{18, 18}},
		{"the rest joins the last pack", []int{9, 9, 9, 9, 9}, 10, 18, 0, []int{18, 27}},
		{"no packing", []int{9, 1, 50}, -1, 100, 0, []int{1, 9, 50}},
		{"no packing, but for the bound", []int{9, 1, 50}, -1, 10, 2, []int{10, 50}},
		{"the bound packs all", []int{9, 1, 50, 70}, 10, 10, 1, []int{130}},
		{"the bound is met", []int{10, 10, 10, 10, 10, 10, 10, 10}, 10, 10, 2, []int{40, 40}},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := content{}
			for i, n := range c.sizes {
				files[fmt.Sprintf("%06d.sst", i)] = bytes.Repeat([]byte{byte(i + 1)}, n)
			}
			s := openStore(t)
			o := snapshot.UploadOptions{Store: s, Prefix: cluster, Attempt: 1, PackBelow: c.below, PackTarget: c.goal, MaxObjects: c.objects}
			m := files.whole()
			u := mustUpload(t, files.write(t), m, o)
			var sizes []int
			for _, o := range u.New[:len(u.New)-1] {
				sizes = append(sizes, int(o.Size))
				var end int64
				for _, p := range o.Parts { // one after another, without gaps
					if p.Offset != end {
						t.Errorf("a part of %s begins at %d, want %d", o.Key, p.Offset, end)
					}
					end += p.Length
				}
				if end != o.Size {
					t.Errorf("the parts of %s end at %d of %d", o.Key, end, o.Size)
				}
			}
			slices.Sort(sizes)
			if !slices.Equal(sizes, c.want) {
				t.Errorf("objects of %v bytes, want %v", sizes, c.want)
			}
			if last := u.New[len(u.New)-1]; last.Key != u.ManifestKey || last.Size != u.ManifestSize || len(last.Parts) != 0 {
				t.Errorf("the last object is %+v, not the manifest", last)
			}
			files.checkDir(t, restore(t, s, u.ManifestKey))
		})
	}
}

// SN6: one content is stored once, under however many names.
func TestEqualFilesAreStoredOnce(t *testing.T) {
	files := content{"a.sst": []byte("same"), "b.sst": []byte("same"), "c.sst": bytes.Repeat([]byte("large"), kib),
		"d.sst": bytes.Repeat([]byte("large"), kib), "e.sst": {}, "f.sst": {}}
	s := openStore(t)
	m := files.whole()
	u := mustUpload(t, files.write(t), m, uploadOptions(s, 1, nil))
	if len(u.New) != 3 || u.NewBytes != 4+5*kib || u.FullBytes != 2*(4+5*kib) || u.NewFiles != 4 {
		t.Errorf("%+v", u)
	}
	files.checkDir(t, restore(t, s, u.ManifestKey))
}

// B47: a file name that is used again, with another content of the same size,
// means another object; a name says nothing.
func TestNamesSayNothingOfContent(t *testing.T) {
	s, reg := openStore(t), registry{}
	a, b := content{"000007.sst": []byte("before the rollback")}, content{"000007.sst": []byte("after the rollback ")}
	ua := mustUpload(t, a.write(t), a.whole(), uploadOptions(s, 1, reg))
	reg.add(ua)
	ub := mustUpload(t, b.write(t), b.whole(), uploadOptions(s, 2, reg))
	if ub.NewFiles != 1 || len(ub.Reused) != 0 {
		t.Errorf("another content was taken for known: %+v", ub)
	}
	// The same content again, which the registry does not know (its checkpoint
	// failed): another attempt, another key.
	uc := mustUpload(t, b.write(t), b.whole(), uploadOptions(s, 3, reg))
	if uc.New[0].Key == ub.New[0].Key {
		t.Errorf("two attempts used the key %s", uc.New[0].Key)
	}
	a.checkDir(t, restore(t, s, ua.ManifestKey))
	b.checkDir(t, restore(t, s, ub.ManifestKey))
	b.checkDir(t, restore(t, s, uc.ManifestKey))
}

// B51: a file that is not what the manifest says fails the upload, by name, and
// no object has bytes that its name does not say.
func TestUploadRefusesFilesThatChanged(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	writeFile(t, outside, []byte("small"))
	spoils := map[string]func(t *testing.T, path string){
		"a flipped bit": func(t *testing.T, path string) {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			b[len(b)/2] ^= 1
			writeFile(t, path, b)
		},
		"the last byte gone": func(t *testing.T, path string) {
			st, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(path, st.Size()-1); err != nil {
				t.Fatal(err)
			}
		},
		"a byte more": func(t *testing.T, path string) {
			f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.Write([]byte{0}); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		},
		"gone": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
		"a folder": func(t *testing.T, path string) {
			if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o750)); err != nil {
				t.Fatal(err)
			}
		},
		"a link out of the directory": func(t *testing.T, path string) {
			if err := errors.Join(os.Remove(path), os.Symlink(outside, path)); err != nil {
				t.Fatal(err)
			}
		},
	}
	for what, spoil := range spoils {
		for _, name := range []string{"000007.sst", "000009.sst", "CURRENT"} { // one of its own, two in a pack
			t.Run(what+" "+name, func(t *testing.T) {
				s, c := openStore(t), sampleContent()
				dir := c.write(t)
				spoil(t, filepath.Join(dir, name))
				err := mustFail(t, testCtx(t), dir, c.whole(), uploadOptions(s, 1, nil))
				if !strings.Contains(err.Error(), name) {
					t.Errorf("the error does not name the file: %v", err)
				}
				if strings.HasPrefix(what, "a flipped") || strings.HasSuffix(what, "gone") && what != "gone" || what == "a byte more" {
					if !errors.Is(err, base.ErrCorrupt) {
						t.Errorf("%v is not corrupt", err)
					}
				}
				checkNames(t, s)
			})
		}
	}
}

// B51: a file that changes while it is uploaded, after it was hashed for its pack
// and at every later moment, is never referenced.
func TestFilesThatChangeDuringAnUpload(t *testing.T) {
	for _, name := range []string{"000007.sst", "000009.sst"} {
		for how, spoil := range map[string]func(path string) error{
			"other bytes": func(path string) error {
				f, err := os.OpenFile(path, os.O_WRONLY, 0)
				if err != nil {
					return err
				}
				_, err = f.WriteAt([]byte("X"), 2)
				return errors.Join(err, f.Close())
			},
			"shorter": func(path string) error { return os.Truncate(path, 3) },
			"gone":    os.Remove,
		} {
			t.Run(name+" "+how, func(t *testing.T) {
				inner, c := openStore(t), sampleContent()
				dir := c.write(t)
				var once sync.Once
				s := fault.Wrap(inner, func(op fault.Op, _ string) fault.Fault {
					once.Do(func() {
						if err := spoil(filepath.Join(dir, name)); err != nil {
							t.Error(err)
						}
					})
					return fault.Fault{}
				})
				o := uploadOptions(s, 1, nil)
				o.Parallel = 1
				m := c.whole()
				// A file of its own that is gone may have been opened before: then
				// its bytes are right.
				u, err := snapshot.Upload(testCtx(t), dir, m, o)
				if err == nil {
					c.checkDir(t, restore(t, inner, u.ManifestKey))
					if how != "gone" || name != "000007.sst" {
						t.Error("the change was not seen")
					}
				}
				checkNames(t, inner)
			})
		}
	}
}

// A store that fails any one call, before or after its effect, makes the upload
// fail or succeed, but never report what is not there; and the same attempt can
// be begun again and ends well.
func TestUploadGoesOnAfterAnyFailure(t *testing.T) {
	c := sampleContent()
	dir := c.write(t)
	for _, when := range []string{"before", "after", "conflict"} {
		for at := 1; ; at++ {
			inner := openStore(t)
			hook := &calls{at: at, fault: func() fault.Fault {
				switch when {
				case "before":
					return fault.Fault{Err: fault.Trouble("refused")}
				case "conflict": // an earlier try of a client stored it
					return fault.Fault{After: fmt.Errorf("repeated: %w", base.ErrConflict)}
				}
				return fault.Fault{After: fault.Trouble("the connection broke")}
			}}
			o := uploadOptions(fault.Wrap(inner, hook.hook), 9, nil)
			m := c.whole()
			u, err := snapshot.Upload(testCtx(t), dir, m, o)
			if err == nil && (when == "before" && at <= hook.n) {
				t.Fatalf("call %d failed %s its effect, and the upload did not", at, when)
			}
			if err != nil {
				if when != "before" {
					t.Fatalf("call %d failed %s its effect, which could be seen: %v", at, when, err)
				}
				if !errors.Is(err, base.ErrObjectStore) {
					t.Fatal(err)
				}
				if err := m.CheckPlaces(); err == nil {
					t.Fatal("a failed upload filled the places")
				}
				if u, err = snapshot.Upload(testCtx(t), dir, m, o); err != nil {
					t.Fatalf("begun again: %v", err)
				}
			}
			c.checkDir(t, restore(t, inner, u.ManifestKey))
			if have := keysOf(t, inner); len(have) != len(u.New) {
				t.Fatalf("the store has %v, reported are %+v", have, u.New)
			}
			if at > hook.n {
				break
			}
		}
	}
}

// The same attempt, begun again by another process that knows nothing of the
// first, stores nothing twice and reports the same.
func TestUploadBegunAgainReportsTheSame(t *testing.T) {
	c := sampleContent()
	s := openStore(t)
	first := mustUpload(t, c.write(t), c.whole(), uploadOptions(s, 9, nil))
	again := mustUpload(t, c.write(t), c.whole(), uploadOptions(s, 9, nil))
	again.Requests = first.Requests
	if fmt.Sprintf("%+v", again) != fmt.Sprintf("%+v", first) {
		t.Errorf("%+v, want %+v", again, first)
	}
}

// B52: a body that is cut or lies while an object of an earlier try is compared is
// looked at again; one that stays so is not taken for the same.
func TestComparingLooksTwice(t *testing.T) {
	c := content{"a.sst": []byte("the file")}
	for _, kind := range []fault.BodyKind{fault.BodyCut, fault.BodyFlip} {
		inner := openStore(t)
		mustUpload(t, c.write(t), c.whole(), uploadOptions(inner, 1, nil))
		hook := &calls{at: 1, on: []fault.Op{fault.OpGet}, fault: func() fault.Fault { return fault.Fault{Body: fault.Body{Kind: kind, At: 3}} }}
		mustUpload(t, c.write(t), c.whole(), uploadOptions(fault.Wrap(inner, hook.hook), 1, nil))
		always := fault.Wrap(inner, func(fault.Op, string) fault.Fault { return fault.Fault{Body: fault.Body{Kind: kind, At: 3}} })
		if err := mustFail(t, testCtx(t), c.write(t), c.whole(), uploadOptions(always, 1, nil)); !errors.Is(err, base.ErrConflict) {
			t.Error(err)
		}
	}
}

// SN5: a key of ours under which something else lies is not taken for ours.
func TestAnotherObjectUnderOurKeyIsRefused(t *testing.T) {
	c := content{"a.sst": []byte("the file")}
	sum := sha256.Sum256(c["a.sst"])
	for _, other := range []string{"the filX", "short", "much longer than that", ""} {
		s := openStore(t)
		if err := s.Put(testCtx(t), snapshot.ObjectKey(cluster, sum, 1), objectstore.Bytes([]byte(other))); err != nil {
			t.Fatal(err)
		}
		if err := mustFail(t, testCtx(t), c.write(t), c.whole(), uploadOptions(s, 1, nil)); !errors.Is(err, base.ErrConflict) {
			t.Errorf("%q: %v", other, err)
		}
	}
}

// SN8: wherever the context ends, the upload ends with it, leaves no goroutine
// (TestMain looks) and reports nothing.
func TestUploadCancelledAnywhere(t *testing.T) {
	c := many(20, 3*kib)
	dir := c.write(t)
	for at := 1; ; at++ {
		inner := openStore(t)
		ctx, cancel := context.WithCancel(testCtx(t))
		hook := &calls{at: at, fault: func() fault.Fault { cancel(); return fault.Fault{} }}
		o := uploadOptions(fault.Wrap(inner, hook.hook), 1, nil)
		o.PackBelow, o.Parallel = kib, 3
		if at > 21 { // 20 files and the manifest
			mustUpload(t, dir, c.whole(), o)
			cancel()
			break
		}
		if err := mustFail(t, ctx, dir, c.whole(), o); !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled at call %d: %v", at, err)
		}
		checkNames(t, inner)
	}
}

// No more objects are uploaded at once than allowed, and as many as allowed.
func TestUploadParallelismIsBounded(t *testing.T) {
	const parallel = 3
	c := many(12, 100)
	var mu sync.Mutex
	now, most := 0, 0
	full := make(chan struct{}) // closed when so many run at once
	s := &gate{Store: openStore(t), enter: func() {
		mu.Lock()
		now++
		if most = max(most, now); now == parallel {
			select {
			case <-full:
			default:
				close(full)
			}
		}
		mu.Unlock()
		<-full
	}, leave: func() { mu.Lock(); now--; mu.Unlock() }}
	o := uploadOptions(s, 1, nil)
	o.PackBelow, o.Parallel = -1, parallel
	mustUpload(t, c.write(t), c.whole(), o)
	if most != parallel {
		t.Errorf("%d at once, want %d", most, parallel)
	}
}

// gate tells when a Put begins and ends.
type gate struct {
	objectstore.Store
	enter, leave func()
}

func (g *gate) Put(ctx context.Context, key string, b objectstore.Body) error {
	g.enter()
	defer g.leave()
	return g.Store.Put(ctx, key, b)
}

// Progress grows, and ends with all bytes, of which reused ones are there at once.
func TestUploadProgress(t *testing.T) {
	s, reg := openStore(t), registry{}
	c := sampleContent()
	for attempt := uint64(1); attempt <= 2; attempt++ {
		var told []int64
		o := uploadOptions(s, attempt, reg)
		o.Progress = func(n int64) { told = append(told, n) }
		u := mustUpload(t, c.write(t), c.whole(), o)
		reg.add(u)
		if !slices.IsSorted(told) || told[len(told)-1] != u.FullBytes || attempt == 2 && len(told) != 1 {
			t.Errorf("attempt %d: told %v of %d", attempt, told, u.FullBytes)
		}
	}
}

// A place that cannot be, or that belongs to others, is not known.
func TestPlacesThatCannotBeAreNotReused(t *testing.T) {
	c := content{"a.sst": []byte("the file")}
	sum := sha256.Sum256(c["a.sst"])
	good := snapshot.ObjectKey(cluster, sum, 1)
	for i, p := range []snapshot.Place{
		{}, {Object: "x", Length: 8}, {Object: "../x", Length: 8}, {Object: good, Length: 7}, {Object: good, Length: 8, Offset: -1},
		{Object: good, Length: 8, Offset: 1<<63 - 1}, {Object: snapshot.ObjectKey("another", sum, 1), Length: 8},
		{Object: snapshot.ObjectKey(cluster, sum, 5), Length: 8}, // this attempt's own: the report must have it
	} {
		o := uploadOptions(openStore(t), 5, registry{})
		o.Known = func([32]byte, int64) (snapshot.Place, bool) { return p, true }
		if u := mustUpload(t, c.write(t), c.whole(), o); u.NewFiles != 1 || len(u.Reused) != 0 {
			t.Errorf("case %d was reused: %+v", i, u)
		}
	}
}

// CheckReused heals: what the registry knows and the store has lost is stored
// again, and only that.
func TestLostObjectsAreStoredAgain(t *testing.T) {
	for how, lose := range map[string]func(s dirStore, key string) error{
		"gone":  func(s dirStore, key string) error { return s.Delete(context.Background(), key) },
		"short": func(s dirStore, key string) error { return os.Truncate(s.path(key), 100) },
	} {
		t.Run(how, func(t *testing.T) {
			s, reg, c := openStore(t), registry{}, sampleContent()
			u := mustUpload(t, c.write(t), c.whole(), uploadOptions(s, 1, reg))
			reg.add(u)
			large := reg[sha256.Sum256(c["000007.sst"])].Object
			if err := lose(s, large); err != nil {
				t.Fatal(err)
			}
			o := uploadOptions(s, 2, reg)
			o.CheckReused = true
			again := mustUpload(t, c.write(t), c.whole(), o)
			if again.NewFiles != 1 || len(again.Reused) != 1 || slices.Contains(again.Reused, large) {
				t.Errorf("%+v", again)
			}
			c.checkDir(t, restore(t, s, again.ManifestKey))
		})
	}
	// A store that does not answer is no store that has lost something.
	s, reg, c := openStore(t), registry{}, sampleContent()
	reg.add(mustUpload(t, c.write(t), c.whole(), uploadOptions(s, 1, reg)))
	o := uploadOptions(fault.Wrap(s, func(op fault.Op, _ string) fault.Fault {
		if op == fault.OpStat {
			return fault.Fault{Err: fault.Trouble("refused")}
		}
		return fault.Fault{}
	}), 2, reg)
	o.CheckReused = true
	if err := mustFail(t, testCtx(t), c.write(t), c.whole(), o); !errors.Is(err, base.ErrObjectStore) {
		t.Error(err)
	}
}

func TestUploadRefusesWhatCannotBe(t *testing.T) {
	s, c := openStore(t), sampleContent()
	dir := c.write(t)
	for field, spoil := range map[string]func(m *snapshot.Manifest, o *snapshot.UploadOptions){
		"store":   func(_ *snapshot.Manifest, o *snapshot.UploadOptions) { o.Store = nil },
		"attempt": func(_ *snapshot.Manifest, o *snapshot.UploadOptions) { o.Attempt = 0 },
		"prefix":  func(_ *snapshot.Manifest, o *snapshot.UploadOptions) { o.Prefix = "a/b" },
		"files":   func(m *snapshot.Manifest, _ *snapshot.UploadOptions) { m.Files[0].Name = "../x" },
		"range":   func(m *snapshot.Manifest, _ *snapshot.UploadOptions) { m.M = 0 },
	} {
		m, o := c.whole(), uploadOptions(s, 1, nil)
		spoil(m, &o)
		var e *base.Error
		if err := mustFail(t, testCtx(t), dir, m, o); !errors.Is(err, base.ErrInvalid) || !errors.As(err, &e) || e.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	if err := mustFail(t, testCtx(t), filepath.Join(dir, "nothing"), c.whole(), uploadOptions(s, 1, nil)); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if have := keysOf(t, s); len(have) != 0 {
		t.Errorf("the store has %v", have)
	}
}

var mostFiles = flag.Int("files", 10_000, "files of TestUploadOfManyFiles; a manifest can have 100,000")

// Many files become few objects and come back.
func TestUploadOfManyFiles(t *testing.T) {
	n := *mostFiles
	c := many(n, 40)
	s := openStore(t)
	m := c.whole()
	dir := c.write(t)
	o := uploadOptions(s, 1, nil)
	o.PackTarget = 64 * kib
	u := mustUpload(t, dir, m, o)
	if len(u.New) > n*40/(64*kib)+n/4096+2 || u.NewFiles != n || u.NewBytes != int64(40*n) {
		t.Errorf("%d objects, %d files, %d bytes", len(u.New), u.NewFiles, u.NewBytes)
	}
	key := putCheckpoint(t, s, checkpointOf(1, m, u))
	if v, err := snapshot.VerifyCheckpoint(testCtx(t), s, key, snapshot.VerifyOptions{Full: true}); err != nil || v.Files != n {
		t.Errorf("%v %+v", err, v)
	}
	for _, i := range []int{0, n / 3, n - 1} {
		f := &readManifest(t, s, u.ManifestKey).Files[i]
		r, err := s.Get(testCtx(t), f.Object, f.Offset, f.Length)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if _, err := b.ReadFrom(r); err != nil || !bytes.Equal(b.Bytes(), c[f.Name]) {
			t.Errorf("file %s: %v", f.Name, err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
	// Files too large to be packed are packed where there would be too many
	// objects.
	o = uploadOptions(openStore(t), 1, nil)
	o.PackBelow, o.MaxObjects = -1, 100
	u = mustUpload(t, dir, c.whole(), o)
	if len(u.New) > 101 {
		t.Errorf("%d objects", len(u.New))
	}
	for _, o := range u.New {
		if len(o.Parts) > 4096 {
			t.Errorf("%s holds %d files", o.Key, len(o.Parts))
		}
	}
	// However few objects are wanted, none holds more files than the registry takes.
	o = uploadOptions(openStore(t), 1, nil)
	o.MaxObjects, o.PackTarget = 1, 1<<40
	u = mustUpload(t, dir, c.whole(), o)
	if want := (n+4095)/4096 + 1; len(u.New) != want {
		t.Errorf("%d objects, want %d", len(u.New), want)
	}
}

// Random checkpoints, one after another: each restores to its own files, new
// bytes are exactly those of contents that were not known, and what is reported is
// what the store has.
func TestCheckpointsProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s, reg := openStore(t), registry{}
		// Few names and contents, so that they meet again.
		sizes := []int{0, 1, 5, 4*kib - 1, 4 * kib, 4*kib + 1, 20 * kib}
		names := rapid.SampledFrom([]string{"1.sst", "2.sst", "3.sst", "4.blob", "CURRENT", "MANIFEST", "OPTIONS"})
		contents := rapid.Custom(func(rt *rapid.T) []byte {
			return bytes.Repeat([]byte{byte(rapid.IntRange(0, 3).Draw(rt, "letter"))}, rapid.SampledFrom(sizes).Draw(rt, "size"))
		})
		type taken struct {
			files content
			m     *snapshot.Manifest
			u     *snapshot.Uploaded
		}
		var all []taken
		stored := map[string]bool{}
		for attempt := range rapid.Uint64Range(1, 5).Draw(rt, "checkpoints") {
			c := content(rapid.MapOf(names, contents).Draw(rt, "files"))
			o := uploadOptions(s, attempt+1, reg)
			o.CheckReused = rapid.Bool().Draw(rt, "check")
			o.MaxObjects = rapid.IntRange(1, 5).Draw(rt, "objects")
			fresh := map[string]bool{}
			var want int64
			for _, b := range c {
				if _, known := reg.known(sha256.Sum256(b), int64(len(b))); !known && !fresh[string(b)] {
					want += int64(len(b))
					fresh[string(b)] = true
				}
			}
			m := c.whole()
			u := mustUpload(t, c.write(t), m, o)
			if u.NewBytes != want || u.FullBytes != m.Bytes() || len(u.New)-1 > o.MaxObjects {
				rt.Fatalf("%d new bytes, want %d: %+v", u.NewBytes, want, u)
			}
			for _, n := range u.New {
				if stored[n.Key] {
					rt.Fatalf("key %s was stored twice", n.Key)
				}
				stored[n.Key] = true
			}
			for _, k := range u.Reused {
				if !stored[k] {
					rt.Fatalf("key %s is reused and was never reported", k)
				}
			}
			if rapid.Bool().Draw(rt, "completed") { // a failed one is not registered
				reg.add(u)
			}
			all = append(all, taken{c, m, u})
		}
		for i, k := range all {
			k.files.checkDir(t, restore(t, s, k.u.ManifestKey))
			key := putCheckpoint(t, s, checkpointOf(uint64(i+1), k.m, k.u))
			if _, err := snapshot.VerifyCheckpoint(testCtx(t), s, key, snapshot.VerifyOptions{Full: true}); err != nil {
				rt.Fatal(err)
			}
		}
		for _, key := range keysOf(t, s) {
			if _, _, ok := snapshot.ParseMetadataKey(key); !ok && !stored[key] {
				rt.Fatalf("object %s was never reported", key)
			}
		}
	})
}
