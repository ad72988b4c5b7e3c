package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const cgroupRoot = "/sys/fs/cgroup"

// controllers that a group uses, as cgroup v1 calls them.
var controllers = []string{"cpu", "memory", "blkio", "freezer"}

// v2Names are the controllers' names in cgroup v2; the freezer is part of the core.
var v2Names = map[string]string{"cpu": "cpu", "memory": "memory", "blkio": "io"}

// parent is a directory in which groups with some controller can be made.
type parent struct {
	dir string
	v2  bool
}

// controllerParent finds where a controller's groups are made: below the group
// that the harness itself is in, so that its limits hold for the nodes too.
func controllerParent(controller string) (parent, error) {
	table, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return parent{}, err
	}
	v1, unified := "", ""
	for _, line := range strings.Split(strings.TrimSpace(string(table)), "\n") {
		parts := strings.SplitN(line, ":", 3)
		if len(parts) != 3 {
			continue
		}
		for _, name := range strings.Split(parts[1], ",") {
			switch name {
			case controller:
				v1 = parts[2]
			case "":
				unified = parts[2]
			}
		}
	}
	if v1 != "" {
		dir := filepath.Join(cgroupRoot, controller, v1)
		if err := writable(dir); err == nil {
			return parent{dir: dir}, nil
		}
	}
	for _, mount := range []string{cgroupRoot, cgroupRoot + "/unified"} {
		dir := filepath.Join(mount, unified)
		enabled, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
		if err != nil {
			continue
		}
		if name := v2Names[controller]; name == "" || strings.Contains(" "+strings.TrimSpace(string(enabled))+" ", " "+name+" ") {
			if err := writable(dir); err == nil {
				return parent{dir: dir, v2: true}, nil
			}
		}
	}
	return parent{}, fmt.Errorf("the control group controller %s is not available", controller)
}

// writable says whether a group can be made in a directory, by making one.
func writable(dir string) error {
	probe, err := os.MkdirTemp(dir, fmt.Sprintf("%s%d-0-probe", namePrefix, os.Getpid()))
	if err != nil {
		return err
	}
	return os.Remove(probe)
}

// Group is the control group of a node. Each limit may be unavailable; the error
// says so.
type Group struct {
	name string
	mu   sync.Mutex
	// dirs by controller; with cgroup v2 all the same.
	dirs map[string]parent
	// throttled directories have a limit of LimitDisk.
	throttled map[string]bool
}

func newGroup(name string) (*Group, error) {
	g := &Group{name: name, dirs: make(map[string]parent), throttled: make(map[string]bool)}
	for _, c := range controllers {
		p, err := controllerParent(c)
		if err != nil {
			continue
		}
		p.dir = filepath.Join(p.dir, name)
		if err := os.Mkdir(p.dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, errors.Join(fmt.Errorf("making a control group: %w", err), g.close())
		}
		g.dirs[c] = p
	}
	return g, nil
}

// add moves a process into the group.
func (g *Group) add(pid int) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, p := range g.dirs {
		if err := write(p.dir, "cgroup.procs", strconv.Itoa(pid)); err != nil {
			return err
		}
	}
	return nil
}

func write(dir, file, value string) error {
	if err := os.WriteFile(filepath.Join(dir, file), []byte(value), 0o644); err != nil {
		return fmt.Errorf("setting %s to %q: %w", file, value, err)
	}
	return nil
}

// set writes one of two files, by the version of the control groups.
func (g *Group) set(controller, v1File, v1Value, v2File, v2Value string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	p, ok := g.dirs[controller]
	switch {
	case !ok:
		return fmt.Errorf("the control group controller %s is not available", controller)
	case p.v2:
		return write(p.dir, v2File, v2Value)
	default:
		return write(p.dir, v1File, v1Value)
	}
}

// LimitCPU gives the group a share of one CPU in percent, 0 for no limit.
func (g *Group) LimitCPU(percent int) error {
	if percent <= 0 {
		return g.set("cpu", "cpu.cfs_quota_us", "-1", "cpu.max", "max 100000")
	}
	quota := strconv.Itoa(max(1000, percent*1000))
	return g.set("cpu", "cpu.cfs_quota_us", quota, "cpu.max", quota+" 100000")
}

// LimitMemory bounds the group's memory in bytes, 0 for no limit. What needs more
// is killed by the kernel.
func (g *Group) LimitMemory(bytes int64) error {
	if bytes <= 0 {
		return g.set("memory", "memory.limit_in_bytes", "-1", "memory.max", "max")
	}
	value := strconv.FormatInt(bytes, 10)
	return g.set("memory", "memory.limit_in_bytes", value, "memory.max", value)
}

// deviceOf is the number of the device under a directory.
func deviceOf(dir string) (string, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d:%d", st.Dev>>8&0xfff, st.Dev&0xff|st.Dev>>12&0xfff00), nil
}

// Throttles says why LimitDisk cannot work for a directory, or nil: there is
// nothing to throttle under a file system in memory, for example.
func Throttles(dir string) error {
	device, err := deviceOf(dir)
	if err != nil {
		return err
	}
	if _, err := os.Stat("/sys/dev/block/" + device); err != nil {
		return fmt.Errorf("there is no block device under %s", dir)
	}
	return nil
}

// LimitDisk bounds what the group writes to the device under a directory, in
// bytes per second, 0 for no limit.
func (g *Group) LimitDisk(dir string, bytesPerSecond int64) error {
	device, err := deviceOf(dir)
	if err != nil {
		return err
	}
	g.mu.Lock()
	g.throttled[dir] = bytesPerSecond > 0
	g.mu.Unlock()
	v2 := device + " wbps=max"
	if bytesPerSecond > 0 {
		v2 = fmt.Sprintf("%s wbps=%d", device, bytesPerSecond)
	}
	return g.set("blkio", "blkio.throttle.write_bps_device", fmt.Sprintf("%s %d", device, max(0, bytesPerSecond)), "io.max", v2)
}

// Freeze stops or continues all threads of the group at once, and returns when
// they are. No process notices.
func (g *Group) Freeze(frozen bool) error {
	v1, v2, want := "THAWED", "0", "frozen 0"
	if frozen {
		v1, v2, want = "FROZEN", "1", "frozen 1"
	}
	if err := g.set("freezer", "freezer.state", v1, "cgroup.freeze", v2); err != nil {
		return err
	}
	p := g.dirs["freezer"]
	return await(10*time.Second, "the group is "+v1, func() bool {
		if p.v2 {
			b, _ := os.ReadFile(filepath.Join(p.dir, "cgroup.events"))
			return strings.Contains(string(b), want)
		}
		b, _ := os.ReadFile(filepath.Join(p.dir, "freezer.state"))
		return strings.TrimSpace(string(b)) == v1
	})
}

// Clear ends all limits.
func (g *Group) Clear() error {
	var failed error
	g.mu.Lock()
	var throttled []string
	for dir, is := range g.throttled {
		if is {
			throttled = append(throttled, dir)
		}
	}
	g.mu.Unlock()
	for _, dir := range throttled {
		failed = errors.Join(failed, g.LimitDisk(dir, 0))
	}
	for controller, end := range map[string]func() error{
		"cpu": func() error { return g.LimitCPU(0) }, "memory": func() error { return g.LimitMemory(0) },
		"freezer": func() error { return g.Freeze(false) },
	} {
		if _, ok := g.dirs[controller]; ok {
			failed = errors.Join(failed, end())
		}
	}
	return failed
}

// close removes the group; its processes must be gone.
func (g *Group) close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var failed error
	for c, p := range g.dirs {
		// The kernel takes a moment to forget the last process.
		err := await(10*time.Second, "the group "+p.dir+" is empty", func() bool {
			err := os.Remove(p.dir)
			return err == nil || errors.Is(err, os.ErrNotExist)
		})
		failed = errors.Join(failed, err)
		delete(g.dirs, c)
	}
	return failed
}

// sweepGroups removes what dead harnesses left.
func sweepGroups() (swept []string, err error) {
	for _, c := range controllers {
		p, e := controllerParent(c)
		if e != nil {
			continue
		}
		entries, e := os.ReadDir(p.dir)
		err = errors.Join(err, e)
		for _, entry := range entries {
			if !entry.IsDir() || !ofDead(entry.Name()) {
				continue
			}
			if e := os.Remove(filepath.Join(p.dir, entry.Name())); e != nil && !errors.Is(e, os.ErrNotExist) {
				err = errors.Join(err, e)
				continue
			}
			swept = append(swept, "group "+filepath.Join(p.dir, entry.Name()))
		}
	}
	return swept, err
}

// await looks again and again until a condition holds.
func await(limit time.Duration, what string, holds func() bool) error {
	deadline := time.Now().Add(limit)
	for !holds() {
		if time.Now().After(deadline) {
			return fmt.Errorf("waited %s in vain until %s", limit, what)
		}
		time.Sleep(2 * time.Millisecond) // between two looks
	}
	return nil
}
