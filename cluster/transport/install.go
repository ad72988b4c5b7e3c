package transport

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// ErrHaveSnapshot is what a PrepareSnapshot hook returns when there is nothing
// to prepare: GroupOptions.HasSnapshot would say so now. The leader is told
// success without raft.
var ErrHaveSnapshot = errors.New("the replica holds what the snapshot covers, and more")

// progressTick is how often the receiver of a snapshot tells the sender how
// far it is.
const progressTick = time.Second

// maxInstallWaiters bounds the requests that wait for one preparation.
const maxInstallWaiters = 8

// progressKey finds the progress counter in a context.
type progressKey struct{}

// ReportProgress says that a PrepareSnapshot hook got n units (bytes, files)
// further. ctx is the hook's context; in any other it does nothing.
func ReportProgress(ctx context.Context, n int) {
	if p, ok := ctx.Value(progressKey{}).(*atomic.Uint64); ok && n > 0 {
		p.Add(uint64(n))
	}
}

// InstallSnapshot implements raft.Transport. data is a manifest of at most
// MaxManifest bytes. The call lasts as long as the receiver makes progress.
func (g *Group) InstallSnapshot(id raft.ServerID, target raft.ServerAddress, args *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, data io.Reader) error {
	if g.quiet() {
		return g.silenced()
	}
	if args.Size < 0 || args.Size > MaxManifest || args.SnapshotVersion != raft.SnapshotVersionMax {
		return fmt.Errorf("sending a snapshot of group %s with %d bytes, version %d: %w", g.id, args.Size, args.SnapshotVersion, base.ErrTooLarge)
	}
	manifest := make([]byte, args.Size)
	if _, err := io.ReadFull(data, manifest); err != nil {
		return fmt.Errorf("reading the manifest of group %s: %w", g.id, err)
	}
	conn, err := g.installConn(base.NodeID(target))
	if err != nil {
		return err
	}
	type answer struct {
		body []byte
		err  error
	}
	got := make(chan answer, 1)
	moved := make(chan struct{}, 1)
	var last atomic.Uint64
	p := &pending{
		done: func(body []byte, err error) { got <- answer{body, err} },
		progress: func(n uint64) {
			if last.Swap(n) != n {
				select {
				case moved <- struct{}{}:
				default:
				}
			}
		},
	}
	stall := time.NewTimer(g.t.opts.StallTimeout)
	defer stall.Stop()
	req, err := conn.start(putInstall(beginFrame(len(manifest)+512), id, args, manifest), typeInstall, g.id, p, g.done,
		time.Now().Add(g.t.opts.StallTimeout))
	if err != nil {
		return fmt.Errorf("sending a snapshot of group %s: %w", g.id, err)
	}
	for {
		select {
		case a := <-got:
			if a.err != nil {
				if refused := g.opts.SnapshotRefused; refused != nil {
					refused(a.err)
				}
				return fmt.Errorf("installing a snapshot of group %s on %s: %w", g.id, target, a.err)
			}
			if g.quiet() {
				return g.silenced()
			}
			return decodeInstallResponse(a.body, resp)
		case <-moved:
			stall.Reset(g.t.opts.StallTimeout)
		case <-stall.C:
			conn.forget(req)
			return fmt.Errorf("installing a snapshot of group %s on %s: no progress for %v: %w", g.id, target, g.t.opts.StallTimeout, base.ErrUnavailable)
		case <-g.done:
			conn.forget(req)
			return g.gone()
		}
	}
}

func (g *Group) installConn(node base.NodeID) (*clientConn, error) {
	if node == g.t.opts.Identity.Node {
		return nil, fmt.Errorf("sending a snapshot of group %s to its own node: %w", g.id, base.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(g.ctx, g.t.opts.SmallTimeout)
	defer cancel()
	conn, err := g.t.peer(node).call.get(ctx)
	if err == nil && conn.limited {
		err = base.ErrNotFounded
	}
	if err != nil {
		return nil, fmt.Errorf("sending a snapshot of group %s: %w", g.id, err)
	}
	return conn, nil
}

// installer runs at most one preparation at a time for its group.
type installer struct {
	mu sync.Mutex
	op *installOp // guarded by mu; nil while nothing is prepared or handed over
}

// installOp is one content on its way in: first it is prepared, then each term
// that asked for it hands it to raft once. It lives until the preparation has
// ended and the last request that waits has left.
type installOp struct {
	content  [sha256.Size]byte
	term     uint64 // highest that asked, guarded by installer.mu
	waiters  int    // guarded by installer.mu
	ended    bool   // preparation ended, guarded by installer.mu
	handed   map[uint64]*handOver
	cancel   context.CancelFunc
	progress atomic.Uint64
	prepared chan struct{} // closed when the preparation has ended
	err      error         // of the preparation; set before prepared is closed
}

// handOver is one InstallSnapshot in raft, shared by requests of one term.
type handOver struct {
	done chan struct{}
	resp any
	err  error
}

func contentKey(m *raft.InstallSnapshotRequest, manifest []byte) [sha256.Size]byte {
	h := sha256.New()
	var b [24]byte
	binary.LittleEndian.PutUint64(b[0:], m.LastLogIndex)
	binary.LittleEndian.PutUint64(b[8:], m.LastLogTerm)
	binary.LittleEndian.PutUint64(b[16:], m.ConfigurationIndex)
	h.Write(b[:])
	h.Write(m.Configuration)
	h.Write(manifest)
	return [sha256.Size]byte(h.Sum(nil))
}

func (g *Group) snapshotMeta(m *raft.InstallSnapshotRequest) SnapshotMeta {
	return SnapshotMeta{
		Group: g.id, Term: m.Term, LastIndex: m.LastLogIndex, LastTerm: m.LastLogTerm,
		Configuration: raft.DecodeConfiguration(m.Configuration), ConfigurationIndex: m.ConfigurationIndex,
	}
}

// haveSnapshot is the answer for a snapshot that the replica needs no more.
func haveSnapshot(m *raft.InstallSnapshotRequest) *raft.InstallSnapshotResponse {
	return &raft.InstallSnapshotResponse{RPCHeader: m.RPCHeader, Term: m.Term, Success: true}
}

// join finds or starts the preparation of a content. Another content is
// refused as busy; if a newer leader sends it, the old preparation is stopped,
// so that the leader's next try succeeds.
func (g *Group) join(m *raft.InstallSnapshotRequest, manifest []byte, from base.NodeID) (*installOp, error) {
	key := contentKey(m, manifest)
	in := &g.install
	in.mu.Lock()
	defer in.mu.Unlock()
	if op := in.op; op != nil {
		if op.content != key {
			if m.Term > op.term {
				op.cancel()
			}
			return nil, fmt.Errorf("installing a snapshot of group %s: another one is being prepared: %w", g.id, base.ErrOverloaded)
		}
		if op.waiters >= maxInstallWaiters {
			return nil, fmt.Errorf("installing a snapshot of group %s: too many requests for it: %w", g.id, base.ErrOverloaded)
		}
		op.term = max(op.term, m.Term)
		op.waiters++
		return op, nil
	}
	ctx, cancel := context.WithCancel(g.ctx)
	op := &installOp{
		content: key, term: m.Term, waiters: 1, handed: make(map[uint64]*handOver),
		cancel: cancel, prepared: make(chan struct{}),
	}
	meta := g.snapshotMeta(m)
	if !g.t.spawn(func() { g.prepare(context.WithValue(ctx, progressKey{}, &op.progress), op, meta, manifest, from) }) {
		cancel()
		return nil, g.gone()
	}
	in.op = op
	return op, nil
}

func (g *Group) prepare(ctx context.Context, op *installOp, meta SnapshotMeta, manifest []byte, from base.NodeID) {
	defer op.cancel()
	if hook := g.opts.PrepareSnapshot; hook != nil {
		if err := hook(ctx, meta, manifest, from); err != nil {
			op.err = fmt.Errorf("preparing a snapshot of group %s at index %d: %w", g.id, meta.LastIndex, err)
		}
	}
	g.install.mu.Lock()
	op.ended = true
	g.install.dropLocked(op)
	g.install.mu.Unlock()
	close(op.prepared)
}

func (in *installer) leave(op *installOp) {
	in.mu.Lock()
	defer in.mu.Unlock()
	op.waiters--
	in.dropLocked(op)
}

func (in *installer) dropLocked(op *installOp) {
	if op.ended && op.waiters == 0 && in.op == op {
		in.op = nil
	}
}

// handToRaft gives a prepared snapshot to raft, once per term, unless the replica
// has got further meanwhile.
func (g *Group) handToRaft(op *installOp, m *raft.InstallSnapshotRequest, manifest []byte) *handOver {
	g.install.mu.Lock()
	h, shared := op.handed[m.Term]
	if !shared {
		h = &handOver{done: make(chan struct{})}
		op.handed[m.Term] = h
	}
	g.install.mu.Unlock()
	if !shared {
		g.enqueue(inbound{
			cmd: m, reader: bytes.NewReader(manifest), size: len(manifest),
			respond: func(resp any, err error) { h.resp, h.err = resp, err; close(h.done) },
			instead: func() (any, bool, error) {
				if g.opts.HasSnapshot == nil {
					return nil, false, nil
				}
				have, err := g.opts.HasSnapshot(g.snapshotMeta(m))
				if err != nil {
					return nil, false, fmt.Errorf("comparing a snapshot of group %s with what the replica has: %w", g.id, err)
				}
				return haveSnapshot(m), have, nil
			},
		}, false)
	}
	return h
}

// serveInstall handles an InstallSnapshot in a goroutine of its own.
func (c *serverConn) serveInstall(f frame) {
	g := c.t.group(f.group)
	if g == nil {
		c.replyError(f, fmt.Errorf("serving group %s: %w", f.group, base.ErrNoSuchShard))
		return
	}
	if g.quiet() {
		c.replyError(f, g.silenced())
		return
	}
	target, m, manifest, err := decodeInstall(f.body)
	if err == nil {
		err = g.checkTarget(target)
	}
	if err != nil {
		c.replyError(f, err)
		return
	}
	op, err := g.join(m, manifest, c.peer.Node)
	if err != nil {
		c.replyError(f, err)
		return
	}
	defer g.install.leave(op)
	if err = c.await(g, f, op, op.prepared); err == nil {
		err = op.err
	}
	if errors.Is(err, ErrHaveSnapshot) && !g.quiet() {
		c.replyRaft(f, haveSnapshot(m), nil)
		return
	}
	if err != nil {
		c.replyInstallError(g, f, err)
		return
	}
	h := g.handToRaft(op, m, manifest)
	if err = c.await(g, f, op, h.done); err == nil {
		err = h.err
	}
	if err != nil {
		c.replyInstallError(g, f, err)
		return
	}
	if g.quiet() {
		c.replyError(f, g.silenced())
		return
	}
	c.replyRaft(f, h.resp, nil)
}

// replyInstallError refuses an install. A mute does so too (TR4): nothing but an
// answer ends the sender's wait before its StallTimeout, long after the mute; an
// error is no contact to raft.
func (c *serverConn) replyInstallError(g *Group, f frame, err error) {
	if errors.Is(err, errConnGone) {
		return
	}
	if g.quiet() {
		err = g.silenced()
	}
	c.replyError(f, err)
}

// errConnGone: there is nobody left to answer.
var errConnGone = errors.New("the connection of the request is closed")

// await waits for done and tells the sender about progress meanwhile.
func (c *serverConn) await(g *Group, f frame, op *installOp, done <-chan struct{}) error {
	tick := time.NewTicker(progressTick)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return nil
		case <-c.done:
			return errConnGone
		case <-g.done:
			return g.gone()
		case <-tick.C:
			if g.quiet() {
				return g.silenced() // what it waits for may have been dropped
			}
			c.reply(frame{typ: typeInstallProgress, group: f.group, id: f.id}, putU64(beginFrame(8), op.progress.Load()))
		}
	}
}
