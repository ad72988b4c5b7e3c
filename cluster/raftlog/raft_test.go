package raftlog

import (
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

// listFSM keeps the commands that it was given.
type listFSM struct {
	mu   sync.Mutex
	data []string
}

func (f *listFSM) Apply(l *raft.Log) any {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.data = append(f.data, string(l.Data))
	return len(f.data)
}

func (f *listFSM) len() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.data)
}

type listSnapshot struct{ text string }

func (f *listFSM) Snapshot() (raft.FSMSnapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return listSnapshot{fmt.Sprintf("%q", f.data)}, nil
}

func (s listSnapshot) Persist(sink raft.SnapshotSink) error {
	if _, err := io.WriteString(sink, s.text); err != nil {
		return err
	}
	return sink.Close()
}
func (listSnapshot) Release() {}

func (f *listFSM) Restore(r io.ReadCloser) error {
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.data = nil
	var rest = string(b[1 : len(b)-1])
	for rest != "" {
		var s string
		if _, err := fmt.Sscanf(rest, "%q", &s); err != nil {
			return err
		}
		f.data = append(f.data, s)
		rest = rest[min(len(rest), len(fmt.Sprintf("%q", s))+1):]
	}
	return r.Close()
}

// raftNode is one node of two groups on one log.
type raftNode struct {
	mem   *vfs.Mem
	log   *Log
	rafts []*raft.Raft
	fsms  []*listFSM
	snaps []*raft.InmemSnapshotStore
}

const smokeGroups = 2

func smokeAddr(g, n int) raft.ServerAddress { return raft.ServerAddress(fmt.Sprintf("g%d-n%d", g, n)) }

// start opens the log and runs a replica of each group on it.
func (n *raftNode) start(t *testing.T, id int, transports [][]*raft.InmemTransport, bootstrap bool) {
	t.Helper()
	opt := small()
	n.log = mustOpen(t, n.mem, opt)
	n.rafts, n.fsms = nil, nil
	for g := range smokeGroups {
		_, tr := raft.NewInmemTransport(smokeAddr(g, id))
		transports[g][id] = tr
		for _, other := range transports[g] {
			if other != nil && other != tr {
				tr.Connect(other.LocalAddr(), other)
				other.Connect(tr.LocalAddr(), tr)
			}
		}
		conf := raft.DefaultConfig()
		conf.LocalID = raft.ServerID(smokeAddr(g, id))
		conf.Logger = hclog.New(&hclog.LoggerOptions{Output: io.Discard})
		conf.HeartbeatTimeout, conf.ElectionTimeout, conf.LeaderLeaseTimeout = 100*time.Millisecond, 100*time.Millisecond, 100*time.Millisecond
		conf.TrailingLogs = 10
		fail := func(err error) { t.Errorf("node %d group %d stopped: %v", id, g, err) }
		store := n.log.Group(base.GroupID(g))
		guard, err := NewTermGuard(store, store.ID(), fail)
		must(t, err)
		logs := NewStoppingStore(store, fail)
		if bootstrap {
			var servers []raft.Server
			for k := range 3 {
				servers = append(servers, raft.Server{ID: raft.ServerID(smokeAddr(g, k)), Address: smokeAddr(g, k)})
			}
			must(t, raft.BootstrapCluster(conf, logs, guard, n.snaps[g], tr, raft.Configuration{Servers: servers}))
		}
		fsm := &listFSM{}
		r, err := raft.NewRaft(conf, fsm, logs, guard, n.snaps[g], tr)
		must(t, err)
		n.rafts, n.fsms = append(n.rafts, r), append(n.fsms, fsm)
	}
}

func (n *raftNode) shutdown(t *testing.T) {
	for _, r := range n.rafts {
		must(t, r.Shutdown().Error())
	}
	must(t, n.log.Close())
}

// apply proposes until a leader takes it.
func apply(t *testing.T, nodes []*raftNode, g int, data string) {
	t.Helper()
	waitFor(t, "a leader that takes "+data, func() bool {
		for _, n := range nodes {
			if n.rafts != nil && n.rafts[g].State() == raft.Leader && n.rafts[g].Apply([]byte(data), time.Second).Error() == nil {
				return true
			}
		}
		return false
	})
}

// TestRaftRunsOnIt drives real raft: elections, replication, snapshots with log
// truncation, the power cut of a node, and catching up by snapshot.
func TestRaftRunsOnIt(t *testing.T) {
	transports := [][]*raft.InmemTransport{make([]*raft.InmemTransport, 3), make([]*raft.InmemTransport, 3)}
	var nodes []*raftNode
	for id := range 3 {
		n := &raftNode{mem: vfs.NewMem(), snaps: []*raft.InmemSnapshotStore{raft.NewInmemSnapshotStore(), raft.NewInmemSnapshotStore()}}
		n.start(t, id, transports, true)
		nodes = append(nodes, n)
	}
	count := 0
	more := func(n int, nodes []*raftNode) {
		for range n {
			for g := range smokeGroups {
				apply(t, nodes, g, fmt.Sprintf("v%d", count))
			}
			count++
		}
	}
	more(30, nodes)

	// Node 0 loses power: what it had not synced is gone, in part.
	crashed := nodes[0].mem.CrashClone(42)
	nodes[0].shutdown(t)
	nodes[0].rafts = nil
	more(40, nodes[1:])
	for _, n := range nodes[1:] {
		for _, r := range n.rafts {
			must(t, r.Snapshot().Error())
		}
	}
	more(5, nodes[1:])
	first, err := nodes[1].log.Group(0).FirstIndex()
	must(t, err)
	if first < 40 {
		t.Fatalf("the log was not truncated: it begins at %d", first)
	}
	nodes[0].mem = crashed
	nodes[0].start(t, 0, transports, false)
	more(5, nodes)
	waitFor(t, "node 0 to catch up by snapshot", func() bool {
		return nodes[0].fsms[0].len() == nodes[1].fsms[0].len() && nodes[0].fsms[1].len() == nodes[1].fsms[1].len()
	})
	for g := range smokeGroups {
		var want []string
		for _, d := range nodes[1].fsms[g].data {
			if len(want) == 0 || want[len(want)-1] != d {
				want = append(want, d)
			}
		}
		if len(want) != count {
			t.Errorf("group %d applied %d commands, want %d", g, len(want), count)
		}
		if fmt.Sprint(nodes[0].fsms[g].data) != fmt.Sprint(nodes[1].fsms[g].data) {
			t.Errorf("group %d differs between nodes", g)
		}
	}
	for _, n := range nodes {
		n.shutdown(t)
		_, err := Verify(n.mem, "log")
		must(t, err)
	}
}

// TestDumpNamesTornTailAndDamage: the offline tools change nothing and say what
// they see.
func TestDumpNamesTornTailAndDamage(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem, small())
	must(t, l.Group(1).StoreLogs(entries(1, 3, 1)))
	must(t, l.Close())
	name := segmentName(1)
	data := fileBytes(t, mem, filepath.Join("log", name))
	torn := withFile(t, mem, name, data[:len(data)-60])
	rep, err := Verify(torn, "log")
	must(t, err)
	if rep.TornBytes == 0 || len(rep.Groups) != 0 || rep.Segments != 1 {
		t.Errorf("report of a torn log: %+v", rep)
	}
	if after := fileBytes(t, torn, filepath.Join("log", name)); len(after) != len(data)-60 {
		t.Error("Verify changed the log")
	}
	var b1 lines
	must(t, Dump(&b1, torn, "log"))
	if !b1.has("torn tail of segment 00000001") {
		t.Errorf("dump does not name the torn tail:\n%s", b1.text)
	}
	data[100] ^= 1
	var b2 lines
	if err := Dump(&b2, withFile(t, mem, name, data), "log"); err == nil || !b2.has("damaged: ") {
		t.Errorf("dump of a damaged log: %v\n%s", err, b2.text)
	}
}

type lines struct{ text string }

func (l *lines) Write(p []byte) (int, error) { l.text += string(p); return len(p), nil }
func (l *lines) has(s string) bool {
	for i := range l.text {
		if len(l.text)-i >= len(s) && l.text[i:i+len(s)] == s {
			return true
		}
	}
	return false
}
