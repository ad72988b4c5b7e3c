package crashtest

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	keel "github.com/keelstate/keelstate/client"
)

// ways says how a cluster comes to a point, where load alone does not bring it
// there.
var ways = map[string]func(*run){
	"raftlog.mark.before-write":     idle,
	"raftlog.term.before-store":     handOver,
	"raftlog.term.after-store":      handOver,
	"raftlog.vote.before-candidate": handOver,
	"raftlog.create-group.begin":    atStart,
	"raftlog.recover.before-mend":   atStart,
	"raftlog.recover.before-sync":   atStart,
	"raftlog.tombstone.begin":       rebuilt,

	"raftfsm.init.begin":              founding,
	"raftfsm.session.create":          withSessions,
	"raftfsm.session.forget":          withSessions,
	"raftfsm.declare.families-made":   withStates,
	"raftfsm.drop-family.begin":       withStates,
	"raftfsm.drop-family.end":         withStates,
	"raftfsm.swap.begin":              behind,
	"raftfsm.swap.adopted":            behind,
	"snapshot.fetch.part-made":        behind,
	"snapshot.fetch.before-rename":    behind,
	"snapshot.fetch.file-done":        behind,
	"snapshot.fetch.before-sync":      behind,
	"snapshot.link.before-file":       behind,
	"snapshot.link.before-sync":       behind,
	"rocks.create-family.end":         withStates,
	"cluster.identity.before-save":    atStart,
	"cluster.identity.before-copy":    atStart,
	"cluster.identity.saved":          atStart,
	"cluster.file.before-rename":      founding,
	"cluster.file.before-dir-sync":    atStart,
	"cluster.boot.before-count":       atStart,
	"cluster.boot.log-counted":        atStart,
	"cluster.replica.log-made":        founding,
	"cluster.replica.noted":           founding,
	"cluster.replica.store-open":      atStart,
	"cluster.damage.before-mark":      rebuilt,
	"cluster.retire.before-tombstone": rebuilt,
	"cluster.retire.before-rename":    rebuilt,
	"cluster.retire.before-remove":    rebuilt,

	"cluster.anew.before-current":       spoiled,
	"cluster.anew.after-current":        spoiled,
	"cluster.install.begin":             behind,
	"cluster.install.linked":            behind,
	"cluster.install.before-current":    behind,
	"cluster.install.after-current":     behind,
	"cluster.install.before-remove-old": behind,

	"cluster.office.before-term-start":  handOver,
	"cluster.office.term-start-applied": handOver,
	"cluster.office.taken":              handOver,
	"cluster.transfer.begin":            handAway,
	"cluster.transfer.end":              handAway,
	"cluster.members.before-remove":     rebuilding,
	"cluster.members.removed":           rebuilding,
	"cluster.members.learner-added":     rebuilding,
	"cluster.members.before-promote":    rebuilding,
	"cluster.members.promoted":          rebuilding,

	"cluster.barrier.before-propose":     checkpointing,
	"cluster.upload.flushed":             checkpointing,
	"cluster.upload.begin":               checkpointing,
	"cluster.upload.ahead":               checkpointing,
	"cluster.upload.segments":            checkpointing,
	"cluster.changelog.ahead":            checkpointing,
	"cluster.upload.stored":              checkpointing,
	"cluster.checkpoint.before-propose":  checkpointing,
	"cluster.checkpoint.before-metadata": checkpointing,
	"cluster.checkpoint.after-metadata":  checkpointing,
	"cluster.checkpoint.before-delete":   checkpointing,

	"cluster.links.before-manifest": checkpointing,

	"rocks.clip.family":   restoring,
	"rocks.absorb.family": restoring,

	"cluster.restore.declared":       restoring,
	"cluster.restore.begin":          restoring,
	"cluster.restore.fetched":        restoring,
	"cluster.restore.assembled":      restoring,
	"cluster.restore.before-publish": restoring,
	"cluster.restore.published":      restoring,

	"raftfsm.rollback.fenced":          rollingBack,
	"raftfsm.rollback.begin":           rollingBack,
	"raftfsm.rollback.sealed":          rollingBack,
	"raftfsm.rollback.before-adopt":    rollingBack,
	"raftfsm.rollback.adopted":         rollingBack,
	"raftfsm.rollback.reopened":        rollingBack,
	"cluster.rollback.begin":           rollingBack,
	"cluster.rollback.fetched":         rollingBack,
	"cluster.rollback.before-prepared": rollingBack,
	"cluster.rollback.before-propose":  rollingBack,
	"cluster.rollback.opened":          rollingBack,
	"cluster.rollback.before-current":  rollingBack,
	"cluster.rollback.after-current":   rollingBack,
	"cluster.rollback.cut":             rollingBack,
	"cluster.rollback.before-remove":   rollingBack,
	"cluster.remove.aside":             rollingBack,

	"cluster.metadata.before-propose": sessionsAnywhere,
	"cluster.metadata.before-apply":   withSessions,
	"cluster.metadata.applied":        withSessions,
	"cluster.metadata.before-note":    withSessions,
	"cluster.metadata.restore":        atStart,
	"cluster.system-snapshot.begin":   withSessions,
	"cluster.system-snapshot.written": withSessions,
	"cluster.session.opened":          sessionsAnywhere,
	"cluster.found.before-bootstrap":  founding,
	"cluster.found.admitted-here":     admitting,
	"cluster.found.all-admitted":      founding,
	"cluster.found.before-place":      founding,
	"cluster.found.before-done":       founding,
}

func nothing(context.Context) error { return nil }

func (c *run) any() int { return c.r.IntN(len(c.n)) }

// underLoad: load alone comes there, on any node.
func underLoad(c *run) {
	c.loaded()
	c.arm(c.r.IntN(4), c.any())
	c.crash(nothing)
}

// idle: the load must end first.
func idle(c *run) {
	c.loaded()
	l := c.l
	c.l = nil
	l.end()
	c.arm(c.r.IntN(4), c.any())
	c.crash(nothing)
	l.judge(c.s)
}

// atStart: a node comes there when it starts.
func atStart(c *run) {
	c.loaded()
	i := c.any()
	c.kill(i)
	c.startArmed(i, 0)
	c.crash(nothing)
}

// spoiled: the stores of a node cannot be opened.
func spoiled(c *run) {
	c.loaded()
	i := c.any()
	c.kill(i)
	stores, err := filepath.Glob(filepath.Join(c.n[i].dir, "groups", "*", "*", "store-*", "MANIFEST*"))
	if err != nil || len(stores) == 0 {
		c.t.Fatalf("no store has a MANIFEST: %v", err)
	}
	for _, path := range stores {
		raw, err := os.ReadFile(path)
		if err == nil && len(raw) > 20 {
			raw[20] ^= 1
			err = os.WriteFile(path, raw, 0o600)
		}
		if err != nil {
			c.t.Fatal(err)
		}
	}
	c.startArmed(i, 0)
	c.crash(nothing)
}

// handOver: a node becomes the leader of a shard.
func handOver(c *run) {
	c.loaded()
	i := c.any()
	c.arm(c.r.IntN(2), i)
	other := (i + 1) % len(c.n)
	c.crash(func(context.Context) error {
		shard := fmt.Sprint(1 + c.r.IntN(2))
		_, err := c.ctl("shard", "transfer", shard, "--to", c.n[i].id, "--timeout", "3s")
		if err == nil {
			_, err = c.ctl("shard", "transfer", shard, "--to", c.n[other].id, "--timeout", "3s")
		}
		return err
	})
}

// handAway: a leader hands a shard over; whoever leads then.
func handAway(c *run) {
	c.loaded()
	c.arm(0, 0, 1, 2)
	c.crash(func(context.Context) error {
		_, err := c.ctl("shard", "transfer", "1", "--to", c.n[c.any()].id, "--timeout", "3s")
		return err
	})
}

// openAndClose is a session that writes and ends.
func (c *run) openAndClose(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	cl, err := keel.Open(ctx, c.endpoints)
	if err != nil {
		return err
	}
	defer closeClient(cl)
	v, err := keel.DeclareValue(ctx, cl.Keyspace("crash", keel.String.Type()), "probe", keel.Int64)
	for i := int64(0); i < 8 && err == nil; i++ {
		_, err = v.Set(ctx, fmt.Sprint("session", i), i)
	}
	return err
}

// withSessions: sessions come and go; every node comes there.
func withSessions(c *run) {
	c.loaded()
	c.arm(c.r.IntN(2), c.any())
	c.crash(c.openAndClose)
}

// sessionsAnywhere: sessions come and go; one node comes there.
func sessionsAnywhere(c *run) {
	c.loaded()
	c.arm(c.r.IntN(3), 0, 1, 2)
	c.crash(c.openAndClose)
}

// withStates: states are declared, written and dropped.
func withStates(c *run) {
	c.loaded()
	cl, n := c.client(), 0
	c.arm(c.r.IntN(2), c.any())
	c.crash(func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		n++
		name := fmt.Sprint("passing-", n)
		v, err := keel.DeclareValue(ctx, cl.Keyspace("crash", keel.String.Type()), name, keel.Int64)
		for i := int64(0); i < 8 && err == nil; i++ {
			_, err = v.Set(ctx, fmt.Sprint(i), i)
		}
		if err == nil {
			err = cl.Drop(ctx, "crash", name)
		}
		return err
	})
}

// checkpointing: checkpoints are made, and older ones deleted; one node comes
// there.
func checkpointing(c *run) {
	c.loaded()
	c.checkpoints = true
	c.arm(c.r.IntN(3), 0, 1, 2)
	c.crash(func(context.Context) error {
		_, err := c.ctl("checkpoint", "create", "--timeout", "20s")
		return err
	})
}

// restoring: what three nodes have checkpointed is restored into three others,
// with another number of shards; whoever places them, or has a part of them, comes
// there. What was counted before is there then.
func restoring(c *run) {
	c.loaded()
	l := c.l
	c.l = nil
	l.end()
	l.judge(c.s)
	count(c.t, c.s, 50)
	want := total(c.t, c.s)
	if _, err := c.ctl("checkpoint", "create", "--timeout", "60s"); err != nil {
		c.t.Fatal(err)
	}
	out, err := c.ctl("checkpoint", "show", "1", "-o", "json", "--columns", "uri")
	var shown struct{ URI string }
	if err == nil {
		err = json.Unmarshal(out, &shown)
	}
	if err != nil || shown.URI == "" {
		c.t.Fatalf("%v in %q", err, out)
	}
	for i := range c.n {
		c.kill(i)
		if err := os.RemoveAll(c.n[i].dir); err != nil {
			c.t.Fatal(err)
		}
	}
	if c.point == "cluster.restore.declared" {
		for i := range c.n {
			c.startArmed(i, 0) // whoever leads
		}
	} else {
		one := c.any()
		for i := range c.n {
			if i != one {
				c.start(i)
			}
		}
		c.startArmed(one, c.r.IntN(3))
	}
	again := func(context.Context) error {
		_, err := c.ctl(append(c.initArgs(3), "--restore", shown.URI, "--wait", "5s")...)
		return err
	}
	c.crash(again)
	eventually(c.t, "the cluster is restored", func() error { return again(c.t.Context()) })
	c.checkpoints = true
	c.s = declare(c.t, c.client())
	c.serves(c.s.probe)
	if got := total(c.t, c.s); got != want {
		c.t.Errorf("%d were counted, %d are restored", want, got)
	}
}

// rollingBack: the cluster is rolled back to a checkpoint, again until somebody has
// come there. What was counted before the checkpoint is there then, and no more.
func rollingBack(c *run) {
	c.loaded()
	l := c.l
	c.l = nil
	l.end()
	l.judge(c.s)
	count(c.t, c.s, 50)
	want := total(c.t, c.s)
	if _, err := c.ctl("checkpoint", "create", "--timeout", "60s"); err != nil {
		c.t.Fatal(err)
	}
	count(c.t, c.s, 20)
	back := func(context.Context) error {
		_, err := c.ctl("checkpoint", "rollback", "1", "--yes", "--timeout", "20s")
		return err
	}
	if c.point == "cluster.rollback.before-propose" {
		c.arm(c.r.IntN(4), 0, 1, 2) // whoever leads
	} else {
		c.arm(c.r.IntN(2), c.any())
	}
	c.crash(back)
	eventually(c.t, "the cluster is rolled back", func() error { return back(c.t.Context()) })
	c.checkpoints = true
	c.s = declare(c.t, c.client())
	c.serves(c.s.probe)
	if got := total(c.t, c.s); got != want {
		c.t.Errorf("%d were counted by the checkpoint, %d are there", want, got)
	}
}

// checkpointed demands that a checkpoint can be made, and that whatever is kept is
// whole.
func (c *run) checkpointed() {
	c.t.Helper()
	eventually(c.t, "a checkpoint completes", func() error {
		_, err := c.ctl("checkpoint", "create", "--timeout", "20s")
		return err
	})
	out, err := c.ctl("checkpoint", "list", "-o", "json")
	if err != nil {
		c.t.Fatal(err)
	}
	var list struct {
		Items []struct {
			Number uint64
			Phase  string
		}
	}
	if err := json.Unmarshal(out, &list); err != nil {
		c.t.Fatalf("%v in %q", err, out)
	}
	kept := 0
	for _, i := range list.Items {
		if i.Phase == "completed" {
			kept++
			if _, err := c.ctl("checkpoint", "verify", fmt.Sprint(i.Number), "--timeout", "60s"); err != nil {
				c.t.Errorf("checkpoint %d: %v", i.Number, err)
			}
		}
	}
	if kept == 0 {
		c.t.Errorf("no checkpoint is kept: %s", out)
	}
}

// behind: a node is down until the others have cut what it misses; it comes
// back, fetches a snapshot and installs it.
func behind(c *run) {
	c.loaded()
	i := c.any()
	c.kill(i)
	c.outrun()
	skip := 0
	if c.point == "snapshot.fetch.file-done" || c.point == "snapshot.link.before-file" {
		skip = c.r.IntN(6)
	}
	c.startArmed(i, skip)
	c.crash(nothing)
}

// outrun waits until the leaders have cut their logs behind what a node that is
// down can know.
func (c *run) outrun() {
	c.t.Helper()
	// Large values fill the logs faster than the load.
	big := string(make([]byte, 16<<10))
	ctx, cancel := context.WithTimeout(c.t.Context(), 60*time.Second)
	defer cancel()
	for n := 0; n < 3; {
		for i := range 16 {
			if _, err := c.s.regs.Set(ctx, fmt.Sprint("big-", i), big); err != nil {
				c.t.Fatalf("outrunning a node: %v", err)
			}
		}
		for shard := 1; shard <= 2; shard++ {
			if _, err := c.ctl("shard", "snapshot", fmt.Sprint(shard), "--timeout", "20s"); err != nil {
				c.t.Logf("snapshot of shard %d: %v", shard, err)
				n-- // it may be taking one already
				break
			}
		}
		n++
	}
}

// lose ends a node and takes its stores, which its log alone cannot make again:
// its replicas are damaged, and rebuilt under new ids.
func (c *run) lose(i int) {
	c.t.Helper()
	eventually(c.t, c.n[i].id+" has cut its logs", func() error {
		list, err := c.call(i, http.MethodGet, "")
		for _, p := range list {
			if p.Name == "raftlog.cut.end" && p.Hits < 6 {
				err = fmt.Errorf("%d times", p.Hits)
			}
		}
		return err
	})
	c.kill(i)
	if err := os.RemoveAll(filepath.Join(c.n[i].dir, "groups")); err != nil {
		c.t.Fatal(err)
	}
}

// rebuilt: a node whose stores are lost comes there.
func rebuilt(c *run) {
	c.loaded()
	i := c.any()
	c.lose(i)
	c.outrun()
	c.startArmed(i, 0)
	c.crash(nothing)
}

// rebuilding: a leader comes there while another node is rebuilt.
func rebuilding(c *run) {
	c.loaded()
	i := c.any()
	c.lose(i)
	c.outrun()
	c.arm(0, (i+1)%3, (i+2)%3)
	c.start(i)
	c.crash(nothing)
}

// founding: the cluster is founded with nodes that crash on the way.
func founding(c *run) {
	found(c, 0, 1, 2)
}

// admitting: a node that is admitted crashes.
func admitting(c *run) { found(c, 1+c.r.IntN(2)) }

func found(c *run, armed ...int) {
	switch c.point {
	case "raftfsm.init.begin", "cluster.replica.log-made", "cluster.replica.noted", "cluster.file.before-rename":
		armed = []int{c.any()} // all of them come there
	}
	for i := range c.n {
		skip := -1
		for _, a := range armed {
			if a == i {
				skip = 0
			}
		}
		switch {
		case skip < 0:
			c.start(i)
		case c.point == "cluster.file.before-rename":
			c.startArmed(i, 1+c.r.IntN(5)) // not its very first file: that is no node yet
		default:
			c.startArmed(i, 0)
		}
	}
	c.crash(func(context.Context) error {
		_, err := c.ctl(append(c.initArgs(2), "--timeout", "5s")...)
		return err
	})
	c.nodes.found(2)
	c.s = declare(c.t, c.client())
	count(c.t, c.s, 60)
	if got := total(c.t, c.s); got != 60 {
		c.t.Errorf("sum %d, want 60", got)
	}
}
