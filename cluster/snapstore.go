package cluster

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/snapshot"
)

// snapStore is the local snapshot store of one shard replica. What goes through
// Raft's sink and streams is the shard manifest alone; the files lie beside it.
//
// Layout below dir (docs/formats/replica-directory.md):
//
//	incoming/<sha256 of the manifest>/   files made or fetched, not yet a snapshot
//	snapshots/<id>/META                  Raft's metadata, checksummed JSON
//	snapshots/<id>/MANIFEST              the shard manifest
//	snapshots/<id>/files/                its files
//
// A snapshot becomes visible by one rename of its directory, after everything
// in it is durable: it is whole or not there (B21).
type snapStore struct {
	dir    string
	logger *slog.Logger
	hashes *snapshot.HashCache
	// remove takes a directory away, for good.
	remove func(path string) error

	mu struct {
		sync.Mutex
		// served is when files of a snapshot were last asked for by a peer; such
		// a snapshot is not reaped for serveGrace.
		served map[string]time.Time
		// busy counts the fetches that run, by directory name.
		busy map[string]int
	}
}

const (
	snapMetaVersion = 1
	// retainSnapshots is how many newest snapshots are kept.
	retainSnapshots = 1
	// serveGrace keeps a snapshot that a peer is fetching.
	serveGrace = 2 * time.Minute
	// maxManifestBytes bounds a manifest from Raft's stream.
	maxManifestBytes = 16 << 20
)

type snapMetaFile struct {
	Meta   json.RawMessage `json:"meta"`
	CRC32C uint32          `json:"crc32c"`
}

type snapMeta struct {
	Version        int                `json:"version"`
	Raft           *raft.SnapshotMeta `json:"raft"`
	ManifestSHA256 string             `json:"manifestSha256"`
}

// openSnapStore opens the snapshots of a replica's directory; remove is called with
// the directories that go.
func openSnapStore(dir string, logger *slog.Logger, remove func(path string) error) (*snapStore, error) {
	s := &snapStore{dir: dir, logger: logger, hashes: snapshot.NewHashCache(), remove: remove}
	s.mu.served = map[string]time.Time{}
	s.mu.busy = map[string]int{}
	for _, d := range []string{s.incoming(), s.snapshots()} {
		if err := os.MkdirAll(d, 0o750); err != nil {
			return nil, fmt.Errorf("opening snapshot store: %w", err)
		}
	}
	// What a crash left unfinished under a temporary name was never visible; of
	// what was being fetched the newest is kept, to be resumed.
	if err := removeExcept(s.snapshots(), remove, func(name string) bool { return !strings.HasPrefix(name, "tmp-") }); err != nil {
		return nil, fmt.Errorf("opening snapshot store: %w", err)
	}
	newest, err := newestFetch(s.incoming())
	if err == nil {
		err = removeExcept(s.incoming(), remove, func(name string) bool { return name == newest })
	}
	if err != nil {
		return nil, fmt.Errorf("opening snapshot store: %w", err)
	}
	return s, nil
}

// removeExcept removes the entries of a directory that are not to be kept.
func removeExcept(dir string, remove func(path string) error, keep func(name string) bool) error {
	names, err := dirNames(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, n := range names {
		if !keep(n) {
			errs = append(errs, remove(filepath.Join(dir, n)))
		}
	}
	return errors.Join(errs...)
}

// newestFetch is the directory that was changed last, empty if there is none.
func newestFetch(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	newest, at := "", time.Time{}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && !strings.HasPrefix(e.Name(), "tmp-") && info.ModTime().After(at) {
			newest, at = e.Name(), info.ModTime()
		}
	}
	return newest, nil
}

func (s *snapStore) incoming() string  { return filepath.Join(s.dir, "incoming") }
func (s *snapStore) snapshots() string { return filepath.Join(s.dir, "snapshots") }

func dirNames(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

func manifestSum(manifest []byte) string {
	sum := sha256.Sum256(manifest)
	return hex.EncodeToString(sum[:])
}

// incomingDir is where the files of a manifest are collected.
func (s *snapStore) incomingDir(manifest []byte) string {
	return filepath.Join(s.incoming(), manifestSum(manifest))
}

// Create implements raft.SnapshotStore.
func (s *snapStore) Create(version raft.SnapshotVersion, index, term uint64, configuration raft.Configuration,
	configurationIndex uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	if version != raft.SnapshotVersionMax {
		return nil, fmt.Errorf("creating snapshot of version %d: %w", version, base.ErrUnsupported)
	}
	meta := &raft.SnapshotMeta{
		Version: version, ID: fmt.Sprintf("%016x-%016x-%d", term, index, time.Now().UnixMilli()),
		Index: index, Term: term, Configuration: configuration, ConfigurationIndex: configurationIndex,
	}
	return &snapSink{store: s, meta: meta}, nil
}

// List implements raft.SnapshotStore: whole snapshots, newest first.
func (s *snapStore) List() ([]*raft.SnapshotMeta, error) {
	all, err := s.list()
	if err != nil {
		return nil, err
	}
	metas := make([]*raft.SnapshotMeta, len(all))
	for i, m := range all {
		metas[i] = m.Raft
	}
	return metas, nil
}

func (s *snapStore) list() ([]*snapMeta, error) {
	names, err := dirNames(s.snapshots())
	if err != nil {
		return nil, fmt.Errorf("listing snapshots: %w", err)
	}
	var all []*snapMeta
	for _, n := range names {
		if strings.HasPrefix(n, "tmp-") {
			continue
		}
		m, err := s.readMeta(n)
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b *snapMeta) int { return strings.Compare(b.Raft.ID, a.Raft.ID) })
	return all, nil
}

func (s *snapStore) readMeta(id string) (*snapMeta, error) {
	raw, err := os.ReadFile(filepath.Join(s.snapshots(), id, "META"))
	if err != nil {
		return nil, fmt.Errorf("reading snapshot %s: %w: %w", id, base.ErrCorrupt, err)
	}
	m, err := parseSnapMeta(raw)
	if err != nil {
		return nil, fmt.Errorf("reading snapshot %s: %w", id, err)
	}
	if m.Raft.ID != id {
		return nil, fmt.Errorf("snapshot %s says it is %s: %w", id, m.Raft.ID, base.ErrCorrupt)
	}
	return m, nil
}

func parseSnapMeta(raw []byte) (*snapMeta, error) {
	var f snapMetaFile
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, fmt.Errorf("parsing: %v: %w", err, base.ErrCorrupt)
	}
	if crc32.Checksum(f.Meta, castagnoli) != f.CRC32C {
		return nil, fmt.Errorf("checksum mismatch: %w", base.ErrCorrupt)
	}
	m := &snapMeta{}
	if err := json.Unmarshal(f.Meta, m); err != nil {
		return nil, fmt.Errorf("parsing: %v: %w", err, base.ErrCorrupt)
	}
	if m.Version != snapMetaVersion {
		return nil, fmt.Errorf("version %d: %w", m.Version, base.ErrFormatVersion)
	}
	if m.Raft == nil {
		return nil, fmt.Errorf("no Raft metadata: %w", base.ErrCorrupt)
	}
	return m, nil
}

// Open implements raft.SnapshotStore: the stream is the manifest.
func (s *snapStore) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	m, err := s.readMeta(id)
	if err != nil {
		return nil, nil, err
	}
	manifest, err := s.readManifest(m)
	if err != nil {
		return nil, nil, err
	}
	// A peer that is sent this snapshot will ask for its files.
	s.mu.Lock()
	s.mu.served[id] = time.Now()
	s.mu.Unlock()
	m.Raft.Size = int64(len(manifest))
	return m.Raft, io.NopCloser(bytes.NewReader(manifest)), nil
}

func (s *snapStore) readManifest(m *snapMeta) ([]byte, error) {
	manifest, err := os.ReadFile(filepath.Join(s.snapshots(), m.Raft.ID, "MANIFEST"))
	if err != nil {
		return nil, fmt.Errorf("reading manifest of snapshot %s: %w: %w", m.Raft.ID, base.ErrCorrupt, err)
	}
	if manifestSum(manifest) != m.ManifestSHA256 {
		return nil, fmt.Errorf("manifest of snapshot %s: checksum mismatch: %w", m.Raft.ID, base.ErrCorrupt)
	}
	return manifest, nil
}

// newest returns the newest snapshot's manifest and files directory, or nil if
// there is no snapshot.
func (s *snapStore) newest() (*snapshot.Manifest, *raft.SnapshotMeta, string, error) {
	all, err := s.list()
	if err != nil || len(all) == 0 {
		return nil, nil, "", err
	}
	return s.load(all[0])
}

func (s *snapStore) load(m *snapMeta) (*snapshot.Manifest, *raft.SnapshotMeta, string, error) {
	raw, err := s.readManifest(m)
	if err != nil {
		return nil, nil, "", err
	}
	manifest, err := snapshot.Decode(raw)
	if err != nil {
		return nil, nil, "", fmt.Errorf("decoding manifest of snapshot %s: %w", m.Raft.ID, err)
	}
	return manifest, m.Raft, filepath.Join(s.snapshots(), m.Raft.ID, "files"), nil
}

// filesOf finds the directory of the files of a manifest by its checksum.
func (s *snapStore) filesOf(sum string) (string, error) {
	all, err := s.list()
	if err != nil {
		return "", err
	}
	for _, m := range all {
		if m.ManifestSHA256 == sum {
			s.mu.Lock()
			s.mu.served[m.Raft.ID] = time.Now()
			s.mu.Unlock()
			return filepath.Join(s.snapshots(), m.Raft.ID, "files"), nil
		}
	}
	return "", fmt.Errorf("snapshot with manifest %.12s: %w", sum, base.ErrNotFound)
}

// reap removes all but the newest snapshots, except what peers are fetching.
func (s *snapStore) reap() error {
	all, err := s.list()
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range all[min(retainSnapshots, len(all)):] {
		s.mu.Lock()
		busy := time.Since(s.mu.served[m.Raft.ID]) < serveGrace
		if !busy {
			delete(s.mu.served, m.Raft.ID)
		}
		s.mu.Unlock()
		if busy {
			continue
		}
		// Renamed first, so that a crash never leaves a part of a snapshot.
		dead := filepath.Join(s.snapshots(), "tmp-dead-"+m.Raft.ID)
		if err := os.Rename(filepath.Join(s.snapshots(), m.Raft.ID), dead); err != nil {
			errs = append(errs, err)
			continue
		}
		failpoint.Hit("cluster.snapshot.reap")
		errs = append(errs, s.remove(dead))
	}
	return errors.Join(errs...)
}

// snapSink collects a manifest and publishes the snapshot on Close.
type snapSink struct {
	store *snapStore
	meta  *raft.SnapshotMeta
	buf   bytes.Buffer
	done  bool
}

func (k *snapSink) ID() string { return k.meta.ID }

func (k *snapSink) Write(p []byte) (int, error) {
	if k.buf.Len()+len(p) > maxManifestBytes {
		return 0, fmt.Errorf("writing manifest of snapshot %s: %w", k.meta.ID, base.ErrTooLarge)
	}
	return k.buf.Write(p)
}

// Cancel drops the snapshot.
func (k *snapSink) Cancel() error {
	k.done = true
	return nil
}

// Close makes the snapshot durable and visible, or fails without a trace.
func (k *snapSink) Close() error {
	if k.done {
		return nil
	}
	k.done = true
	s := k.store
	raw := k.buf.Bytes()
	manifest, err := snapshot.Decode(raw)
	if err != nil {
		return fmt.Errorf("closing snapshot %s: %w", k.meta.ID, err)
	}
	tmp := filepath.Join(s.snapshots(), "tmp-"+k.meta.ID)
	if err := k.fill(tmp, raw, manifest); err != nil {
		return errors.Join(fmt.Errorf("closing snapshot %s: %w", k.meta.ID, err), os.RemoveAll(tmp))
	}
	if err := s.reap(); err != nil {
		s.logger.Warn("removing old snapshots", "error", err)
	}
	// Fetches that were given up: this snapshot is newer than theirs. One that
	// runs at this moment starts again if it must.
	if err := removeExcept(s.incoming(), s.remove, s.isBusy); err != nil {
		s.logger.Warn("removing fetches that were given up", "error", err)
	}
	return nil
}

// hold marks an incoming directory as in use until release is called.
func (s *snapStore) hold(manifest []byte) (release func()) {
	name := manifestSum(manifest)
	s.mu.Lock()
	s.mu.busy[name]++
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		if s.mu.busy[name]--; s.mu.busy[name] == 0 {
			delete(s.mu.busy, name)
		}
		s.mu.Unlock()
	}
}

// isBusy says whether an entry of incoming must stay: checkpoints that are being
// made, and fetches that run.
func (s *snapStore) isBusy(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.HasPrefix(name, "tmp-") || s.mu.busy[name] > 0
}

func (k *snapSink) fill(tmp string, raw []byte, manifest *snapshot.Manifest) error {
	s := k.store
	if err := os.Mkdir(tmp, 0o750); err != nil {
		return err
	}
	from := s.incomingDir(raw)
	if err := checkSizes(from, manifest); err != nil {
		return err
	}
	k.meta.Size = int64(len(raw))
	body, err := json.Marshal(&snapMeta{Version: snapMetaVersion, Raft: k.meta, ManifestSHA256: manifestSum(raw)})
	if err != nil {
		return err
	}
	meta, err := json.Marshal(snapMetaFile{Meta: body, CRC32C: crc32.Checksum(body, castagnoli)})
	if err != nil {
		return err
	}
	if err := writeFileDurably(filepath.Join(tmp, "META"), meta); err != nil {
		return err
	}
	failpoint.Hit("cluster.snapshot.before-manifest")
	if err := writeFileDurably(filepath.Join(tmp, "MANIFEST"), raw); err != nil {
		return err
	}
	if err := os.Rename(from, filepath.Join(tmp, "files")); err != nil {
		return err
	}
	if err := errors.Join(syncDir(tmp), syncDir(s.incoming())); err != nil {
		return err
	}
	if err := failpoint.Err("cluster.snapshot.before-rename"); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(s.snapshots(), k.meta.ID)); err != nil {
		return err
	}
	failpoint.Hit("cluster.snapshot.before-dir-sync")
	return syncDir(s.snapshots())
}

// checkSizes makes sure, cheaply, that the prepared files are those of the
// manifest; their checksums were verified when they were made or fetched.
func checkSizes(dir string, m *snapshot.Manifest) error {
	for _, f := range m.Files {
		st, err := os.Stat(filepath.Join(dir, f.Name))
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("file %s was not prepared: %w", f.Name, base.ErrNotFound)
		}
		if err != nil {
			return err
		}
		if uint64(st.Size()) != uint64(f.Size) {
			return fmt.Errorf("file %s has %d bytes, the manifest says %d: %w", f.Name, st.Size(), f.Size, base.ErrCorrupt)
		}
	}
	return nil
}

// stage hashes a checkpoint directory, writes its manifest's bytes and moves it
// where the sink will look for it.
func (s *snapStore) stage(ctx context.Context, checkpoint string, m *snapshot.Manifest) ([]byte, error) {
	files, err := snapshot.HashFiles(ctx, checkpoint, s.hashes)
	if err != nil {
		return nil, fmt.Errorf("hashing checkpoint: %w", err)
	}
	m.Files = files
	raw, err := m.Encode()
	if err != nil {
		return nil, fmt.Errorf("encoding manifest: %w", err)
	}
	to := s.incomingDir(raw)
	if err := os.RemoveAll(to); err != nil {
		return nil, fmt.Errorf("staging checkpoint: %w", err)
	}
	if err := os.Rename(checkpoint, to); err != nil {
		return nil, fmt.Errorf("staging checkpoint: %w", err)
	}
	return raw, syncDir(s.incoming())
}
