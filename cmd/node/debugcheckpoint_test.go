package main

import (
	"context"
	"crypto/sha256"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/snapshot"
)

// storedCheckpoint makes a store with one checkpoint, of a file and of the log behind
// it; it returns the store's
// directory, the key, and the key of the object that holds the one file.
func storedCheckpoint(t *testing.T) (dir, key, object string) {
	t.Helper()
	dir, files := t.TempDir(), t.TempDir()
	s, err := file.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	body := []byte("sorted strings")
	if err := os.WriteFile(filepath.Join(files, "000007.sst"), body, 0o600); err != nil {
		t.Fatal(err)
	}
	m := &snapshot.Manifest{Group: 1, Birth: 2, Epoch: 1, Range: keygroup.FullRange(128), M: 128, Engine: "rocks", Index: 9,
		Files: []snapshot.File{{Name: "000007.sst", Size: int64(len(body)), SHA256: sha256.Sum256(body)}}}
	ctx := context.Background()
	o := snapshot.UploadOptions{Store: s, Prefix: "c0ffee", Attempt: 1}
	if _, err := snapshot.Upload(ctx, files, m, o); err != nil {
		t.Fatal(err)
	}
	log := &snapshot.Changelog{Base: m.Cut()}
	m.Index, m.Term = 11, 1
	for first := uint64(10); first <= m.Index; first++ {
		ref, err := snapshot.PutSegment(ctx, &snapshot.Segment{Group: 1, Birth: 2, First: first, Entries: []snapshot.LogEntry{{Term: 1, Command: []byte("put")}}}, o)
		if err != nil {
			t.Fatal(err)
		}
		log.Segments = append(log.Segments, ref)
	}
	m.Changelog = log
	u, err := snapshot.UploadChangelog(ctx, m, nil, o)
	if err != nil {
		t.Fatal(err)
	}
	c := &snapshot.Checkpoint{ClusterID: "c0ffee", Number: 7, FormatVersion: 1, M: 128, Engine: "rocks", Shards: []snapshot.Shard{{
		Group: 1, Birth: 2, Epoch: 1, Range: m.Range, Index: m.Index, Term: m.Term, ManifestKey: u.ManifestKey, ManifestSHA256: u.ManifestSHA256,
		ManifestSize: u.ManifestSize, FullBytes: u.FullBytes, NewBytes: u.NewBytes}}}
	raw, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	key = snapshot.MetadataKey("c0ffee", 7)
	if err := s.Put(ctx, key, objectstore.Bytes(raw)); err != nil {
		t.Fatal(err)
	}
	return dir, key, m.Files[0].Object
}

// A checkpoint is printed and verified without a cluster, and damage is named.
func TestDebugCheckpoint(t *testing.T) {
	dir, key, object := storedCheckpoint(t)
	metadata, uri := filepath.Join(dir, key), "file://"+dir
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"debug", "checkpoint", "dump", metadata}, `checkpoint 7 of cluster "c0ffee"`},
		{[]string{"debug", "checkpoint", "verify", key, "--object-store", uri}, `"Objects": 5`},
		{[]string{"debug", "checkpoint", "verify", key, "--object-store", uri}, `"Segments": 2`},
		{[]string{"debug", "checkpoint", "verify", key, "--object-store", uri, "--full"}, `"Full": true`},
	} {
		if code, out, stderr := here(nil, c.args...); code != 0 || !strings.Contains(out, c.want) {
			t.Errorf("%v: code %d, %s %s", c.args, code, out, stderr)
		}
	}
	raw, err := os.ReadFile(metadata)
	if err != nil {
		t.Fatal(err)
	}
	c, err := snapshot.DecodeCheckpoint(raw)
	if err != nil {
		t.Fatal(err)
	}
	manifest := filepath.Join(dir, c.Shards[0].ManifestKey)
	for _, args := range [][]string{{"debug", "checkpoint", "dump", manifest}, {"debug", "manifest", "dump", manifest}} {
		if code, out, stderr := here(nil, args...); code != 0 || !strings.Contains(out, "000007.sst") || !strings.Contains(out, object) {
			t.Errorf("%v: code %d, %s %s", args, code, out, stderr)
		}
	}
	for _, args := range [][]string{
		{"debug", "checkpoint", "dump", filepath.Join(dir, object)}, {"debug", "checkpoint", "dump", filepath.Join(dir, "nothing")},
		{"debug", "checkpoint", "verify", object, "--object-store", uri},
		{"debug", "checkpoint", "verify", key, "--object-store", uri + "/nothing"},
	} {
		if code, out, stderr := here(nil, args...); code != exitFailed || out != "" || stderr == "" {
			t.Errorf("%v: code %d, %q %q", args, code, out, stderr)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "nothing")); err == nil {
		t.Error("looking made a directory")
	}
	if code, _, stderr := here(nil, "debug", "checkpoint", "verify", key); code == 0 || !strings.Contains(stderr, "--object-store") {
		t.Errorf("without a store: code %d, %s", code, stderr)
	}
	// Damage that only the full look can see.
	if err := os.WriteFile(filepath.Join(dir, object), []byte("sorted striMgs"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, stderr := here([]string{"KEELSTATE_OBJECT_STORE=" + uri}, "debug", "checkpoint", "verify", key); code != 0 {
		t.Errorf("code %d, %s %s", code, out, stderr)
	}
	code, out, stderr := here(nil, "debug", "checkpoint", "verify", key, "--object-store", uri, "--full")
	if code != exitFailed || !strings.Contains(out, `"Fault": "damaged"`) || !strings.Contains(out, object) || !strings.Contains(stderr, object) {
		t.Errorf("code %d, %s %s", code, out, stderr)
	}
}
