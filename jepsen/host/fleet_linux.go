package host

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/keelstate/keelstate/jepsen/faultfs"
)

// NetMode says how the nodes are connected.
type NetMode string

// The modes of the network.
const (
	// NetAuto is NetNamespaces where they work, else NetLoopback.
	NetAuto       NetMode = "auto"
	NetNamespaces NetMode = "namespaces"
	NetLoopback   NetMode = "loopback"
)

// Options of a fleet.
type Options struct {
	// Nodes is how many there are; default 3. They are called n1, n2, ...
	Nodes int
	// Dir holds disks and logs; it must exist. Required.
	Dir string
	// NodeBinary and CtlBinary are keelstate-node and keelctl. Required.
	NodeBinary, CtlBinary string
	Net                   NetMode
	// Disk is the kind of each node's disk; default DiskPlain. DiskBytes is its
	// size; 0 is the default of the kind (256 MiB for ext4 and tmpfs).
	Disk      DiskKind
	DiskBytes int64
	// Groups puts every node in a control group of its own.
	Groups bool
	// Engine, Memory and Flags go to every node.
	Engine, Memory string
	Flags          []string
	// StoreBinary is a service that speaks S3, versitygw; the fleet then has an
	// object store, and every node uses it. Empty for none.
	StoreBinary string
	// Store is that of another fleet, which this one's nodes use instead; it has to
	// live as long as they.
	Store *Store
}

func (o *Options) ensureDefaults() {
	if o.Nodes == 0 {
		o.Nodes = 3
	}
	if o.Net == "" {
		o.Net = NetAuto
	}
	if o.Disk == "" {
		o.Disk = DiskPlain
	}
	if o.DiskBytes == 0 && (o.Disk == DiskExt4 || o.Disk == DiskTmpfs) {
		o.DiskBytes = 256 << 20
	}
}

// serials numbers the fleets of this process.
var serials atomic.Int64

// Fleet is a cluster's nodes and their network.
type Fleet struct {
	Caps  Capabilities
	Nodes []*Node
	// Net is nil on loopback.
	Net *Network
	// Store is nil without an object store of its own.
	Store *Store

	opts     Options
	name     string
	launcher *launcher
	wg       sync.WaitGroup // one per process: waits for it

	closing  sync.Once
	closeErr error
}

// NewFleet makes the places of the nodes and starts none. Close it even after a
// failure of what follows.
func NewFleet(opts Options) (*Fleet, error) {
	opts.ensureDefaults()
	if opts.Nodes < 1 || opts.Nodes > 100 || opts.Dir == "" {
		return nil, errors.New("a fleet needs a directory and 1 to 100 nodes")
	}
	serial := int(serials.Add(1))
	f := &Fleet{Caps: Detect(), opts: opts, name: fmt.Sprintf("%s%d-%d", namePrefix, os.Getpid(), serial), launcher: newLauncher()}
	err := f.make(serial)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (f *Fleet) make(serial int) error {
	if err := f.Caps.Lacks(diskNeeds[f.opts.Disk]...); err != nil {
		return err
	}
	var ids []string
	for i := range f.opts.Nodes {
		ids = append(ids, "n"+strconv.Itoa(i+1))
	}
	lacks := f.Caps.Lacks(CapNetns, CapNft)
	if f.opts.Net == NetNamespaces && lacks != nil {
		return lacks
	}
	if f.opts.Net != NetLoopback && lacks == nil {
		hosts := ids
		if f.opts.StoreBinary != "" {
			hosts = append(slices.Clone(ids), StoreHost)
		}
		network, err := newNetwork(f.name, serial, hosts)
		if err != nil {
			return fmt.Errorf("making the network: %w", err)
		}
		f.Net = network
	}
	if f.opts.StoreBinary != "" {
		if err := f.newStore(); err != nil {
			return fmt.Errorf("making the object store: %w", err)
		}
	}
	for _, id := range ids {
		n := &Node{ID: id, fleet: f, LogFile: filepath.Join(f.opts.Dir, id+".log")}
		if err := f.place(n); err != nil {
			return fmt.Errorf("making a place for %s: %w", id, err)
		}
	}
	return nil
}

func (f *Fleet) place(n *Node) (err error) {
	host, ports := "127.0.0.1", []string{"7401", "7411", "7421", "7431"}
	if f.Net != nil {
		host = f.Net.Address(n.ID)
	} else if ports, err = freePorts(4); err != nil {
		return err
	}
	n.GRPC, n.Raft, n.Gossip, n.HTTP = net.JoinHostPort(host, ports[0]), net.JoinHostPort(host, ports[1]),
		net.JoinHostPort(host, ports[2]), net.JoinHostPort(host, ports[3])
	// The run's name is in the path, so that a mount shows whose it is (HO2).
	if n.Disk, err = newDisk(f.opts.Disk, filepath.Join(f.opts.Dir, f.name, n.ID), f.opts.DiskBytes); err != nil {
		return err
	}
	f.Nodes = append(f.Nodes, n) // from here on Close ends it
	if f.opts.Groups {
		n.Group, err = newGroup(f.name + "-" + n.ID)
	}
	return err
}

// handedOut are the ports that a fleet of this process has or has had: none is given
// twice, for its node may be down, or not up yet.
var handedOut sync.Map

// The ports of fleets. Processes that run beside one another mostly draw theirs from
// blocks of their own: a port whose node is down looks free to the others.
const (
	firstPort, ports = 22000, 8000
	portBlock        = 500
	triesInBlock     = 5000
)

// drawPort draws a port for a process, in the end from all.
func drawPort(pid, try int) int {
	if try < triesInBlock {
		return firstPort + pid%(ports/portBlock)*portBlock + rand.IntN(portBlock)
	}
	return firstPort + rand.IntN(ports)
}

// freePorts finds ports below the range of outgoing connections, so that nobody
// gets one by chance while its node is down.
func freePorts(count int) ([]string, error) {
	var found []string
	for try := range 2 * triesInBlock {
		port := strconv.Itoa(drawPort(os.Getpid(), try))
		if _, taken := handedOut.LoadOrStore(port, true); taken {
			continue
		}
		l, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			return nil, err
		}
		if found = append(found, port); len(found) == count {
			return found, nil
		}
	}
	return nil, errors.New("there are no free ports")
}

// Node finds a node by its name, or is nil.
func (f *Fleet) Node(id string) *Node {
	for _, n := range f.Nodes {
		if n.ID == id {
			return n
		}
	}
	return nil
}

// Endpoints are the addresses for clients.
func (f *Fleet) Endpoints() []string {
	var all []string
	for _, n := range f.Nodes {
		all = append(all, n.GRPC)
	}
	return all
}

// StartAll starts every node that is down.
func (f *Fleet) StartAll() error {
	var failed error
	for _, n := range f.Nodes {
		if !n.Running() {
			failed = errors.Join(failed, n.Start())
		}
	}
	return failed
}

// PowerLoss kills nodes and drops what they had not synced. Their disks must be
// of kind DiskFault. Each disk gets a seed of its own.
func (f *Fleet) PowerLoss(nodes []*Node, mode faultfs.CrashMode, seed uint64) ([]faultfs.CrashReport, error) {
	for _, n := range nodes {
		if n.Disk.Fault == nil {
			return nil, fmt.Errorf("the disk of %s cannot lose power: it is %s", n.ID, n.Disk.Kind)
		}
	}
	// All of them at once: none may see the other die and sync.
	for _, n := range nodes {
		if err := n.signal(syscall.SIGSTOP); err != nil {
			return nil, err
		}
	}
	var reports []faultfs.CrashReport
	for _, n := range nodes {
		if err := n.Kill(); err != nil {
			return reports, err
		}
	}
	for i, n := range nodes {
		r, err := n.Disk.Fault.Crash(mode, seed+uint64(i))
		if err != nil {
			return reports, fmt.Errorf("crashing the disk of %s: %w", n.ID, err)
		}
		reports = append(reports, r)
	}
	return reports, nil
}

// Heal ends every fault of nodes and network and starts the nodes that are down.
func (f *Fleet) Heal() error {
	var failed error
	if f.Net != nil {
		failed = f.Net.Clear()
	}
	if f.Store != nil {
		f.Store.Proxy.Clear()
	}
	for _, n := range f.Nodes {
		failed = errors.Join(failed, n.Heal())
	}
	return errors.Join(failed, f.StartAll())
}

// Close kills the nodes and removes everything outside the directory (HO2).
// Closing again does nothing.
func (f *Fleet) Close() error {
	f.closing.Do(func() {
		var failed error
		for _, n := range f.Nodes {
			failed = errors.Join(failed, n.Heal())
		}
		killed := true
		for _, n := range f.Nodes {
			if err := n.Kill(); err != nil {
				failed, killed = errors.Join(failed, err), false
			}
		}
		for _, n := range f.Nodes {
			failed = errors.Join(failed, n.Disk.close())
			if n.Group != nil {
				failed = errors.Join(failed, n.Group.close())
			}
		}
		if f.Store != nil {
			if err := f.Store.close(); err != nil {
				failed, killed = errors.Join(failed, err), false
			}
		}
		if f.Net != nil {
			failed = errors.Join(failed, f.Net.close())
		}
		if killed { // else it would wait for ever
			f.wg.Wait()
			f.launcher.close()
		}
		f.closeErr = failed
	})
	return f.closeErr
}

// Sweep removes what harnesses that no longer live left on the machine, and says
// what (HO2).
func Sweep() (swept []string, err error) {
	for _, sweep := range []func() ([]string, error){sweepMounts, sweepNetwork, sweepGroups} {
		s, e := sweep()
		swept, err = append(swept, s...), errors.Join(err, e)
	}
	return swept, err
}
