package cluster

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// nodeCalls has every JSON body and answer with all fields set.
func nodeCalls() []struct {
	Name  string
	Value any
} {
	spec := fullIdentity().Founding
	return []struct {
		Name  string
		Value any
	}{
		{"1 admission", admission{Init: spec, Cluster: "c", Node: "n1", Peers: map[base.NodeID]string{"n2": "h:1"}}},
		{"1 answer", admitted{Reply: &FoundReply{Cluster: "c", Operation: "1", Phase: "done", Resumed: true, Fetches: []ShardFetch{{Group: 1, Due: 2, Here: 1}},
			Stuck: []StuckRestore{{Group: 1, Node: "n1", Fault: "missing", Detail: "d", Age: time.Second}}}, Disk: "d", Engine: "mem",
			RaftAddr: "r", GRPCAddr: "g", HTTPAddr: "h", Zone: "z"}},
		{"2 answer", broadcast.Result{Index: 1, Skipped: true, Succeeded: true, FailedCondition: -1, Changed: true, Revision: 2, Clock: 3}},
		{"3 answer", uint64(7)},
		{"4 answer", NodeStatus{Node: NodeInfo{ID: "n1", RaftAddr: "r", GRPCAddr: "g", HTTPAddr: "h", Zone: "z", State: "member", Alive: true},
			Cluster: "c", Version: "v", Engine: "mem", Ready: false, NotReadyReason: "why", Uptime: time.Second, Revision: 9,
			Groups: []GroupStatus{{Group: 1, Replica: "n1/1", State: "leader", Voter: true, Leader: "n1", Term: 1, Commit: 2, Applied: 3, Last: 4,
				LogBytes: 5, DiskBytes: 6, Keys: 7, Epoch: 8, Range: keygroup.Range{Lo: 0, Hi: 9}, Sequence: 10, Damage: "d", Ready: true, Scrubbing: true, DamageFound: true, States: []uint32{1}}}}},
		{"5-8 body", shardRequest{Group: 1, Mark: 2, To: "n2"}},
		{"5 answer", ReplicaHash{Node: "n1", Index: 1, ClockMs: 2, Content: []byte{1}, Ops: []byte{2}, Error: "e"}},
		{"7-8 answer", sizes{A: 1, B: 2}},
		{"9 body", map[base.GroupID]uint64{0: 1, 5: 2}},
		{"14 body", progressRequest{Operation: 3}},
		{"14 answer", []replicaProgress{{Group: 1, Due: 2, Here: 1, Whole: true, Stuck: &StuckRestore{Group: 1, Node: "n1", Fault: "missing", Detail: "d", Age: time.Second}}}},
		{"10 body", rejoinRequest{Node: "n1", Disk: "d", Generation: 2}},
	}
}

// The names of the fields are the format between nodes of different builds.
func TestNodeCallsFormat(t *testing.T) {
	var out bytes.Buffer
	for _, c := range nodeCalls() {
		raw, err := json.Marshal(c.Value)
		if err != nil {
			t.Fatal(err)
		}
		out.WriteString(c.Name + " " + string(raw) + "\n")
	}
	golden(t, "node-calls.json", out.Bytes())
	for name, n := range map[string][2]uint8{
		"admission": {methodAdmission, 1}, "propose": {methodSystemPropose, 2}, "index": {methodSystemIndex, 3}, "status": {methodStatus, 4},
		"hash": {methodHash, 5}, "transfer": {methodTransfer, 6}, "snapshot": {methodSnapshot, 7}, "compact": {methodCompact, 8},
		"leaders": {methodLeaders, 9}, "rejoin": {methodRejoin, 10}, "hello": {methodHello, 12}, "scrub": {methodScrub, 13}, "progress": {methodProgress, 14},
	} {
		if n[0] != n[1] {
			t.Errorf("method %s has number %d, it is frozen as %d", name, n[0], n[1])
		}
	}
}

// What another build adds to a body is ignored.
func TestNodeCallsIgnoreUnknownFields(t *testing.T) {
	var a admission
	if err := json.Unmarshal([]byte(`{"node":"n1","cluster":"c","later":{"x":[1]}}`), &a); err != nil || a.Node != "n1" || a.Cluster != "c" {
		t.Errorf("admission: %+v, %v", a, err)
	}
	var r rejoinRequest
	if err := json.Unmarshal([]byte(`{"node":"n1","disk":"d","generation":2,"later":1}`), &r); err != nil || r.Generation != 2 {
		t.Errorf("rejoin: %+v, %v", r, err)
	}
}
