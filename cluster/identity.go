package cluster

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// identityVersion is the version of the IDENTITY file (docs/formats/identity.md).
const identityVersion = 1

// Identity binds a data directory to a node, a disk and, once founded or
// admitted, a cluster. It is stored in the file IDENTITY of the data directory.
type Identity struct {
	Version int            `json:"version"`
	Node    base.NodeID    `json:"node"`
	Disk    base.DiskID    `json:"disk"`
	Engine  string         `json:"engine"`
	Cluster base.ClusterID `json:"cluster,omitempty"`
	// SystemGeneration is the generation of this node's system-group replica; 0
	// before the node is a member.
	SystemGeneration uint64 `json:"systemGeneration,omitempty"`
	// RaftLog is the random id that the node's Raft log must also carry: a log
	// that was lost or exchanged is recognised by it (R3).
	RaftLog string `json:"raftLog,omitempty"`
	// Boots counts the starts on this data directory. The Raft log counts too,
	// first: a log that has counted less is an older copy that was put back, and
	// what was promised since is not in it (R3, B08).
	Boots uint64 `json:"boots,omitempty"`
	// Rejoin says that the system-group replica of SystemGeneration is not yet
	// known to be a member: the node asks for it until it is (R3).
	Rejoin bool `json:"rejoin,omitempty"`
	// Replicas holds the highest generation of each shard that this node ever
	// created, written before the replica exists: a replica that is listed but
	// has no log was lost, not new (R3).
	Replicas map[base.GroupID]uint64 `json:"replicas,omitempty"`
	// Founding is what `cluster init` was asked for, kept on the founding node
	// until the cluster's record holds it.
	Founding *FoundSpec `json:"founding,omitempty"`
}

type identityFile struct {
	Identity json.RawMessage `json:"identity"`
	CRC32C   uint32          `json:"crc32c"`
}

func randomID() string {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(fmt.Sprintf("reading random bytes: %v", err)) // crypto/rand never fails on Linux
	}
	return hex.EncodeToString(b[:])
}

// ValidateNodeID checks the form of a node id.
func ValidateNodeID(id base.NodeID) error {
	if id == "" || len(id) > 63 || strings.ContainsAny(string(id), "/ \t\n,=") {
		return base.Invalid("node-id", "use 1 to 63 characters without '/', ',', '=' or spaces")
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// identityCopy is the second copy of the IDENTITY file, written after it. A node
// whose identity is damaged could not come back by itself: every promise is bound
// to it, and nobody else has it.
const identityCopy = "IDENTITY.copy"

// openIdentity reads the IDENTITY file of dir, or its copy where the file is
// damaged, or writes a new one if dir holds nothing. A directory that holds data
// but no identity, or that of another node or engine, is refused.
func openIdentity(dir string, node base.NodeID, engine string) (*Identity, error) {
	path := filepath.Join(dir, "IDENTITY")
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("reading data directory %s: %w", dir, err)
		}
		for _, e := range entries {
			if e.Name() != "LOCK" && !strings.HasPrefix(e.Name(), "IDENTITY.tmp") && !strings.HasPrefix(e.Name(), identityCopy+".tmp") {
				return nil, &base.Error{Cause: base.ErrIdentity, Field: "data-dir", Ordinal: -1,
					Hint: fmt.Sprintf("%s holds %q but no IDENTITY file; use an empty directory, or restore the file", dir, e.Name())}
			}
		}
		id := &Identity{Version: identityVersion, Node: node, Disk: base.DiskID(randomID()), Engine: engine}
		return id, id.save(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("reading identity: %w", err)
	}
	id, err := parseIdentity(raw)
	if errors.Is(err, base.ErrCorrupt) {
		id, err = fromCopy(dir, err)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	if id.Node != node {
		return nil, &base.Error{Cause: base.ErrIdentity, Field: "node-id", Ordinal: -1,
			Hint: fmt.Sprintf("%s belongs to node %q, not %q; start with --node-id %s or another --data-dir", dir, id.Node, node, id.Node)}
	}
	if id.Engine != engine {
		return nil, &base.Error{Cause: base.ErrIdentity, Field: "engine", Ordinal: -1,
			Hint: fmt.Sprintf("%s was written with --engine %s, not %s; the engine of a cluster never changes", dir, id.Engine, engine)}
	}
	return id, nil
}

// fromCopy reads the copy of a damaged identity and makes the file whole again.
// Both are written one after the other, the file first: a copy that is valid is
// the newest, or the file is.
func fromCopy(dir string, damage error) (*Identity, error) {
	raw, err := os.ReadFile(filepath.Join(dir, identityCopy))
	if err != nil {
		return nil, fmt.Errorf("%w; its copy: %v", damage, err)
	}
	id, err := parseIdentity(raw)
	if err != nil {
		return nil, fmt.Errorf("%w; its copy too: %w", damage, err)
	}
	return id, id.save(dir)
}

func parseIdentity(raw []byte) (*Identity, error) {
	var f identityFile
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, fmt.Errorf("parsing: %v: %w", err, base.ErrCorrupt)
	}
	if crc32.Checksum(f.Identity, castagnoli) != f.CRC32C {
		return nil, fmt.Errorf("checksum mismatch: %w", base.ErrCorrupt)
	}
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(f.Identity, &v); err != nil {
		return nil, fmt.Errorf("parsing: %v: %w", err, base.ErrCorrupt)
	}
	if v.Version != identityVersion {
		return nil, fmt.Errorf("version %d: %w", v.Version, base.ErrFormatVersion)
	}
	id := &Identity{}
	if err := json.Unmarshal(f.Identity, id); err != nil {
		return nil, fmt.Errorf("parsing: %v: %w", err, base.ErrCorrupt)
	}
	if id.Node == "" || id.Disk == "" {
		return nil, fmt.Errorf("node or disk is empty: %w", base.ErrCorrupt)
	}
	return id, nil
}

// save writes the identity durably, and its copy after it.
func (id *Identity) save(dir string) error {
	body, err := json.Marshal(id)
	if err != nil {
		return fmt.Errorf("encoding identity: %w", err)
	}
	raw, err := json.Marshal(identityFile{Identity: body, CRC32C: crc32.Checksum(body, castagnoli)})
	if err != nil {
		return fmt.Errorf("encoding identity: %w", err)
	}
	raw = append(raw, '\n')
	failpoint.Hit("cluster.identity.before-save")
	if err := writeFileDurably(filepath.Join(dir, "IDENTITY"), raw); err != nil {
		return err
	}
	failpoint.Hit("cluster.identity.before-copy")
	err = writeFileDurably(filepath.Join(dir, identityCopy), raw)
	failpoint.Hit("cluster.identity.saved")
	return err
}

// writeFileDurably replaces path by data: after a crash it holds the old bytes
// or the new ones.
func writeFileDurably(path string, data []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".tmp*")
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	defer os.Remove(tmp.Name()) // no longer there after the rename
	if _, err = tmp.Write(data); err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = failpoint.Err("cluster.file.before-rename")
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	failpoint.Hit("cluster.file.before-dir-sync")
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

// makeDirs makes a directory below root, and every name on the way to it durable:
// a power loss would take what is flushed in it along with a name that is not, and
// the Raft log may be cut by then (W2). The names may be of an earlier call that
// died before it had synced them, so all are synced in any case.
func makeDirs(root, dir string) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	for d := dir; d != root && d != filepath.Dir(d); {
		d = filepath.Dir(d)
		if err := syncDir(d); err != nil {
			return fmt.Errorf("making %s durable: %w", dir, err)
		}
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
