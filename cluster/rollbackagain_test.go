package cluster_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// A request to go back that comes when shards of a rollback to the same checkpoint
// may be open already is another one: what was written in the new incarnation by then
// would be counted twice by a job that rewinds its source. One that comes before is
// the same.
func TestRollbackThatComesWhenShardsOpenIsAnother(t *testing.T) {
	t.Parallel()
	k := newRollingKit(t, testcluster.Options{Engine: "mem"})
	k.more()
	n := k.checkpoint()
	k.more()
	was := k.top.Incarnation
	again := map[string]chan *cluster.RollbackInfo{}
	first, err := k.back(0, n, func(i *cluster.RollbackInfo) {
		if again[i.Phase] != nil || i.Phase != meta.PhaseRollbackPrepare && i.Phase != meta.PhaseRollbackOpen {
			return
		}
		ended := make(chan *cluster.RollbackInfo, 1)
		again[i.Phase] = ended
		go func() {
			info, err := k.back(0, n, nil)
			if err != nil {
				t.Errorf("in the phase %s: %v", i.Phase, err)
			}
			ended <- info
		}()
	})
	if err != nil || first.Phase != meta.PhaseDone || len(again) != 2 {
		t.Fatalf("%v, %+v, %d", err, first, len(again))
	}
	if same := <-again[meta.PhaseRollbackPrepare]; same == nil || same.Operation != first.Operation {
		t.Errorf("one that came in time is %+v, the first %+v", same, first)
	}
	other := <-again[meta.PhaseRollbackOpen]
	if other == nil || other.Operation == first.Operation || other.Phase != meta.PhaseDone || other.Incarnation != was+2 {
		t.Fatalf("one that came when shards opened is %+v, the first %+v", other, first)
	}
	k.renew(was + 1)
	k.holds(n)
	k.nothingLeft()
}

// A rollback that is proposed waits for a quorum. The replica goes on meanwhile with all
// that it looks after: states that are dropped, say, more than once.
func TestReplicaLooksAfterItsShardWhileARollbackIsProposed(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("k1", "v"))
	for i := range 3 {
		release, err := k.Node(i).ProposingRollback(1)
		if err != nil {
			t.Fatal(err)
		}
		defer release()
	}
	for name, id := range map[string]engine.FamilyID{"values": k.values, "lists": k.lists} {
		if _, err := k.Node(0).Drop(k.ctx(), "kit", name); err != nil {
			t.Fatal(err)
		}
		k.Eventually(name+" is dropped", func() error {
			st, err := k.Node(k.Leader(1)).NodeStatus(k.ctx())
			if err != nil {
				return err
			}
			for _, g := range st.Groups {
				if slices.Contains(g.States, uint32(id)) {
					return fmt.Errorf("it is declared in %s", g.Group)
				}
			}
			return nil
		})
	}
}
