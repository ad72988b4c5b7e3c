package cluster

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

// A scrub reads all files of a replica and checks them, so that rot is found
// while the other replicas are whole, and not when the last good copy is needed
// (design, section 9). What is found damaged is rebuilt from the peers under R3,
// as soon as these are a quorum by themselves.

// scrubState is what a replica knows about its scrubs.
type scrubState struct {
	running atomic.Int32
	// at is when the last whole one ended, in ns since 1970; 0: never.
	at atomic.Int64
	// giving: one goroutine waits to give the replica up.
	giving atomic.Bool
	// looking: one goroutine looks whether what a read met is damage.
	looking atomic.Bool
	// refusedAt is when a refused snapshot last had the replica scrubbed; nil: never.
	refusedAt atomic.Pointer[time.Time]
}

// suspectBytesPerSecond bounds the scrub of a replica of which a read has met
// damage: others wait for its disk too, but not for as long as at other scrubs.
const suspectBytesPerSecond = 128 << 20

// suspect has the replica scrubbed if err, of a read, says that its files are
// damaged, and so rebuilt if they are. What a read says is not believed alone: it
// may be of what was asked for, or of a transfer from the disk. It returns err.
func (r *replica) suspect(err error) error {
	if !errors.Is(err, base.ErrCorrupt) || r.scrubs.giving.Load() || !r.scrubs.looking.CompareAndSwap(false, true) {
		return err
	}
	r.logger.Error("a read met damage; the replica is scrubbed", "error", err)
	r.spawn(func() {
		defer r.scrubs.looking.Store(false)
		if _, serr := r.scrub(r.ctx, suspectBytesPerSecond); serr != nil && r.ctx.Err() == nil {
			r.logger.Warn("scrubbing after a read met damage", "error", serr)
		}
		// Whoever asks again and again for what only looks like damage must not
		// keep the disk busy.
		select {
		case <-time.After(suspectPause):
		case <-r.ctx.Done():
		}
	})
	return err
}

// suspectPause is the least time between the scrubs of one replica that reads
// have caused.
const suspectPause = 10 * time.Second

// snapshotRefused has this replica, a leader, scrubbed where its snapshot was not
// taken because its files are damaged. The other side may err, about its own disk
// perhaps, and asks again and again: not more than once in a while.
func (r *replica) snapshotRefused(err error) {
	if !errors.Is(err, base.ErrCorrupt) {
		return
	}
	last, now := r.scrubs.refusedAt.Load(), time.Now()
	if (last == nil || now.Sub(*last) >= refusedPause) && r.scrubs.refusedAt.CompareAndSwap(last, &now) {
		_ = r.suspect(err)
	}
}

// refusedPause is the least time between the scrubs that refused snapshots cause.
const refusedPause = 10 * time.Minute

// scrubLoop scrubs the replicas of this node, one at a time, each once per
// Options.ScrubInterval.
func (n *Node) scrubLoop() {
	interval := n.opts.ScrubInterval
	if interval < 0 {
		return
	}
	due := scrubTimes{}
	pause := max(min(interval/100, time.Minute), time.Millisecond)
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-tick.C:
		}
		r := due.next(n.runningReplicas(), interval)
		if r == nil {
			continue
		}
		// Not two replicas of a shard at once, as far as one sees: both disks would
		// be slow. The others that are due go first.
		if r.healthy() != nil || n.peerScrubs(r) {
			due[r] = time.Now().Add(pause)
			continue
		}
		due[r] = time.Now().Add(interval)
		if _, err := r.scrub(n.ctx, n.opts.ScrubBytesPerSecond); err != nil && n.ctx.Err() == nil {
			r.logger.Warn("scrubbing", "error", err)
		}
	}
}

// scrubTimes say when each replica is to be scrubbed next.
type scrubTimes map[*replica]time.Time

// next returns the replica that has waited longest past its time, nil if none
// has. A replica that is new gets a first time at random, so that the nodes of a
// cluster that were started together do not scrub together.
func (due scrubTimes) next(running []*replica, interval time.Duration) *replica {
	now := time.Now()
	known := make(map[*replica]bool, len(running))
	var next *replica
	for _, r := range running {
		known[r] = true
		if _, ok := due[r]; !ok {
			due[r] = now.Add(rand.N(interval) + 1)
		}
		if !due[r].After(now) && (next == nil || due[r].Before(due[next])) {
			next = r
		}
	}
	for r := range due {
		if !known[r] {
			delete(due, r)
		}
	}
	return next
}

// peerScrubs says whether another replica of the shard is being scrubbed, or
// cannot be asked.
func (n *Node) peerScrubs(r *replica) bool {
	rec, err := n.shardRecord(r.id)
	if err != nil {
		return true
	}
	for _, rep := range rec.Replicas {
		if rep.Node == n.opts.NodeID {
			continue
		}
		st, err := n.groupStatusOf(rep.Node, r.id)
		if err != nil {
			continue // a peer that is down reads nothing
		}
		if st.Scrubbing {
			return true
		}
	}
	return false
}

func (n *Node) groupStatusOf(node base.NodeID, g base.GroupID) (*GroupStatus, error) {
	ctx, cancel := context.WithTimeout(n.ctx, 2*n.opts.ElectionTimeout)
	defer cancel()
	var st NodeStatus
	if err := n.callShard(ctx, node, methodStatus, shardRequest{}, &st); err != nil {
		return nil, err
	}
	for i := range st.Groups {
		if st.Groups[i].Group == g {
			return &st.Groups[i], nil
		}
	}
	return nil, fmt.Errorf("node %s has no replica of %s: %w", node, g, base.ErrNoSuchShard)
}

// ScrubShard makes every replica read and check all of its files, one replica
// after the other, as fast as the disk goes. A replica that cannot be asked has
// an error in its place.
func (n *Node) ScrubShard(ctx context.Context, shard base.GroupID) ([]ReplicaScrub, error) {
	rec, err := n.shardRecord(shard)
	if err != nil {
		return nil, err
	}
	out := make([]ReplicaScrub, len(rec.Replicas))
	for i, rep := range rec.Replicas {
		if err := n.callShard(ctx, rep.Node, methodScrub, shardRequest{Group: shard}, &out[i]); err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			out[i] = ReplicaScrub{Error: err.Error()}
		}
		out[i].Node = rep.Node
		if out[i].Replica == "" {
			out[i].Replica = rep.ReplicaID
		}
	}
	return out, nil
}

// scrub reads and checks all files of the replica, at most rate bytes a second
// (0: no bound), and has it rebuilt if something is damaged. An error means that
// not everything could be read; what was found by then counts all the same.
func (r *replica) scrub(ctx context.Context, rate int64) (*ReplicaScrub, error) {
	if err := r.healthy(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	r.scrubs.running.Add(1)
	defer r.scrubs.running.Add(-1)
	p := &pacer{ctx: ctx, rate: rate, start: time.Now(), read: r.node.metrics.scrubBytes.WithLabelValues(r.id.String())}
	out := &ReplicaScrub{Node: r.opts.NodeID, Replica: r.replica}
	var damage []error
	var failed error
	for _, part := range []struct {
		name   string
		verify func(func(int64) error) error
	}{{"store", r.verifyStore}, {"snapshot", r.snaps.verify}, {"raftlog", r.log.Verify}} {
		err := part.verify(p.pace)
		switch {
		case err == nil:
		case errors.Is(err, base.ErrCorrupt), errors.Is(err, base.ErrFormatVersion): // the version was known when it was opened
			out.Findings = append(out.Findings, ScrubFinding{Part: part.name, Detail: bounded(err.Error())})
			damage = append(damage, err)
			r.logger.Error("a scrub found damage", "part", part.name, "found", err)
		default:
			failed = errors.Join(failed, fmt.Errorf("reading the %s: %w", part.name, err))
		}
	}
	out.Bytes, out.Took = uint64(p.bytes), time.Since(p.start)
	r.node.metrics.scrubFindings.WithLabelValues(r.id.String()).Add(float64(len(damage)))
	if len(damage) > 0 {
		r.giveUp(errors.Join(damage...))
	}
	if failed != nil {
		out.Error = failed.Error()
		return out, failed
	}
	r.scrubs.at.Store(time.Now().UnixNano())
	return out, nil
}

// maxDetail bounds what is told of one part: an answer must fit into a message.
const maxDetail = 16 << 10

func bounded(text string) string {
	if len(text) <= maxDetail {
		return text
	}
	return strings.ToValidUTF8(text[:maxDetail], "") + " ... and more"
}

// scrubNow answers keelctl: what could not be read is told in the answer, beside
// what was found.
func (r *replica) scrubNow(ctx context.Context) (*ReplicaScrub, error) {
	out, err := r.scrub(ctx, 0)
	if out != nil {
		return out, nil
	}
	return nil, err
}

// giveUp has the replica replaced as soon as the other voters are a quorum by
// themselves; only then, when the record of the shard says so, does it stop.
// Before that it goes on: a scrub must never take the last replicas that still
// answer from a shard whose others are damaged too, or are just being rebuilt.
func (r *replica) giveUp(found error) {
	if !r.scrubs.giving.CompareAndSwap(false, true) {
		return
	}
	r.spawn(func() {
		defer r.scrubs.giving.Store(false)
		said := false
		for r.damage.Load() == nil {
			err := r.node.replaceDamaged(r.ctx, damageReport{Group: r.id, Node: r.opts.NodeID, Generation: r.generation})
			if err == nil {
				// The reconciler ends it by the record, like every replaced one;
				// another may be there already.
				r.logger.Error("a replica that a scrub found damaged is rebuilt from its peers under a new id", "damage", found)
				r.node.metrics.damaged.WithLabelValues(r.id.String()).Inc()
				r.node.poke()
				return
			}
			if !said {
				r.logger.Warn("a damaged replica goes on until the others are a quorum", "damage", found, "error", err)
				said = true
			}
			r.leaveOffice()
			select {
			case <-r.ctx.Done():
				return
			case <-time.After(r.opts.CheckInterval/2 + rand.N(r.opts.CheckInterval)):
			}
		}
	})
}

// leaveOffice hands the office of a damaged replica to one that has found no damage.
// A replica that is being rebuilt gets its files from the leader: if those are the
// damaged ones it would never be a part of the quorum that this one waits for.
func (r *replica) leaveOffice() {
	rec, err := r.node.shardRecord(r.id)
	if _, notLeading := r.leading(); notLeading != nil || err != nil {
		return
	}
	for _, rep := range rec.Replicas {
		if rep.Role != meta.RoleVoter || rep.Node == r.opts.NodeID {
			continue
		}
		st, err := r.node.groupStatusOf(rep.Node, r.id)
		if err != nil || !st.Voter || !st.Ready || st.Damage != "" || st.DamageFound {
			continue
		}
		r.logger.Info("handing over: a scrub found damage here", "to", string(rep.Node))
		ctx, cancel := context.WithTimeout(r.ctx, configTimeout)
		err = r.transferTo(ctx, rep.Node)
		cancel()
		if err == nil {
			return
		}
		r.logger.Warn("handing over", "error", err)
	}
}

func (r *replica) verifyStore(pace func(int64) error) error {
	store, release, err := r.machine.Store()
	if err != nil {
		return err
	}
	defer release()
	v, ok := store.(engine.Verifier)
	if !ok {
		return fmt.Errorf("verifying a store of %s in use: %w", store.Stats().Implementation, base.ErrUnsupported)
	}
	return v.VerifyFiles(pace)
}

// pacer bounds what a scrub reads.
type pacer struct {
	ctx   context.Context
	rate  int64 // bytes a second; 0: no bound
	start time.Time
	bytes int64
	read  prometheus.Counter
}

func (p *pacer) pace(n int64) error {
	p.bytes += n
	p.read.Add(float64(n))
	if err := p.ctx.Err(); err != nil || p.rate == 0 {
		return err
	}
	wait := time.Duration(float64(p.bytes)/float64(p.rate)*float64(time.Second)) - time.Since(p.start)
	if wait < 10*time.Millisecond {
		return nil // too short to sleep for; it adds up
	}
	select {
	case <-p.ctx.Done():
		return p.ctx.Err()
	case <-time.After(wait):
		return nil
	}
}

// verify reads all files of all snapshots. One that is removed meanwhile is no
// failure.
func (s *snapStore) verify(pace func(int64) error) error {
	names, err := dirNames(s.snapshots())
	if err != nil {
		return fmt.Errorf("listing snapshots: %w", err)
	}
	var damage []error
	for _, id := range names {
		if strings.HasPrefix(id, "tmp-") {
			continue
		}
		err := s.verifyOne(id, pace)
		if _, serr := os.Stat(filepath.Join(s.snapshots(), id)); errors.Is(serr, fs.ErrNotExist) {
			continue
		}
		if err != nil && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
			return errors.Join(append(damage, err)...)
		}
		damage = append(damage, err)
	}
	return errors.Join(damage...)
}

func (s *snapStore) verifyOne(id string, pace func(int64) error) error {
	m, err := s.readMeta(id)
	if err != nil {
		return err
	}
	raw, err := s.readManifest(m)
	if err != nil {
		return err
	}
	manifest, err := snapshot.Decode(raw)
	if err != nil {
		return fmt.Errorf("snapshot %s: %w", id, err)
	}
	if err := pace(int64(len(raw))); err != nil {
		return err
	}
	var damage []error
	for i := range manifest.Files {
		path := filepath.Join(s.snapshots(), id, "files", manifest.Files[i].Name)
		if err := verifyFile(path, &manifest.Files[i], pace); errors.Is(err, base.ErrCorrupt) {
			damage = append(damage, err)
		} else if err != nil {
			return errors.Join(append(damage, err)...)
		}
	}
	return errors.Join(damage...)
}

// verifyFile reads one file, from the disk where the system allows it, and
// compares it with what the manifest says.
func verifyFile(path string, want *snapshot.File, pace func(int64) error) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is missing: %w", path, base.ErrCorrupt)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) // a wish
	h := sha256.New()
	buf := make([]byte, 256<<10)
	size := int64(0)
	for {
		n, err := f.Read(buf)
		h.Write(buf[:n])
		size += int64(n)
		if perr := pace(int64(n)); perr != nil {
			return perr
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("reading %s at offset %d: %w: %w", path, size, base.ErrDiskFailed, err)
		}
	}
	switch {
	case size != want.Size:
		return fmt.Errorf("%s has %d bytes, the manifest says %d: %w", path, size, want.Size, base.ErrCorrupt)
	case [sha256.Size]byte(h.Sum(nil)) != want.SHA256:
		return fmt.Errorf("%s: its content is not what the manifest says: %w", path, base.ErrCorrupt)
	}
	return nil
}
