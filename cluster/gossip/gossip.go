package gossip

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/logbridge"
)

// maxKnown bounds the addresses that are tried again (GO4).
const maxKnown = 256

// Options configures a Gossip. Zero values mean the defaults named here.
type Options struct {
	// BindAddr is the address to bind, "ip:port"; UDP and TCP use the same port.
	BindAddr string
	// AdvertiseAddr is the address that others use. Default: the bound one.
	AdvertiseAddr string
	// Seeds are gossip addresses of other nodes. They admit nobody.
	Seeds []string
	// Meta is what this node tells about itself.
	Meta Meta
	// Key encrypts and authenticates gossip: 16, 24 or 32 bytes, the same on
	// all nodes. Empty: in the clear.
	Key []byte
	// Logger; default: discard.
	Logger *slog.Logger
	// ProbeInterval is how often a random member is probed. Default 1 s.
	ProbeInterval time.Duration
	// RejoinInterval is how often missing seeds are tried. Default 5 s.
	RejoinInterval time.Duration
	// DuplicateAfter is how long two processes with one node id must be seen
	// alive before it is reported. Default 30 s, well over the time that a dead
	// process takes to be found.
	DuplicateAfter time.Duration
}

// Member is one node that is believed alive.
type Member struct {
	Meta
	Addr string // gossip address
	boot uint64
}

// process is a live process; ok says whether its metadata can be read.
type process struct {
	Member
	ok bool
}

// Gossip is one node's part in the gossip.
type Gossip struct {
	opts    Options
	boot    uint64
	list    *memberlist.Memberlist
	changed chan struct{} // one slot; never closed
	stop    chan struct{} // closed by Close
	wg      sync.WaitGroup
	once    sync.Once

	mu struct {
		sync.Mutex
		meta       Meta
		encoded    []byte
		known      map[base.NodeID]string    // last gossip address of nodes seen
		doubled    map[base.NodeID]time.Time // since when two processes are seen
		duplicates []base.NodeID             // reported
		foreign    map[string]bool           // names that joined another cluster while listed
		// live holds the processes that memberlist believes alive, by its name for
		// them, as its events said. Its own list is never read: it hands out
		// pointers to what it goes on changing.
		live map[string]process
	}
}

// Start joins the gossip. Seeds that cannot be reached are tried again later,
// so a node may start first.
func Start(o Options) (*Gossip, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.ProbeInterval = cmp.Or(o.ProbeInterval, time.Second)
	o.RejoinInterval = cmp.Or(o.RejoinInterval, 5*time.Second)
	o.DuplicateAfter = cmp.Or(o.DuplicateAfter, 30*time.Second)
	g := &Gossip{opts: o, boot: uint64(time.Now().UnixNano()), changed: make(chan struct{}, 1), stop: make(chan struct{})}
	encoded, err := encodeMeta(o.Meta, g.boot)
	if err != nil {
		return nil, err
	}
	g.mu.meta, g.mu.encoded = o.Meta, encoded
	g.mu.known = make(map[base.NodeID]string)
	g.mu.doubled = make(map[base.NodeID]time.Time)
	g.mu.foreign = make(map[string]bool)
	g.mu.live = make(map[string]process)
	conf, err := g.config()
	if err != nil {
		return nil, err
	}
	if g.list, err = memberlist.Create(conf); err != nil {
		return nil, fmt.Errorf("starting gossip on %s: %w", o.BindAddr, err)
	}
	g.wg.Add(1)
	go func() {
		defer g.wg.Done()
		g.maintain()
	}()
	return g, nil
}

func (g *Gossip) config() (*memberlist.Config, error) {
	c := memberlist.DefaultLANConfig()
	host, port, err := splitAddr("BindAddr", g.opts.BindAddr)
	if err != nil {
		return nil, err
	}
	c.BindAddr, c.BindPort, c.AdvertisePort = host, port, port
	if g.opts.AdvertiseAddr != "" {
		if c.AdvertiseAddr, c.AdvertisePort, err = splitAddr("AdvertiseAddr", g.opts.AdvertiseAddr); err != nil {
			return nil, err
		}
	}
	switch len(g.opts.Key) {
	case 0:
	case 16, 24, 32:
		c.SecretKey = g.opts.Key
	default:
		return nil, base.Invalid("Key", "use 16, 24 or 32 bytes")
	}
	c.Name = g.name()
	c.ProbeInterval = g.opts.ProbeInterval
	c.ProbeTimeout = g.opts.ProbeInterval / 2
	c.GossipInterval = min(c.GossipInterval, g.opts.ProbeInterval/2)
	c.PushPullInterval = 15 * time.Second
	c.EnableCompression = false // a small message cannot become a large one
	c.Logger = logbridge.Standard(g.opts.Logger, "gossip")
	hooks := &delegate{g}
	c.Delegate, c.Events, c.Alive = hooks, hooks, hooks
	return c, nil
}

func splitAddr(field, addr string) (string, int, error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, base.Invalid(field, "use ip:port")
	}
	port, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return "", 0, base.Invalid(field, "use a port from 0 to 65535")
	}
	return host, int(port), nil
}

// name is what memberlist calls this process.
func (g *Gossip) name() string {
	return string(g.opts.Meta.Node) + "@" + strconv.FormatUint(g.boot, 16)
}

// Addr is this node's gossip address.
func (g *Gossip) Addr() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mu.live[g.name()].Addr
}

// updateTimeout bounds the wait until changed metadata was first sent.
const updateTimeout = 2 * time.Second

// SetMeta changes what this node tells, for instance once it has a cluster.
// The node id cannot change.
func (g *Gossip) SetMeta(m Meta) error {
	encoded, err := encodeMeta(m, g.boot)
	if err != nil {
		return err
	}
	if m.Node != g.opts.Meta.Node {
		return base.Invalid("Meta.Node", "a running node keeps its id")
	}
	g.mu.Lock()
	g.mu.meta, g.mu.encoded = m, encoded
	g.mu.Unlock()
	// The others hear of it later if nobody takes the message in time: gossip
	// repeats what a node says about itself.
	if err := g.list.UpdateNode(updateTimeout); err != nil {
		g.opts.Logger.Debug("spreading gossip metadata", "err", err)
	}
	g.notify()
	return nil
}

// Changed brings a value after members may have changed. Changes that nobody
// waits for are merged into one value.
func (g *Gossip) Changed() <-chan struct{} { return g.changed }

func (g *Gossip) notify() {
	select {
	case g.changed <- struct{}{}:
	default:
	}
}

// Members lists the nodes believed alive, this one included, by node id.
func (g *Gossip) Members() []Member {
	best := make(map[base.NodeID]Member)
	for _, m := range g.alive() {
		if old, seen := best[m.Node]; !seen || m.boot > old.boot {
			best[m.Node] = m
		}
	}
	out := make([]Member, 0, len(best))
	for _, m := range best {
		out = append(out, m)
	}
	slices.SortFunc(out, func(a, b Member) int { return cmp.Compare(a.Node, b.Node) })
	return out
}

// alive lists every live process that this node may see (GO3). memberlist still
// lists one under its old metadata after it joined another cluster, since we
// ignored the message that said so.
func (g *Gossip) alive() []Member {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []Member
	for name, p := range g.mu.live {
		if p.ok && !foreign(g.mu.meta.Cluster, p.Cluster) && !g.mu.foreign[name] {
			out = append(out, p.Member)
		}
	}
	return out
}

// judge notes whether a name is foreign. The set is bounded like the addresses:
// names come from the network.
func (g *Gossip) judge(name string, other base.ClusterID) bool {
	g.mu.Lock()
	is := foreign(g.mu.meta.Cluster, other)
	was := g.mu.foreign[name]
	if !is {
		delete(g.mu.foreign, name)
	} else if len(g.mu.foreign) < maxKnown {
		g.mu.foreign[name] = true
	}
	g.mu.Unlock()
	if is != was {
		g.notify()
	}
	return is
}

func foreign(own, other base.ClusterID) bool { return own != "" && other != "" && own != other }

// Duplicates lists node ids that two live processes use (GO5).
func (g *Gossip) Duplicates() []base.NodeID {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.mu.duplicates)
}

// Leave tells the others that this node goes, and waits for that at most
// timeout. Close still has to follow.
func (g *Gossip) Leave(timeout time.Duration) error {
	if err := g.list.Leave(timeout); err != nil {
		return fmt.Errorf("leaving gossip: %w", err)
	}
	return nil
}

// Close stops everything and waits for it. Without Leave the others find out
// by probing.
func (g *Gossip) Close() error {
	var err error
	g.once.Do(func() {
		close(g.stop)
		err = g.list.Shutdown()
		g.wg.Wait()
	})
	if err != nil {
		return fmt.Errorf("closing gossip: %w", err)
	}
	return nil
}

// maintain joins at once and then looks after missing nodes and duplicates.
func (g *Gossip) maintain() {
	for {
		g.checkDuplicates(time.Now())
		g.rejoin()
		half := g.opts.RejoinInterval / 2
		pause := time.NewTimer(half + rand.N(max(half, 1)))
		select {
		case <-pause.C:
		case <-g.stop:
			pause.Stop()
			return
		}
	}
}

// rejoin tries the addresses that no live member has.
func (g *Gossip) rejoin() {
	present := map[string]bool{g.opts.BindAddr: true, g.opts.AdvertiseAddr: true}
	// memberlist calls judge and its events with its own lock held: never ask it
	// for anything with ours held.
	g.mu.Lock()
	for _, p := range g.mu.live {
		present[p.Addr] = true
	}
	var missing []string
	for _, a := range g.opts.Seeds {
		if !present[a] {
			missing = append(missing, a)
			present[a] = true
		}
	}
	for _, a := range g.mu.known {
		if !present[a] {
			missing = append(missing, a)
			present[a] = true
		}
	}
	g.mu.Unlock()
	for _, a := range missing {
		select {
		case <-g.stop:
			return
		default:
		}
		if _, err := g.list.Join([]string{a}); err != nil {
			g.opts.Logger.Debug("a gossip address cannot be reached", "addr", a, "err", err)
		}
	}
}

func (g *Gossip) checkDuplicates(now time.Time) {
	count := make(map[base.NodeID]int)
	for _, m := range g.alive() {
		count[m.Node]++
	}
	g.mu.Lock()
	var fresh []base.NodeID
	before := g.mu.duplicates
	g.mu.duplicates = nil
	for node, since := range g.mu.doubled {
		if count[node] < 2 {
			delete(g.mu.doubled, node)
		} else if now.Sub(since) >= g.opts.DuplicateAfter {
			g.mu.duplicates = append(g.mu.duplicates, node)
			if !slices.Contains(before, node) {
				fresh = append(fresh, node)
			}
		}
	}
	for node, n := range count {
		if _, seen := g.mu.doubled[node]; n > 1 && !seen {
			g.mu.doubled[node] = now
		}
	}
	g.mu.Unlock()
	for _, node := range fresh {
		g.opts.Logger.Error("two live processes use one node id", "node", node)
	}
}

// came notes a live process, and keeps its address for rejoin (GO4).
func (g *Gossip) came(n *memberlist.Node) {
	meta, boot, err := decodeMeta(n.Meta)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.live[n.Name] = process{Member: Member{Meta: meta, Addr: n.Address(), boot: boot}, ok: err == nil}
	if err != nil || meta.Node == g.opts.Meta.Node {
		return
	}
	if _, seen := g.mu.known[meta.Node]; seen || len(g.mu.known) < maxKnown {
		g.mu.known[meta.Node] = n.Address()
	}
}

func (g *Gossip) went(name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.mu.live, name)
}

// delegate is what memberlist calls. Its methods must not block.
type delegate struct{ g *Gossip }

// NodeMeta implements memberlist.Delegate.
func (d *delegate) NodeMeta(int) []byte {
	d.g.mu.Lock()
	defer d.g.mu.Unlock()
	return d.g.mu.encoded
}

// NotifyMsg, GetBroadcasts, LocalState and MergeRemoteState implement
// memberlist.Delegate; nothing but metadata is exchanged.
func (d *delegate) NotifyMsg([]byte)                {}
func (d *delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (d *delegate) LocalState(bool) []byte          { return nil }
func (d *delegate) MergeRemoteState([]byte, bool)   {}

// NotifyJoin implements memberlist.EventDelegate.
func (d *delegate) NotifyJoin(n *memberlist.Node) { d.g.came(n); d.g.notify() }

// NotifyLeave implements memberlist.EventDelegate.
func (d *delegate) NotifyLeave(n *memberlist.Node) { d.g.went(n.Name); d.g.notify() }

// NotifyUpdate implements memberlist.EventDelegate.
func (d *delegate) NotifyUpdate(n *memberlist.Node) { d.g.came(n); d.g.notify() }

var errForeign = errors.New("the node belongs to another cluster")

// NotifyAlive implements memberlist.AliveDelegate: an error ignores the node.
func (d *delegate) NotifyAlive(n *memberlist.Node) error {
	meta, _, err := decodeMeta(n.Meta)
	if err != nil {
		return err
	}
	if d.g.judge(n.Name, meta.Cluster) {
		return errForeign
	}
	return nil
}
