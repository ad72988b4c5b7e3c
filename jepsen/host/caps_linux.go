package host

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"strings"
	"sync"

	"github.com/keelstate/keelstate/jepsen/faultfs"
)

// Capability is something that the machine may be able to do.
type Capability string

// The capabilities.
const (
	CapNetns   Capability = "netns"   // a network namespace per node
	CapNft     Capability = "nft"     // dropping and resetting packets
	CapTC      Capability = "tc"      // limiting bandwidth
	CapTun     Capability = "tun"     // delaying and reordering packets
	CapFuse    Capability = "fuse"    // the faulty file system
	CapLoop    Capability = "loop"    // small ext4 file systems
	CapTmpfs   Capability = "tmpfs"   // small memory file systems
	CapCPU     Capability = "cpu"     // a CPU quota
	CapMemory  Capability = "memory"  // a memory limit
	CapBlkio   Capability = "blkio"   // a throttled disk
	CapFreezer Capability = "freezer" // stopping a whole group at once
)

var allCapabilities = []Capability{CapNetns, CapNft, CapTC, CapTun, CapFuse, CapLoop, CapTmpfs, CapCPU, CapMemory, CapBlkio, CapFreezer}

// Capabilities says of each capability why the machine lacks it, or nil.
type Capabilities map[Capability]error

// Has says whether the machine has all of these.
func (c Capabilities) Has(all ...Capability) bool { return c.Lacks(all...) == nil }

// Lacks is the reason why one of these is missing, or nil.
func (c Capabilities) Lacks(all ...Capability) error {
	for _, one := range all {
		if err := c[one]; err != nil {
			return fmt.Errorf("no %s: %w", one, err)
		}
	}
	return nil
}

// Missing lists what the machine cannot do, each with the reason (HO4).
func (c Capabilities) Missing() []string {
	var missing []string
	for _, one := range allCapabilities {
		if err := c.Lacks(one); err != nil {
			missing = append(missing, err.Error())
		}
	}
	return missing
}

// Detect finds out, once per process, what the machine can do.
func Detect() Capabilities { return maps.Clone(detected()) }

var detected = sync.OnceValue(detect)

func detect() Capabilities {
	c := make(Capabilities)
	var root error
	if os.Geteuid() != 0 {
		root = errors.New("not root")
	}
	need := func(one Capability, checks ...func() error) {
		c[one] = root
		for _, check := range checks {
			if c[one] == nil {
				c[one] = check()
			}
		}
	}
	need(CapNetns, tools("ip", "nsenter", "unshare"), works("unshare", "--net", "true"))
	need(CapNft, tools("nft", "unshare"), works("unshare", "--net", "nft", "add", "table", "ip", "probe"))
	need(CapTC, tools("tc", "unshare"), works("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", "burst", "32kbit", "latency", "100ms"))
	need(CapTun, exists("/dev/net/tun"))
	need(CapFuse, faultfs.Supported)
	need(CapLoop, exists("/dev/loop-control"), tools("mkfs.ext4", "mount"))
	need(CapTmpfs)
	for one, controller := range map[Capability]string{CapCPU: "cpu", CapMemory: "memory", CapBlkio: "blkio", CapFreezer: "freezer"} {
		need(one, func() error { _, err := controllerParent(controller); return err })
	}
	return c
}

func tools(names ...string) func() error {
	return func() error {
		for _, name := range names {
			if _, err := exec.LookPath(name); err != nil {
				return fmt.Errorf("the command %s is not installed", name)
			}
		}
		return nil
	}
}

func works(argv ...string) func() error {
	return func() error {
		out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(string(out)))
		}
		return nil
	}
}

func exists(path string) func() error {
	return func() error { _, err := os.Stat(path); return err }
}

// names of what a harness makes outside its directory: keelj-PID-SERIAL-...
const namePrefix = "keelj-"

// ofDead says whether a name was made by a harness that no longer lives.
func ofDead(name string) bool {
	_, rest, found := strings.Cut(name, namePrefix)
	var pid, serial int
	if !found {
		return false
	}
	if n, err := fmt.Sscanf(rest, "%d-%d", &pid, &serial); n != 2 || err != nil || pid == os.Getpid() {
		return false
	}
	_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	return errors.Is(err, os.ErrNotExist)
}
