//go:build linux

package nemesis

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/keelstate/keelstate/jepsen/faultfs"
	"github.com/keelstate/keelstate/jepsen/host"
)

func diskFaults(e *Env) []*fault {
	kind := e.Fleet.Nodes[0].Disk.Kind
	on := func(kinds ...host.DiskKind) error {
		for _, k := range kinds {
			if k == kind {
				return nil
			}
		}
		return fmt.Errorf("the disks are %s, not %v", kind, kinds)
	}
	faulty := on(host.DiskFault)
	slowLacks := faulty
	if slowLacks != nil && kind == host.DiskPlain {
		if slowLacks = e.groupLacks(host.CapBlkio); slowLacks == nil {
			slowLacks = host.Throttles(e.Fleet.Nodes[0].Disk.Dir)
		}
	}
	return []*fault{
		{name: "slow-disk", kind: KindSlowDisk, inject: e.slowDisk, lacks: slowLacks},
		{name: "hung-disk", kind: KindHungDisk, inject: e.hungDisk(always(e.one)), lacks: on(host.DiskFault, host.DiskExt4)},
		{name: "hung-disk-leader", kind: KindHungDisk, inject: e.hungDisk(e.leader), lacks: on(host.DiskFault, host.DiskExt4)},
		{name: "full-disk", kind: KindFullDisk, inject: e.fullDisk(always(e.one)), lacks: on(host.DiskFault, host.DiskExt4, host.DiskTmpfs)},
		{name: "full-disk-leader", kind: KindFullDisk, inject: e.fullDisk(e.leader), lacks: on(host.DiskFault, host.DiskExt4, host.DiskTmpfs)},
		{name: "full-disk-all", kind: KindFullDisk, inject: e.fullDisk(always(e.all)), lacks: on(host.DiskFault, host.DiskExt4, host.DiskTmpfs)},
		{name: "fsync-error", kind: KindFsyncError, inject: e.fsyncError(always(e.one)), lacks: faulty},
		{name: "fsync-error-leader", kind: KindFsyncError, inject: e.fsyncError(e.leader), lacks: faulty},
		{name: "fsync-error-all", kind: KindFsyncError, halts: true, inject: e.fsyncError(always(e.all)), lacks: faulty},
		{name: "read-error", kind: KindReadError, inject: e.readError, lacks: faulty},
		{name: "power-loss-one", kind: KindPowerLoss, inject: e.powerLoss(always(e.one)), lacks: faulty},
		{name: "power-loss-minority", kind: KindPowerLoss, inject: e.powerLoss(always(e.some)), lacks: faulty},
		{name: "power-loss-all", kind: KindPowerLoss, halts: true, inject: e.powerLoss(always(e.all)), lacks: faulty},
		{name: "lying-fsync", kind: KindLyingFsync, alone: true, inject: e.lyingFsync, lacks: faulty},
		{name: "bit-flip", kind: KindBitFlip, inject: e.bitFlip},
	}
}

// withRule injects a rule into the disks of nodes. Its heal tells how many calls
// it hit; it is idle if there was none.
func withRule(nodes []*host.Node, description string, rule faultfs.Rule) (*Injection, error) {
	ids, hits := make(map[*host.Node]int), 0
	in, err := inject(nodes, description, func(n *host.Node) error {
		id, err := n.Disk.Fault.Inject(rule)
		ids[n] = id
		return err
	}, func(n *host.Node) error {
		got, err := n.Disk.Fault.Remove(ids[n]) // 0 is no rule
		hits += got                             // 0 for one that was removed before
		return err
	})
	if err != nil {
		return nil, err
	}
	heal, told := in.Heal, false
	in.Heal = func(ctx context.Context) error {
		err := heal(ctx)
		if err == nil && !told {
			told, in.Idle = true, hits == 0
			in.add(fmt.Sprintf("it hit %d calls", hits))
		}
		return err
	}
	return in, nil
}

func (e *Env) slowDisk(_ context.Context, rnd *rand.Rand) (*Injection, error) {
	nodes := e.one(rnd)
	if e.Fleet.Nodes[0].Disk.Fault == nil {
		rate := []int64{200_000, 1_000_000, 5_000_000}[rnd.IntN(3)]
		return inject(nodes, fmt.Sprintf("the disk of %s writes %d kB/s", nodes[0].ID, rate/1000),
			func(n *host.Node) error { return n.Group.LimitDisk(n.Disk.Dir, rate) },
			func(n *host.Node) error { return n.Group.LimitDisk(n.Disk.Dir, 0) })
	}
	delay := []time.Duration{10, 50, 200, 1000}[rnd.IntN(4)] * time.Millisecond
	return withRule(nodes, fmt.Sprintf("every fsync of %s takes %s more", nodes[0].ID, delay),
		faultfs.Rule{Ops: []faultfs.Op{faultfs.OpSync, faultfs.OpSyncDir}, Delay: delay})
}

func (e *Env) hungDisk(choose chooser) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
		nodes, err := choose(ctx, rnd)
		if err != nil {
			return nil, err
		}
		if nodes[0].Disk.Kind == host.DiskExt4 {
			return inject(nodes, "the disk of "+nodes[0].ID+" is frozen", func(n *host.Node) error { return n.Disk.Freeze(true) },
				func(n *host.Node) error { return errors.Join(n.Disk.Freeze(false), e.up(n)) })
		}
		rule, what := faultfs.Rule{Ops: []faultfs.Op{faultfs.OpSync, faultfs.OpSyncDir, faultfs.OpWrite}, Stall: true}, "writes and fsyncs"
		if rnd.IntN(2) == 0 {
			rule.Ops, what = []faultfs.Op{faultfs.OpSync}, "fsyncs"
		}
		return e.thenUp(withRule(nodes, fmt.Sprintf("%s of %s hang", what, nodes[0].ID), rule))
	}
}

// thenUp makes a heal also start targets that ended because of the fault.
func (e *Env) thenUp(in *Injection, err error) (*Injection, error) {
	if err != nil {
		return nil, err
	}
	heal := in.Heal
	in.Heal = func(ctx context.Context) error {
		failed := heal(ctx)
		for _, id := range in.Targets {
			failed = errors.Join(failed, e.up(e.Fleet.Node(id)))
		}
		return failed
	}
	return in, nil
}

func (e *Env) fullDisk(choose chooser) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
		nodes, err := choose(ctx, rnd)
		if err != nil {
			return nil, err
		}
		leave := []int64{0, 64 << 10, 4 << 20}[rnd.IntN(3)]
		return e.thenUp(inject(nodes, fmt.Sprintf("%d bytes are left on the disk of %s", leave, list(names(nodes))),
			func(n *host.Node) error { return n.Disk.Fill(leave) }, func(n *host.Node) error { return n.Disk.Unfill() }))
	}
}

// fsyncError makes fsyncs fail. The nodes must end by themselves; healing reboots
// them, so that they do not take their page cache for their disk. When all fail at
// once, what one of them has acknowledged beyond its disk is lost for good.
func (e *Env) fsyncError(choose chooser) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
		nodes, err := choose(ctx, rnd)
		if err != nil {
			return nil, err
		}
		rule, what := faultfs.Rule{Ops: []faultfs.Op{faultfs.OpSync}, Errno: "EIO", Skip: rnd.IntN(20)}, "all"
		if rnd.IntN(2) == 0 {
			rule.Count, what = 1, "one"
		}
		in, err := withRule(nodes, fmt.Sprintf("after %d more fsyncs of %s, %s will fail", rule.Skip, list(names(nodes)), what), rule)
		if err != nil {
			return nil, err
		}
		return e.rebooted(in, nodes, rnd.Uint64()), nil
	}
}

// rebooted makes a heal also kill the nodes, drop what they had not synced, and
// start them. Only the first heal that succeeds does.
func (e *Env) rebooted(in *Injection, nodes []*host.Node, seed uint64) *Injection {
	heal, done := in.Heal, false
	in.Heal = func(ctx context.Context) error {
		if err := heal(ctx); err != nil || done {
			return err
		}
		var outcomes []string
		for _, n := range nodes {
			outcome := n.ID + " had not ended by itself"
			if code, ended := n.Ended(); ended {
				outcome = fmt.Sprintf("%s had ended by itself, with code %d", n.ID, code)
			}
			outcomes = append(outcomes, outcome)
		}
		release := e.holdDown(nodes)
		_, err := e.Fleet.PowerLoss(nodes, faultfs.DropAll, seed)
		if done = err == nil; done {
			in.add(strings.Join(outcomes, ", "))
		}
		return errors.Join(err, release())
	}
	return in
}

// readError makes files of a victim unreadable until it is healed (NE6).
func (e *Env) readError(_ context.Context, rnd *rand.Rand) (*Injection, error) {
	nodes, err := e.victim(rnd)
	if err != nil {
		return nil, err
	}
	glob := []string{"*.sst", "*"}[rnd.IntN(2)]
	return e.thenUp(withRule(nodes, fmt.Sprintf("reads of %s of %s fail", glob, nodes[0].ID),
		faultfs.Rule{Ops: []faultfs.Op{faultfs.OpRead}, Path: glob, Errno: "EIO", Skip: rnd.IntN(5), Count: 1 + rnd.IntN(20)}))
}

func drawMode(rnd *rand.Rand) faultfs.CrashMode {
	return []faultfs.CrashMode{faultfs.DropAll, faultfs.DropAll, faultfs.KeepPrefix, faultfs.KeepSubset}[rnd.IntN(4)]
}

// powerLoss takes the power from nodes whose disks are honest.
func (e *Env) powerLoss(choose chooser) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(ctx context.Context, rnd *rand.Rand) (*Injection, error) {
		nodes, err := choose(ctx, rnd)
		if err != nil {
			return nil, err
		}
		mode, seed := drawMode(rnd), rnd.Uint64()
		release := e.holdDown(nodes)
		reports, err := e.Fleet.PowerLoss(nodes, mode, seed)
		if err != nil {
			return nil, errors.Join(err, release())
		}
		var lost []string
		for i, r := range reports {
			lost = append(lost, fmt.Sprintf("%s (%s)", nodes[i].ID, r))
		}
		return newInjection(names(nodes), "power loss: "+strings.Join(lost, "; "), func(context.Context) error { return release() }), nil
	}
}

// lyingFsync lets a victim's disk lie until it is healed: then it loses power, and
// starts when the others hold everything (see the rule of damage).
func (e *Env) lyingFsync(_ context.Context, rnd *rand.Rand) (*Injection, error) {
	nodes, err := e.victim(rnd)
	if err != nil {
		return nil, err
	}
	victim, mode, seed := nodes[0], drawMode(rnd), rnd.Uint64()
	in, err := withRule(nodes, fmt.Sprintf("the disk of %s lies about every fsync, and then loses power (%s, seed %d)", victim.ID, mode, seed),
		faultfs.Rule{Lie: true})
	if err != nil {
		return nil, err
	}
	honest, lost, proved := in.Heal, false, false
	release := func() error { return nil }
	in.Heal = func(ctx context.Context) error {
		if !lost {
			hold := e.holdDown(nodes)
			reports, err := e.Fleet.PowerLoss(nodes, mode, seed)
			if err != nil {
				return errors.Join(err, hold())
			}
			lost, release = true, hold
			in.add(reports[0].String())
		}
		if err := honest(ctx); err != nil {
			return err
		}
		// Without proof it stays down, and the next heal asks again.
		if !proved {
			if err := e.proveWithout(ctx, victim); err != nil {
				return fmt.Errorf("%s stays down: %w", victim.ID, err)
			}
			proved = true
		}
		return release()
	}
	return in, nil
}

// proveLimit is how long the others may take to hold everything.
const proveLimit = 90 * time.Second

// proveWithout waits until every shard has committed an entry that the nodes
// besides one have: then they have all that was ever acknowledged.
func (e *Env) proveWithout(ctx context.Context, down *host.Node) error {
	ctx, cancel := context.WithTimeout(ctx, proveLimit)
	defer cancel()
	var last error
	for limit := 5 * time.Second; ; limit = min(2*limit, 20*time.Second) {
		// The question waits for the node that is down too, so on a busy machine it
		// needs longer than its answer.
		err := e.committedWithout(ctx, down, limit)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil {
			last = err
		}
		if !pauseFor(ctx, 200*time.Millisecond) {
			return errors.Join(last, ctx.Err())
		}
	}
}

// digits of names tell files of one class apart.
var digits = regexp.MustCompile(`[0-9a-f]{8,}|[0-9]+`)

// unread are files that a node writes and never reads, where a flip shows nothing:
// the reserve of space, and RocksDB's log of messages.
var unread = regexp.MustCompile(`^(BALLAST|LOG(\.old.*)?)$`)

// flipTarget draws a file of a victim: first a class of files, such as the tables
// of the stores or the node's IDENTITY, all equally likely, then one of the class.
func (e *Env) flipTarget(rnd *rand.Rand, n *host.Node) (path string, size int64, err error) {
	files, err := n.Files()
	if err != nil {
		return "", 0, err
	}
	sizes, classes := make(map[string]int64), make(map[string][]string)
	for _, path := range files {
		info, err := os.Stat(path)
		if err != nil || info.Size() == 0 || unread.MatchString(filepath.Base(path)) {
			continue
		}
		sizes[path] = info.Size()
		class := digits.ReplaceAllString(strings.TrimPrefix(path, n.Disk.Dir), "#")
		classes[class] = append(classes[class], path)
	}
	if len(classes) == 0 {
		return "", 0, fmt.Errorf("%s has no files: %w", n.ID, ErrNotNow)
	}
	all := classes[slices.Sorted(maps.Keys(classes))[rnd.IntN(len(classes))]]
	path = all[rnd.IntN(len(all))]
	return path, sizes[path], nil
}

// bitFlip kills a victim, flips one bit of one of its files, and starts it when it
// is healed.
func (e *Env) bitFlip(_ context.Context, rnd *rand.Rand) (*Injection, error) {
	nodes, err := e.victim(rnd)
	if err != nil {
		return nil, err
	}
	n := nodes[0]
	release := e.holdDown(nodes)
	if err := n.Kill(); err != nil {
		return nil, errors.Join(err, release())
	}
	path, size, err := e.flipTarget(rnd, n)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	flip := faultfs.Flip{Offset: rnd.Int64N(size), Bit: uint8(rnd.IntN(8))}
	rel, err := filepath.Rel(n.Disk.Dir, path)
	if err == nil {
		if n.Disk.Fault != nil {
			err = n.Disk.Fault.FlipStored(rel, flip)
		} else {
			err = flipPlain(path, flip)
		}
	}
	if err != nil {
		return nil, errors.Join(err, release())
	}
	return newInjection(names(nodes), fmt.Sprintf("kill -9 of %s; bit %d of byte %d of %d of %s is flipped", n.ID, flip.Bit, flip.Offset, size, rel),
		func(context.Context) error { return release() }), nil
}

func flipPlain(path string, flip faultfs.Flip) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	var p [1]byte
	if _, err = f.ReadAt(p[:], flip.Offset); err == nil || errors.Is(err, io.EOF) {
		p[0] ^= 1 << flip.Bit
		_, err = f.WriteAt(p[:], flip.Offset)
	}
	return errors.Join(err, f.Close())
}
