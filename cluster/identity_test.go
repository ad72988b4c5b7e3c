package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

func fullIdentity() *Identity {
	return &Identity{
		Version: 1, Node: "n1", Disk: "00112233445566778899aabbccddeeff", Engine: "rocks", Cluster: "ffeeddccbbaa99887766554433221100",
		SystemGeneration: 2, RaftLog: "0123456789abcdef0123456789abcdef", Boots: 17, Rejoin: true,
		Replicas: map[base.GroupID]uint64{1: 1, 2: 3}, Founding: &FoundSpec{
			Nodes: []FoundNode{{ID: "n1", RaftAddr: "host1:7411"}, {ID: "n2", RaftAddr: "host2:7411"}}, KeyGroups: 128, Shards: 4, Replication: 2},
	}
}

func savedIdentity(t testing.TB, id *Identity) (dir string, raw []byte) {
	t.Helper()
	dir = t.TempDir()
	if err := id.save(dir); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "IDENTITY"))
	if err != nil {
		t.Fatal(err)
	}
	return dir, raw
}

// versioned demands that another version under a right checksum is told from
// damage. field is the checked part of the file.
func versioned(t *testing.T, raw []byte, field string, parse func([]byte) error) {
	t.Helper()
	var f map[string]json.RawMessage
	if err := json.Unmarshal(raw, &f); err != nil {
		t.Fatal(err)
	}
	body := bytes.Replace(f[field], []byte(`"version":1`), []byte(`"version":2`), 1)
	if bytes.Equal(body, f[field]) {
		t.Fatalf("no version in %s", body)
	}
	sum, err := json.Marshal(crc32.Checksum(body, castagnoli))
	if err != nil {
		t.Fatal(err)
	}
	f[field], f["crc32c"] = body, sum
	b, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := parse(b); !errors.Is(err, base.ErrFormatVersion) || errors.Is(err, base.ErrCorrupt) {
		t.Errorf("version 2: %v", err)
	}
}

func TestIdentityFormat(t *testing.T) {
	for name, id := range map[string]*Identity{"IDENTITY-full.json": fullIdentity(),
		"IDENTITY-new.json": {Version: 1, Node: "n1", Disk: "00112233445566778899aabbccddeeff", Engine: "mem"}} {
		dir, raw := savedIdentity(t, id)
		golden(t, name, raw)
		back, err := openIdentity(dir, id.Node, id.Engine)
		if err != nil || !reflect.DeepEqual(back, id) {
			t.Fatalf("%s: %+v, %v", name, back, err)
		}
		damaged(t, raw, parseIdentity, func(got *Identity) bool { return reflect.DeepEqual(got, id) })
		versioned(t, raw, "identity", func(b []byte) error { _, err := parseIdentity(b); return err })
	}
}

// A directory that belongs to another node or engine, or that has data and no
// identity, is refused with what to do; a damaged file is never replaced.
func TestIdentityRefusesWhatIsNotThisNodes(t *testing.T) {
	id := fullIdentity()
	dir, raw := savedIdentity(t, id)
	if _, err := openIdentity(dir, "n2", "rocks"); !errors.Is(err, base.ErrIdentity) || !strings.Contains(err.Error(), "n1") {
		t.Errorf("another node: %v", err)
	}
	if _, err := openIdentity(dir, "n1", "mem"); !errors.Is(err, base.ErrIdentity) || !strings.Contains(err.Error(), "rocks") {
		t.Errorf("another engine: %v", err)
	}
	data := t.TempDir()
	if err := os.Mkdir(filepath.Join(data, "raftlog"), 0o750); err != nil {
		t.Fatal(err)
	}
	if _, err := openIdentity(data, "n1", "mem"); !errors.Is(err, base.ErrIdentity) || !strings.Contains(err.Error(), "raftlog") {
		t.Errorf("data without identity: %v", err)
	}
	fresh := t.TempDir()
	for _, n := range []string{"LOCK", "IDENTITY.tmp123"} { // a crash before the first rename
		if err := os.WriteFile(filepath.Join(fresh, n), nil, 0o640); err != nil {
			t.Fatal(err)
		}
	}
	a, err := openIdentity(fresh, "n1", "mem")
	if err != nil || len(a.Disk) != 32 || a.Cluster != "" {
		t.Fatalf("a new directory: %+v, %v", a, err)
	}
	if b, err := openIdentity(fresh, "n1", "mem"); err != nil || b.Disk != a.Disk {
		t.Errorf("opened again: %+v, %v", b, err)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "IDENTITY"), raw[:len(raw)/2], 0o640), os.Remove(filepath.Join(dir, identityCopy))); err != nil {
		t.Fatal(err)
	}
	if _, err := openIdentity(dir, "n1", "rocks"); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("half a file: %v", err)
	}
	if now, err := os.ReadFile(filepath.Join(dir, "IDENTITY")); err != nil || !bytes.Equal(now, raw[:len(raw)/2]) {
		t.Error("the damaged file was changed")
	}
}

// A node comes back by itself from a damaged identity: the file is made whole
// from its copy, whichever bit is wrong; both damaged is the end, and said.
func TestDamagedIdentityComesBackFromItsCopy(t *testing.T) {
	t.Parallel()
	id := fullIdentity()
	dir, raw := savedIdentity(t, id)
	file, spare := filepath.Join(dir, "IDENTITY"), filepath.Join(dir, identityCopy)
	for i := range raw {
		bad := bytes.Clone(raw)
		bad[i] ^= 1 << (i % 8)
		if err := os.WriteFile(file, bad, 0o640); err != nil {
			t.Fatal(err)
		}
		got, err := openIdentity(dir, "n1", "rocks")
		if errors.Is(err, base.ErrFormatVersion) {
			continue // a checksum that fits by chance would be needed
		}
		if err != nil || !reflect.DeepEqual(got, id) {
			t.Fatalf("byte %d: %+v, %v", i, got, err)
		}
		// A bit that JSON does not look at is no damage.
		if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, raw) && !bytes.Equal(now, bad) {
			t.Fatalf("byte %d: the file is %q, %v", i, now, err)
		}
		if err := os.WriteFile(spare, bad, 0o640); err != nil {
			t.Fatal(err)
		}
		if got, err := openIdentity(dir, "n1", "rocks"); err != nil || !reflect.DeepEqual(got, id) {
			t.Fatalf("byte %d of the copy: %+v, %v", i, got, err)
		}
		if err := id.save(dir); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{file, spare} {
		if err := os.WriteFile(path, raw[:len(raw)/2], 0o640); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := openIdentity(dir, "n1", "rocks"); !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), "its copy too") {
		t.Errorf("both damaged: %v", err)
	}
}

func FuzzIdentity(f *testing.F) {
	_, raw := savedIdentity(f, fullIdentity())
	f.Add(raw)
	f.Add([]byte(`{"identity":{},"crc32c":0}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		id, err := parseIdentity(b)
		if err == nil && (id.Node == "" || id.Disk == "" || id.Version != identityVersion) {
			t.Fatalf("took %+v", id)
		}
		if err != nil && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
			t.Fatalf("%v is neither damage nor a version", err)
		}
		// The same past the checksum.
		sealed, err := json.Marshal(identityFile{Identity: b, CRC32C: crc32.Checksum(b, castagnoli)})
		if err != nil {
			return
		}
		if _, err := parseIdentity(sealed); err != nil && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
			t.Fatalf("%v is neither damage nor a version", err)
		}
	})
}

func FuzzSnapshotMeta(f *testing.F) {
	f.Add(goldenMeta(f))
	f.Fuzz(func(t *testing.T, b []byte) {
		check := func(b []byte) {
			m, err := parseSnapMeta(b)
			if err == nil && m.Raft == nil {
				t.Fatal("took a META without Raft's part")
			}
			if err != nil && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatalf("%v is neither damage nor a version", err)
			}
		}
		check(b)
		if sealed, err := json.Marshal(snapMetaFile{Meta: b, CRC32C: crc32.Checksum(b, castagnoli)}); err == nil {
			check(sealed)
		}
	})
}

// PEERS holds hints only: it survives a restart, and a damaged one, or one of
// another version, costs nothing but its hints.
func TestPeersAreHints(t *testing.T) {
	dir := t.TempDir()
	open := func() *addressBook {
		t.Helper()
		b := &addressBook{}
		if err := b.open(dir); err != nil {
			t.Fatal(err)
		}
		return b
	}
	b := open()
	if len(b.all()) != 0 {
		t.Fatalf("a new book has %v", b.all())
	}
	peers := map[base.NodeID]string{"n2": "host2:7411", "n3": "host3:7411"}
	if err := b.learn(peers); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "PEERS")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "PEERS.json", raw)
	if got := open().all(); !reflect.DeepEqual(got, peers) {
		t.Fatalf("after a restart: %v", got)
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.learn(map[base.NodeID]string{"n2": "host2:7411"}); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("nothing new was written: %v", err)
	}
	for n := range raw {
		if err := os.WriteFile(path, raw[:n], 0o640); err != nil {
			t.Fatal(err)
		}
		if got := open().all(); len(got) != 0 {
			t.Fatalf("a file cut to %d bytes gave %v", n, got)
		}
	}
	if err := os.WriteFile(path, bytes.Replace(raw, []byte(`"version":1`), []byte(`"version":2`), 1), 0o640); err != nil {
		t.Fatal(err)
	}
	b = open()
	if len(b.all()) != 0 {
		t.Errorf("another version gave %v", b.all())
	}
	if err := b.learn(map[base.NodeID]string{"n4": "host4:7411"}); err != nil {
		t.Fatal(err)
	}
	if a, ok := open().get("n4"); !ok || a != "host4:7411" {
		t.Errorf("after damage the book learns: %q, %v", a, ok)
	}
}

// writeFileDurably replaces all or nothing, and leaves no temporary file.
func TestWriteFileDurablyLeavesNothingBehind(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "F")
	for _, s := range []string{"one", "two"} {
		if err := writeFileDurably(path, []byte(s)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != s {
			t.Fatalf("%q, %v", got, err)
		}
	}
	if err := writeFileDurably(filepath.Join(dir, "none", "F"), nil); err == nil {
		t.Error("writing into a missing directory succeeded")
	}
	if err := os.Mkdir(filepath.Join(dir, "D"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := writeFileDurably(filepath.Join(dir, "D"), nil); err == nil {
		t.Error("a directory was replaced")
	}
	if names, err := dirNames(dir); err != nil || len(names) != 2 {
		t.Errorf("the directory holds %v, %v", names, err)
	}
}
