package cluster_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
)

// B06: what was applied once is not applied again by a restart, from the log
// alone, from a snapshot and the log, and from a store newer than the snapshot.
func TestRestartsApplyEveryCommandOnce(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e})
		n := 0
		write := func(count int) {
			for range count {
				n++
				k.mustWrite(k.add("s", 1), k.appendTo("l", fmt.Sprint(n)), k.mapPut("m", fmt.Sprint(n%7), fmt.Sprint(n)), k.put("v", fmt.Sprint(n)))
			}
		}
		check := func() {
			t.Helper()
			if got := k.sum("s"); got != int64(n) {
				t.Fatalf("sum %d, want %d", got, n)
			}
			l := k.list("l")
			if len(l) != n {
				t.Fatalf("list has %d elements, want %d", len(l), n)
			}
			for i := range l {
				if l[i] != fmt.Sprint(i+1) {
					t.Fatalf("element %d is %q", i, l[i])
				}
			}
			if got := k.value("v"); got != fmt.Sprint(n) {
				t.Fatalf("value %q, want %d", got, n)
			}
		}
		write(20)
		for i := range 3 {
			k.Restart(i)
			k.WaitReady()
			check()
		}
		if _, _, err := k.Node(0).SnapshotShard(k.ctx(), 1); err != nil {
			t.Fatalf("snapshot: %v", err)
		}
		write(10)
		for i := range 3 {
			k.Restart(i)
			k.WaitReady()
			check()
		}
		for i := range 3 { // all at once
			k.Stop(i)
		}
		for i := range 3 {
			k.Start(i)
		}
		k.WaitReady()
		check()
		k.checkHashes()
	})
}

// A follower that is behind the cut log catches up from the files of a peer,
// and the log stays bounded.
func TestFollowerBehindTheLogCatchesUpFromPeerFiles(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e, Configure: smallLog})
		f := k.follower()
		k.Stop(f)
		fill(k, 300)
		k.Start(f)
		k.WaitReady()
		k.checkHashes()
		if got := k.generation(f); got != 1 {
			t.Fatalf("the follower came back as generation %d, want 1: being behind is no damage", got)
		}
		// It must be able to lead with all of it.
		if _, err := k.Node(0).TransferLeader(k.ctx(), 1, testcluster.ID(f)); err != nil {
			t.Fatalf("transfer: %v", err)
		}
		k.Eventually("the follower leads", func() error {
			if !k.Node(f).Leads(1) {
				return fmt.Errorf("not yet")
			}
			return nil
		})
		if got := k.sum("s"); got != 300 {
			t.Fatalf("sum %d, want 300", got)
		}
	})
}

func smallLog(_ int, o *cluster.Options) {
	o.LogMaxBytes, o.LogKeepBytes, o.LogHardBytes = 64<<10, 8<<10, 128<<10
}

// fill writes n requests of about 1 KB, far more than a small log keeps.
func fill(k *kit, n int) {
	pad := strings.Repeat("x", 1000)
	for i := range n {
		k.mustWrite(k.add("s", 1), k.put(fmt.Sprintf("k%d", i%50), pad+fmt.Sprint(i)))
	}
	k.Eventually("the log is cut", func() error {
		st, err := k.Node(k.Leader(1)).NodeStatus(k.ctx())
		if err != nil {
			return err
		}
		for _, g := range st.Groups {
			if g.Group == 1 && g.LogBytes > 200<<10 {
				return fmt.Errorf("the log holds %d bytes", g.LogBytes)
			}
		}
		return nil
	})
}

// B08: directories that do not fit together. The replica finds out, is rebuilt
// from its peers under a new id, and never serves or leads with missing keys.
func TestReplicaWhoseDirectoriesDoNotFitIsRebuilt(t *testing.T) {
	t.Parallel()
	type mismatch struct {
		name    string
		spoil   func(t *testing.T, dir, saved string)
		rebuilt bool // under a new generation
	}
	groups := func(dir string) string { return filepath.Join(dir, "groups") }
	cases := []mismatch{
		{"old data, new log", func(t *testing.T, dir, saved string) {
			replace(t, groups(dir), groups(saved))
		}, true},
		{"empty data, new log", func(t *testing.T, dir, _ string) {
			remove(t, groups(dir))
		}, true},
		{"new data, no log", func(t *testing.T, dir, _ string) {
			remove(t, filepath.Join(dir, "raftlog"))
		}, true},
		{"new data, old log", func(t *testing.T, dir, saved string) {
			replace(t, filepath.Join(dir, "raftlog"), filepath.Join(saved, "raftlog"))
		}, true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, e string) {
				k := newKit(t, testcluster.Options{Engine: e, Configure: smallLog})
				k.mustWrite(k.put("first", "1"))
				f := k.follower()
				k.Stop(f)
				saved := t.TempDir()
				copyDir(t, k.Dir(f), saved)
				k.Start(f)
				k.WaitReady()
				fill(k, 300)
				k.Eventually("the follower has it all", func() error { return k.level(f) })
				k.Stop(f)
				c.spoil(t, k.Dir(f), saved)
				k.Start(f)
				k.WaitReady()
				k.checkHashes()
				if gen := k.generation(f); (gen > 1) != c.rebuilt {
					t.Fatalf("the replica is generation %d, rebuilt must be %v", gen, c.rebuilt)
				}
				if got := k.sum("s"); got != 300 {
					t.Fatalf("sum %d, want 300", got)
				}
				// A rebuilt replica is a full voter again.
				k.Eventually("the replica votes again", func() error { return k.votes(f) })
			})
		})
	}
}

// A snapshot of the system group that was delayed on its way, and is older than
// what the node has by now, neither puts its metadata back nor cuts entries that
// it has acknowledged; also when the node's own log is cut past it.
func TestDelayedSystemSnapshotTakesNothingBack(t *testing.T) {
	t.Parallel()
	for _, compact := range []bool{false, true} {
		t.Run(fmt.Sprintf("compacted %v", compact), func(t *testing.T) {
			// No other leader while the snapshot is kept, also on a slow machine: one
			// of an older term is refused.
			k := newKit(t, testcluster.Options{Configure: func(_ int, o *cluster.Options) { o.ElectionTimeout = time.Second }})
			l := k.Leader(base.SystemGroup)
			f := (l + 1) % 3
			send, err := k.Node(l).SystemSnapshot()
			if err != nil {
				t.Fatal(err)
			}
			for i := range 20 {
				if _, _, _, err := k.Node(l).Declare(k.ctx(), state.Declaration{Keyspace: "kit", Name: fmt.Sprint("x", i), Kind: state.KindValue,
					KeyType: keygroup.String, ValueType: keygroup.String}); err != nil {
					t.Fatal(err)
				}
			}
			rev, last := k.Node(l).SystemState()
			k.Eventually("the follower is level", func() error {
				if r, i := k.Node(f).SystemState(); r < rev || i < last {
					return fmt.Errorf("revision %d, index %d", r, i)
				}
				return nil
			})
			if compact {
				if err := k.Node(f).CompactSystem(); err != nil {
					t.Fatal(err)
				}
			}
			before, end := k.Node(f).SystemState()
			if err := send(testcluster.ID(f)); err != nil {
				t.Fatalf("the leader is told %v", err)
			}
			if r, i := k.Node(f).SystemState(); r < before || i < end {
				t.Fatalf("the follower went back from revision %d, index %d to %d, %d", before, end, r, i)
			}
		})
	}
}

// One node after the other loses its log: generations are the shard's, so each
// new replica gets a number that no other had, and every one comes back (R3).
func TestEveryNodeInTurnIsRebuilt(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e})
		for round, lost := range []string{"raftlog", "groups", "raftlog", "groups"} {
			i := round % 3
			fill(k, 20)
			k.Stop(i)
			remove(t, filepath.Join(k.Dir(i), lost))
			k.Start(i)
			k.Eventually("the cluster is healthy again", func() error { return k.healthy(i) })
			// Healthy means that the next node may be lost at once.
			k.checkHashes()
		}
		if got := k.sum("s"); got != 80 {
			t.Fatalf("sum %d, want 80", got)
		}
	})
}

// healthy says whether the status of the cluster, seen from the node beside a
// rebuilt one, shows no problem, and fails the test if it does so, or counts the
// node as a voter, before the node votes.
func (k *kit) healthy(rebuilt int) error {
	k.t.Helper()
	other := k.Node((rebuilt + 1) % 3)
	if other.CountsAsVoter(k.ctx(), 1, testcluster.ID(rebuilt)) {
		if err := k.votes(rebuilt); err != nil {
			k.t.Fatalf("another node counts it as a voter: %v", err)
		}
	}
	st, err := other.Status(k.ctx())
	if err != nil {
		return err
	}
	if len(st.Problems) > 0 {
		return errors.New(strings.Join(st.Problems, "; "))
	}
	if err := k.votes(rebuilt); err != nil {
		k.t.Fatalf("the status shows no problem: %v", err)
	}
	return nil
}

// The data of another node is refused by name, before anything is served.
func TestDirectoryOfAnotherNodeIsRefused(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("a", "1"))
	f := k.follower()
	other := (f + 1) % 3
	k.Stop(f)
	k.Stop(other)
	replace(t, filepath.Join(k.Dir(f), "raftlog"), filepath.Join(k.Dir(other), "raftlog"))
	err := k.TryStart(f)
	if err == nil || !strings.Contains(err.Error(), "not this node's raft log") {
		t.Fatalf("starting on another node's raft log: %v", err)
	}
	replace(t, k.Dir(f), k.Dir(other))
	err = k.TryStart(f)
	if err == nil || !strings.Contains(err.Error(), "belongs to node") {
		t.Fatalf("starting on another node's directory: %v", err)
	}
	k.Start(other)
}

// level says whether a node's replica has applied what the leader has.
func (k *kit) level(node int) error {
	leader, err := k.Node(k.Leader(1)).NodeStatus(k.ctx())
	if err != nil {
		return err
	}
	st, err := k.Node(node).NodeStatus(k.ctx())
	if err != nil {
		return err
	}
	want, got := uint64(0), uint64(0)
	for _, g := range leader.Groups {
		if g.Group == 1 {
			want = g.Applied
		}
	}
	for _, g := range st.Groups {
		if g.Group == 1 {
			got = g.Applied
		}
	}
	if got < want {
		return fmt.Errorf("applied %d of %d", got, want)
	}
	return nil
}

func (k *kit) votes(node int) error {
	st, err := k.Node(node).NodeStatus(k.ctx())
	if err != nil {
		return err
	}
	i := slices.IndexFunc(st.Groups, func(g cluster.GroupStatus) bool { return g.Group == 1 })
	if i < 0 || !st.Groups[i].Voter {
		return fmt.Errorf("not a voter: %+v", st.Groups)
	}
	// One that is being replaced still votes.
	if want := base.MakeReplicaID(testcluster.ID(node), k.generation(node)); st.Groups[i].Replica != want {
		return fmt.Errorf("%s is there, not %s", st.Groups[i].Replica, want)
	}
	return nil
}

func remove(t *testing.T, dir string) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
}

func replace(t *testing.T, dir, by string) {
	t.Helper()
	remove(t, dir)
	copyDir(t, by, dir)
}

func copyDir(t *testing.T, from, to string) {
	t.Helper()
	if err := os.MkdirAll(to, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}

// A session's number is applied once, whoever leads when it is sent again
// (B10, B12 at this level).
func TestSessionNumberIsAppliedOnceAcrossLeaders(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e})
		k.mustWrite(k.add("s", 5))
		for range 4 {
			old := k.Leader(1)
			k.Restart(old)
			leader := k.Leader(1)
			res := k.submit(leader, k.request(k.seq, k.add("s", 5)))
			if res.Err != nil {
				if !base.SentinelOf(res.Err).Retryable {
					t.Fatalf("repeating %d: %v", k.seq, res.Err)
				}
				continue
			}
			if !res.Replayed {
				t.Fatalf("number %d was executed again", k.seq)
			}
		}
		if got := k.sum("s"); got != 5 {
			t.Fatalf("sum %d, want 5", got)
		}
	})
}

// B01: a leader that is cut off from its peers serves nothing stale on any read
// path, however long it believes that it leads.
func TestIsolatedLeaderServesNothingStale(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("k", "1"), k.appendTo("l", "1"), k.mapPut("m", "u", "1"), k.add("s", 1))
	old := k.Leader(1)
	var others []string
	for _, i := range k.Running() {
		if i != old {
			others = append(others, string(testcluster.ID(i)))
		}
	}
	stop := make(chan struct{})
	served := make(chan string, 1000)
	finished := make(chan struct{})
	acked := make(chan struct{})
	go func() { // reads at the old leader in a tight loop
		defer close(finished)
		queries := []state.Query{
			{State: k.values, Kind: state.QueryGet, Key: []byte("k")},
			{State: k.lists, Kind: state.QueryPage, Key: []byte("l")},
			{State: k.maps, Kind: state.QueryGet, Key: []byte("m"), UserKey: []byte("u")},
			{State: k.sums, Kind: state.QueryGet, Key: []byte("s")},
			{State: k.maps, Kind: state.QueryPage, Key: []byte("m")},
		}
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			after := false
			select {
			case <-acked:
				after = true
			default:
			}
			a, err := k.readAt(old, 300*time.Millisecond, queries[n%len(queries)])
			if err == nil && after && isFirst(a) {
				select {
				case served <- fmt.Sprintf("query %d served %+v after the overwrite was acknowledged", n%len(queries), a):
				default:
				}
			}
		}
	}()
	k.Net.Isolate(string(testcluster.ID(old)), others...)
	k.Eventually("another node leads", func() error {
		for _, i := range k.Running() {
			if i != old && k.Node(i).Leads(1) {
				return nil
			}
		}
		return fmt.Errorf("not yet")
	})
	leader := -1
	for _, i := range k.Running() {
		if i != old && k.Node(i).Leads(1) {
			leader = i
		}
	}
	k.seq++
	res := k.submit(leader, k.request(k.seq, k.put("k", "2"), k.appendTo("l", "2"), k.mapPut("m", "u", "2"), k.add("s", 1)))
	if res.Err != nil {
		t.Fatalf("write at the new leader: %v", res.Err)
	}
	close(acked)
	// Long enough for many reads at the old leader, then heal.
	reads := 0
	for start := time.Now(); time.Since(start) < time.Second || reads == 0; {
		_, err := k.readAt(leader, time.Second, state.Query{State: k.values, Kind: state.QueryGet, Key: []byte("k")})
		switch {
		case err == nil:
			reads++
		case errors.Is(err, base.ErrNotLeader) && time.Since(start) < 20*time.Second:
			for i := range 3 { // the other of the two may lead by now
				if i != old && k.Node(i).Leads(1) {
					leader = i
				}
			}
		case !errors.Is(err, base.ErrNoQuorum) || time.Since(start) > 20*time.Second:
			// A busy machine may not bring an answer within two election timeouts.
			t.Fatalf("read at the new leader: %v", err)
		}
	}
	k.Net.HealAll()
	k.Eventually("the old leader follows", func() error { return k.level(old) })
	close(stop)
	<-finished
	select {
	case s := <-served:
		t.Fatal(s)
	default:
	}
	k.checkHashes()
}

// isFirst says whether an answer shows the first writes only.
func isFirst(a state.Answer) bool {
	switch {
	case len(a.Elements) > 0:
		return len(a.Elements) == 1
	case len(a.Entries) > 0:
		return string(a.Entries[0].Value) == "1"
	case len(a.Value) == 8:
		return a.Value[7] == 1
	}
	return string(a.Value) == "1"
}
