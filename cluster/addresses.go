package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"github.com/keelstate/keelstate/cluster/transport"
	"github.com/keelstate/keelstate/internal/base"
)

// addressBook keeps the last known Raft addresses of the other nodes in the
// file PEERS, so that a node finds its peers again before it has the metadata.
// An address is a hint: the handshake proves who answers.
type addressBook struct {
	path string
	mu   sync.Mutex
	m    map[base.NodeID]string
}

type peersFile struct {
	Version int                    `json:"version"`
	Peers   map[base.NodeID]string `json:"peers"`
}

func (b *addressBook) open(dir string) error {
	b.path = filepath.Join(dir, "PEERS")
	b.m = map[base.NodeID]string{}
	raw, err := os.ReadFile(b.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading peers: %w", err)
	}
	var f peersFile
	// A file that cannot be read costs only hints: gossip brings them again.
	if json.Unmarshal(raw, &f) == nil && f.Version == 1 && f.Peers != nil {
		b.m = f.Peers
	}
	return nil
}

func (b *addressBook) get(n base.NodeID) (string, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a, ok := b.m[n]
	return a, ok
}

func (b *addressBook) all() map[base.NodeID]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.m)
}

// learn adds addresses, and writes the file if anything is new.
func (b *addressBook) learn(peers map[base.NodeID]string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := maps.Clone(b.m)
	maps.Copy(next, peers)
	if maps.Equal(next, b.m) {
		return nil
	}
	b.m = next
	raw, err := json.Marshal(peersFile{Version: 1, Peers: next})
	if err != nil {
		return err
	}
	return writeFileDurably(b.path, raw)
}

// resolve gives the transport the address of a node: what gossip says now, else
// the metadata, else the last one known.
func (n *Node) resolve(id base.NodeID) (string, bool) {
	if n.opts.Gossip != nil {
		for _, m := range n.opts.Gossip.Members() {
			if m.Node == id && m.RaftAddr != "" {
				return m.RaftAddr, true
			}
		}
	}
	if v, err := n.metaView(); err == nil {
		if rec := v.Node(id); rec != nil && rec.RaftAddr != "" {
			return rec.RaftAddr, true
		}
	}
	return n.addresses.get(id)
}

// checkPeer checks who greets against the cluster's record (R4): a disk that is
// not the one bound to the node's id is refused.
func (n *Node) checkPeer(id transport.Identity) error {
	v, err := n.metaView()
	if err != nil {
		return nil // no copy of the metadata yet: the cluster id was checked
	}
	rec := v.Node(id.Node)
	switch {
	case id.Cluster == "" && (rec == nil || rec.DiskID == "" || rec.DiskID == id.Disk):
		return nil // yet to be admitted
	case id.Cluster == "":
		return fmt.Errorf("node %s belongs to no cluster and its data directory has disk %s, but it is bound to another, %s; start it with its own --data-dir: %w",
			id.Node, id.Disk, rec.DiskID, base.ErrIdentity)
	case rec == nil && v.Cluster() != nil:
		return fmt.Errorf("node %s is not a node of this cluster: %w", id.Node, base.ErrIdentity)
	case rec != nil && rec.DiskID != "" && rec.DiskID != id.Disk:
		return fmt.Errorf("node %s came with disk %s, it is bound to another: %w", id.Node, id.Disk, base.ErrIdentity)
	case v.Cluster() != nil && v.Cluster().Engine != id.Engine:
		return fmt.Errorf("node %s runs engine %s, the cluster %s: %w", id.Node, id.Engine, v.Cluster().Engine, base.ErrIdentity)
	}
	return nil
}
