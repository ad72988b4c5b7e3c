package host

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Client is the name of the harness's own host in faults of the network.
const Client = "client"

// StoreHost is the name of the object store's host.
const StoreHost = "s3"

// netnsDir is where the ip command keeps namespaces.
const netnsDir = "/run/netns"

// guardBase plus the harness's process number is the metric of the routes that
// keep packets on the machine (HO3), so that each shows whose it is (HO2).
const guardBase = 1_200_000_000

func guardMetric() string { return strconv.Itoa(guardBase + os.Getpid()) }

// Network is a bridge with one namespace per node, and the faults in it.
type Network struct {
	run    string // keelj-PID-SERIAL
	short  string // begins the names of links, which are at most 15 bytes long
	subnet string // a.b.c
	hosts  map[string]string
	order  []string

	mu struct {
		sync.Mutex
		last   int
		faults map[int]*netFault
		limits map[string]bool
		slow   *slowLinks
	}
}

func (n *Network) bridge() string          { return n.short + "br" }
func (n *Network) veth(host string) string { return n.short + host }
func (n *Network) ns(host string) string   { return n.run + "-" + host }
func (n *Network) nsPath(host string) string {
	return filepath.Join(netnsDir, n.ns(host))
}

// Address is a host's IP address.
func (n *Network) Address(host string) string { return n.hosts[host] }

// newNetwork makes the bridge and the namespaces of hosts.
func newNetwork(runName string, serial int, hosts []string) (*Network, error) {
	n := &Network{run: runName, short: "k" + strconv.FormatInt(int64(os.Getpid()), 36) + "x" + strconv.FormatInt(int64(serial), 36),
		hosts: make(map[string]string), order: append([]string{Client}, hosts...)}
	n.mu.faults, n.mu.limits = make(map[int]*netFault), make(map[string]bool)
	if err := n.claim(); err != nil {
		return nil, err
	}
	if err := n.build(hosts); err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// claim finds a subnet that nobody uses. The route that keeps its packets from
// leaving the machine is also the mark that it is taken.
func (n *Network) claim() error {
	var last error
	for range 50 {
		n.subnet = fmt.Sprintf("10.%d.%d", 200+rand.IntN(50), rand.IntN(256))
		if there, err := output("", "ip", "route", "show", "root", n.subnet+".0/24"); err != nil || there != "" {
			last = errors.Join(err, errors.New("every subnet that was tried is in use"))
			continue
		}
		if last = n.guard("add"); last != nil {
			continue
		}
		// Another harness may have had the same idea at the same time.
		there, err := output("", "ip", "-o", "route", "show", "root", n.subnet+".0/24")
		if err == nil && strings.Count(there, "\n") == 1 {
			return nil
		}
		last = errors.Join(err, n.guard("del"), errors.New("another harness was quicker"))
	}
	return fmt.Errorf("finding a subnet: %w", last)
}

// guard adds or deletes the route that keeps packets on the machine.
func (n *Network) guard(verb string) error {
	return run("", "ip", "route", verb, "unreachable", n.subnet+".0/24", "metric", guardMetric())
}

func (n *Network) build(hosts []string) error {
	n.hosts[Client] = n.subnet + ".1"
	var root strings.Builder
	fmt.Fprintf(&root, "link add %[1]s type bridge forward_delay 0\naddr add %[2]s/24 dev %[1]s\nlink set %[1]s up\n", n.bridge(), n.hosts[Client])
	for i, host := range hosts {
		n.hosts[host] = fmt.Sprintf("%s.%d", n.subnet, 11+i)
		fmt.Fprintf(&root, "netns add %[1]s\nlink add %[2]s type veth peer name eth0 netns %[1]s\nlink set %[2]s master %[3]s up\n",
			n.ns(host), n.veth(host), n.bridge())
	}
	if err := run(root.String(), "ip", "-batch", "-"); err != nil {
		return err
	}
	for _, host := range hosts {
		inside := fmt.Sprintf("addr add %s/24 dev eth0\nlink set eth0 up\nlink set lo up\n", n.hosts[host])
		if err := run(inside, "ip", "-n", n.ns(host), "-batch", "-"); err != nil {
			return err
		}
	}
	return nil
}

// inside returns a command line that runs in a host's namespace and keeps the
// mounts of the harness, as `ip netns exec` would not.
func (n *Network) inside(host string, argv ...string) []string {
	if host == Client {
		return argv
	}
	return append([]string{"nsenter", "--net=" + n.nsPath(host), "--"}, argv...)
}

// listen opens a port of a host. The socket stays in the host's namespace, whoever
// uses it.
func (n *Network) listen(host string, port int) (net.Listener, error) {
	addr := net.JoinHostPort(n.hosts[host], strconv.Itoa(port))
	if host == Client {
		return net.Listen("tcp", addr)
	}
	type result struct {
		l   net.Listener
		err error
	}
	done := make(chan result, 1)
	go func() {
		// A thread is in a namespace, not a goroutine. One that does not find its way
		// back is not unlocked, and ends with the goroutine.
		runtime.LockOSThread()
		l, back, err := listenIn(n.nsPath(host), addr)
		if back {
			runtime.UnlockOSThread()
		}
		done <- result{l, err}
	}()
	r := <-done
	return r.l, r.err
}

// listenIn listens in a namespace, and says whether the thread has left it again.
func listenIn(ns, addr string) (l net.Listener, back bool, err error) {
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, true, err
	}
	defer home.Close()
	there, err := os.Open(ns)
	if err != nil {
		return nil, true, err
	}
	defer there.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, true, fmt.Errorf("entering %s: %w", ns, err)
	}
	l, err = net.Listen("tcp4", addr) // a literal address asks nobody
	return l, unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil, err
}

// close removes everything; the guarding route goes last (HO3).
func (n *Network) close() error {
	err := n.Clear()
	n.mu.Lock()
	if n.mu.slow != nil {
		n.mu.slow.close()
		n.mu.slow = nil
	}
	n.mu.Unlock()
	for _, host := range n.order[1:] {
		err = errors.Join(err, removeLink(n.veth(host)), removeNetns(n.ns(host)))
	}
	err = errors.Join(err, removeLink(n.bridge()))
	return errors.Join(err, n.guard("del"))
}

func removeLink(name string) error {
	if _, err := os.Stat("/sys/class/net/" + name); err != nil {
		return nil
	}
	err := run("", "ip", "link", "del", name)
	if err != nil && strings.Contains(err.Error(), "Cannot find device") {
		return nil
	}
	return err
}

func removeNetns(name string) error {
	if _, err := os.Stat(filepath.Join(netnsDir, name)); err != nil {
		return nil
	}
	return run("", "ip", "netns", "del", name)
}

// sweepNetwork removes what dead harnesses left.
func sweepNetwork() (swept []string, err error) {
	entries, readErr := os.ReadDir(netnsDir)
	if readErr != nil {
		return nil, nil // there was never a namespace
	}
	for _, e := range entries {
		if !ofDead(e.Name()) {
			continue
		}
		err = errors.Join(err, removeNetns(e.Name()))
		swept = append(swept, "namespace "+e.Name())
	}
	links, linkErr := os.ReadDir("/sys/class/net")
	err = errors.Join(err, linkErr)
	for _, l := range links {
		pid, ok := linkOwner(l.Name())
		if !ok || !ofDead(fmt.Sprintf("%s%d-0", namePrefix, pid)) {
			continue
		}
		err = errors.Join(err, removeLink(l.Name()))
		swept = append(swept, "link "+l.Name())
	}
	return swept, errors.Join(err, sweepRoutes())
}

// ourLink is the form of all names of links: process and serial number, and what
// the link is: a bridge, a node's or the object store's, a delay's of one of them
// or of the clients.
var ourLink = regexp.MustCompile(`^k([0-9a-z]+)x[0-9a-z]+?(br|t?n[0-9]+|t?s3|tc)$`)

// linkOwner reads the process number out of a link's name, false for one that we
// never made.
func linkOwner(name string) (int, bool) {
	m := ourLink.FindStringSubmatch(name)
	if m == nil {
		return 0, false
	}
	pid, err := strconv.ParseInt(m[1], 36, 32)
	return int(pid), err == nil && pid > 1
}

// sweepRoutes removes the guarding routes of dead harnesses.
func sweepRoutes() error {
	routes, err := output("", "ip", "-o", "route", "show", "type", "unreachable")
	if err != nil {
		return nil // no ip command: then there are no routes of ours
	}
	var failed error
	for _, line := range strings.Split(routes, "\n") {
		fields := strings.Fields(line)
		i := slices.Index(fields, "metric")
		if i < 0 || i+1 >= len(fields) {
			continue
		}
		metric, err := strconv.Atoi(fields[i+1])
		if err != nil || metric <= guardBase || !ofDead(fmt.Sprintf("%s%d-0", namePrefix, metric-guardBase)) {
			continue
		}
		failed = errors.Join(failed, run("", "ip", "route", "del", "unreachable", fields[1], "metric", fields[i+1]))
	}
	return failed
}
