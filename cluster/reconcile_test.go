package cluster

import (
	"testing"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// A restarted node may see a record of a generation that it has replaced since.
// Opening that one again would end the newer one's log when the newer record
// comes: the node has no log here, so anything that is done would panic.
func TestRecordOlderThanWhatTheNodeDidAsksForNothing(t *testing.T) {
	n := &Node{opts: Options{NodeID: "n1", DataDir: t.TempDir()}}
	n.mu.replicas = map[base.GroupID]*replica{}
	n.mu.identity.Replicas = map[base.GroupID]uint64{7: 3}
	rec := &meta.Shard{ID: 7, Replicas: []meta.Replica{{Node: "n1", Generation: 2, ReplicaID: base.MakeReplicaID("n1", 2), Role: meta.RoleVoter}}}
	n.reconcileShard(rec, &rec.Replicas[0])
	if len(n.mu.replicas) != 0 {
		t.Fatal("the node opened a replica of an older generation")
	}
	if names, err := dirNames(n.opts.DataDir); err != nil || len(names) != 0 {
		t.Fatalf("the directory holds %v, %v", names, err)
	}
}
