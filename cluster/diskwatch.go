package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// diskWatch looks after what a sick disk would do to the cluster (design,
// section 9).
//
// A hung disk: raft's main loop waits for the log while heartbeats go on, so
// that nobody else would ever lead. Once a write of the log is older than
// Options.SyncLimit all Raft traffic of the node is muted until it returns.
//
// A full disk: a ballast file holds back space. When what is left is low, the
// node hands its offices over, refuses writes that add data, and says so; deletes
// and Raft's own writes go on. When the log meets the end of the disk all the
// same, the ballast is given up; a log that gets no space even then waits, which
// is a hung disk to the others. With space back, everything is undone.
type diskWatch struct {
	node *Node
	// failed: the node ends; what is muted stays muted.
	failed atomic.Bool
	hung   atomic.Bool
	low    atomic.Bool
	// shedding: one goroutine hands offices over.
	shedding atomic.Bool
	// free and floor are those of the last look, for messages.
	free, floor atomic.Uint64
}

const (
	ballastFile = "BALLAST"
	maxBallast  = 256 << 20
	// minFloor is the least free space, where the volume is not tiny.
	minFloor = 32 << 20
	// spaceInterval is how often the free space is looked at.
	spaceInterval = time.Second
)

// DiskSpace is the room on a volume, in bytes.
type DiskSpace struct{ Free, Total uint64 }

// diskSpace asks the operating system about the volume that holds dir.
func diskSpace(dir string) (DiskSpace, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return DiskSpace{}, fmt.Errorf("asking for the free space of %s: %w", dir, err)
	}
	size := uint64(st.Bsize)
	return DiskSpace{Free: st.Bavail * size, Total: st.Blocks * size}, nil
}

// ballastFor is how much of a volume is held back: 1 %, at most 256 MiB.
func ballastFor(total uint64) uint64 { return min(total/100, maxBallast) }

// floorFor is the free space, ballast aside, below which a node adds no data.
func floorFor(total uint64) uint64 { return min(max(2*ballastFor(total), minFloor), total/10) }

// run looks at the disk until the node closes. A look at the space may hang with
// the disk, which must still be noticed: it has a goroutine of its own.
func (d *diskWatch) run() {
	d.node.spawn(func() {
		d.checkSpace()
		d.every(spaceInterval, d.checkSpace)
	})
	d.every(max(d.node.opts.SyncLimit/12, time.Millisecond), d.checkHung)
}

func (d *diskWatch) every(interval time.Duration, look func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-d.node.ctx.Done():
			return
		case <-tick.C:
		}
		look()
	}
}

// checkHung mutes the node while a write of its log is over the limit.
func (d *diskWatch) checkHung() {
	age := d.node.log.OldestPendingSync()
	hung := age > d.node.opts.SyncLimit
	if d.hung.Swap(hung) == hung {
		return
	}
	d.mute()
	if hung {
		d.node.logger.Error("the disk hangs: a write of the raft log has not returned; the node is silent, so that others lead",
			"age", age, "limit", d.node.opts.SyncLimit)
	} else {
		d.node.logger.Warn("the disk answers again; the node is no longer silent")
	}
	d.node.poke()
}

// mute drops or lets through Raft's traffic, by what is known.
func (d *diskWatch) mute() {
	d.node.transport.Mute(d.hung.Load() || d.failed.Load())
}

// checkSpace looks at the free space, and acts on a change.
func (d *diskWatch) checkSpace() {
	space, err := d.node.opts.DiskSpace(d.node.opts.DataDir)
	if err != nil {
		d.node.logger.Warn("looking at the disk", "error", err)
		return
	}
	floor := floorFor(space.Total)
	d.free.Store(space.Free)
	d.floor.Store(floor)
	low := d.low.Load()
	switch {
	case !low && space.Free < floor:
		d.low.Store(true)
		d.node.logger.Error("the disk is nearly full: writes that add data are refused, and others lead",
			"dir", d.node.opts.DataDir, "free", space.Free, "floor", floor)
		d.node.poke()
	case low && space.Free > floor+floor/2:
		d.low.Store(false)
		d.node.logger.Warn("the disk has space again", "dir", d.node.opts.DataDir, "free", space.Free)
		d.node.poke()
	}
	if d.low.Load() {
		// Beside the looks: a transfer waits for raft's main loop, which a hung
		// disk may hold.
		if d.shedding.CompareAndSwap(false, true) {
			d.node.spawn(func() {
				defer d.shedding.Store(false)
				d.shed()
			})
		}
	} else if err := d.ballast(space); err != nil {
		d.node.logger.Warn("holding back space", "error", err)
	}
}

// ballast makes the ballast file where it is missing and there is room for it.
func (d *diskWatch) ballast(space DiskSpace) error {
	size := ballastFor(space.Total)
	if size == 0 {
		return nil
	}
	path := filepath.Join(d.node.opts.DataDir, ballastFile)
	if st, err := os.Stat(path); err == nil && uint64(st.Size()) >= size {
		return nil
	}
	if space.Free < 2*floorFor(space.Total)+size {
		return nil // it would make the disk low
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil {
		return errors.Join(fmt.Errorf("allocating %s: %w", path, err), f.Close(), os.Remove(path))
	}
	return f.Close()
}

// full is what the log calls when the disk refused it a write: the ballast is
// given up for Raft's own writes.
func (d *diskWatch) full() {
	err := os.Remove(filepath.Join(d.node.opts.DataDir, ballastFile))
	if err == nil {
		d.node.logger.Error("the disk is full; the space that was held back is given to the raft log", "dir", d.node.opts.DataDir)
	} else if !errors.Is(err, fs.ErrNotExist) {
		d.node.logger.Error("giving up the space that was held back", "error", err)
	}
	d.low.Store(true)
}

// shed hands every office of this node to a voter whose disk has space.
func (d *diskWatch) shed() {
	n := d.node
	v, err := n.metaView()
	if err != nil {
		return
	}
	if s := n.system.Load(); s != nil {
		if _, err := s.leading(); err == nil {
			for _, rec := range v.Nodes() {
				if rec.DiskID != "" && d.handOver(&s.group, rec.ID) {
					break
				}
			}
		}
	}
	for _, rec := range v.Shards() {
		r, err := n.replicaOf(rec.ID)
		if err != nil {
			continue
		}
		if _, err := r.leading(); err != nil {
			continue
		}
		for _, rep := range rec.Replicas {
			if rep.Role == meta.RoleVoter && d.handOver(&r.group, rep.Node) {
				break
			}
		}
	}
}

// handOver tries to hand a group's office to a node that says it can take it.
func (d *diskWatch) handOver(g *group, to base.NodeID) bool {
	if to == d.node.opts.NodeID {
		return false
	}
	ctx, cancel := context.WithTimeout(d.node.ctx, g.opts.ElectionTimeout)
	defer cancel()
	if _, err := d.node.transport.Call(ctx, to, methodHello, nil); err != nil {
		return false
	}
	g.logger.Info("handing over: the disk is nearly full", "to", string(to))
	ctx, cancel = context.WithTimeout(d.node.ctx, configTimeout)
	defer cancel()
	if err := g.transferTo(ctx, to); err != nil {
		g.logger.Warn("handing over", "error", err)
		return false
	}
	return true
}

// sick says in words what is wrong with the disk, empty if nothing is.
func (d *diskWatch) sick() string {
	switch {
	case d.failed.Load():
		return "the node has failed and stops; its log says why"
	case d.hung.Load():
		return fmt.Sprintf("the disk hangs: a write of the raft log has not returned for more than %s", d.node.opts.SyncLimit)
	case d.low.Load():
		return fmt.Sprintf("the disk is nearly full: %d MiB are free in %s, %d MiB are needed; free some space",
			d.free.Load()>>20, d.node.opts.DataDir, d.floor.Load()>>20)
	}
	return ""
}

// refuse refuses a write that adds data while the disk is nearly full.
func (d *diskWatch) refuse(req *raftfsm.Request) error {
	if !d.low.Load() || !adds(req) {
		return nil
	}
	return &base.Error{Cause: base.ErrDiskFull, Ordinal: -1, RetryAfter: spaceInterval,
		Hint: fmt.Sprintf("node %s: %s, or delete data; another node takes over if it can", d.node.opts.NodeID, d.sick())}
}

// adds says whether a request may add data: it does more than clear and remove.
func adds(req *raftfsm.Request) bool {
	for i := range req.Mutations {
		switch m := &req.Mutations[i].Mutation; {
		case m.Op == state.OpClear, m.Op == state.OpMapRemove:
		case m.Op == state.OpListUpdate && len(m.Elements) == 0: // a clear
		default:
			return true
		}
	}
	return false
}
