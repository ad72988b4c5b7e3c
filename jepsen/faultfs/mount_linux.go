package faultfs

import (
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// fsName begins the source of each mount in the kernel's table; the process
// number of its server follows.
const fsName = "keelstate-faultfs-"

// Supported says why no file system can be mounted here, or nil.
func Supported() error {
	if os.Geteuid() != 0 {
		return errors.New("mounting needs root")
	}
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("no FUSE: %w", err)
	}
	return f.Close()
}

// FS is a mounted file system with faults.
type FS struct {
	opts   Options
	d      *disk
	r      *rules
	raw    *raw
	server *fuse.Server
	served chan struct{}

	closing sync.Once
	err     error
}

// Mount mounts a file system. Close it even if the test failed; what a killed
// process left mounted, Sweep takes away.
func Mount(opts Options) (*FS, error) {
	opts.ensureDefaults()
	if err := Supported(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(opts.Mountpoint, 0o755); err != nil {
		return nil, err
	}
	d, err := newDisk(filepath.Join(opts.Backing, "objects"), opts.Capacity, opts.UnsyncedLimit)
	if err != nil {
		return nil, err
	}
	if err := d.takeIn(filepath.Join(opts.Backing, "tree")); err != nil {
		return nil, fmt.Errorf("taking in the tree of %s: %w", opts.Backing, err)
	}
	fs := &FS{opts: opts, d: d, r: newRules(), served: make(chan struct{})}
	fs.raw = newRaw(d, fs.r)
	// The library leaves its descriptor to the processes that are started here: one
	// that uses the mount would keep alive what it waits for once this one is dead.
	syscall.ForkLock.RLock()
	fs.server, err = fuse.NewServer(fs.raw, opts.Mountpoint, &fuse.MountOptions{
		FsName: fsName + strconv.Itoa(os.Getpid()), Name: "keelstate", DirectMountStrict: true, AllowOther: true,
		MaxWrite: 1 << 20, DisableXAttrs: true, DisableReadDirPlus: true, ExtraCapabilities: fuse.CAP_DIRECT_IO_ALLOW_MMAP,
		Logger: log.New(io.Discard, "", 0),
	})
	keepDescriptors()
	syscall.ForkLock.RUnlock()
	if err != nil {
		d.closeObjects()
		return nil, fmt.Errorf("mounting %s: %w", opts.Mountpoint, err)
	}
	go func() {
		defer close(fs.served)
		fs.server.Serve()
	}()
	if err := fs.server.WaitMount(); err != nil {
		return nil, errors.Join(err, fs.Close())
	}
	return fs, nil
}

// keepDescriptors makes those of FUSE stay in this process when it starts others.
func keepDescriptors() {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && to == "/dev/fuse" {
			if fd, err := strconv.Atoi(e.Name()); err == nil {
				unix.CloseOnExec(fd)
			}
		}
	}
}

// Mountpoint is where the file system is.
func (fs *FS) Mountpoint() string { return fs.opts.Mountpoint }

// Close unmounts, by force if it is in use, and lays the files out as a tree in
// the backing directory. Closing again does nothing.
func (fs *FS) Close() error {
	fs.closing.Do(func() {
		fs.r.clear()
		fs.err = errors.Join(unmount(fs.opts.Mountpoint), fs.await(), fs.d.layOut(filepath.Join(fs.opts.Backing, "tree")))
		fs.d.closeObjects()
	})
	return fs.err
}

// slowLimit bounds how long an unmount waits for the kernel to let go.
const slowLimit = 10 * time.Second

func (fs *FS) await() error {
	timer := time.NewTimer(slowLimit)
	defer timer.Stop()
	select {
	case <-fs.served:
		return nil
	case <-timer.C:
		return fmt.Errorf("the kernel did not let go of %s in %s", fs.opts.Mountpoint, slowLimit)
	}
}

// unmount takes a mount away even if processes use it.
func unmount(dir string) error {
	err := unix.Unmount(dir, 0)
	if err == nil || errors.Is(err, unix.EINVAL) {
		return nil // EINVAL: not mounted any more
	}
	// Force ends the connection to the server, so that nobody hangs on it.
	_ = unix.Unmount(dir, unix.MNT_FORCE)
	if err = unix.Unmount(dir, unix.MNT_DETACH); err == nil || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return fmt.Errorf("unmounting %s: %w", dir, err)
}

// Sweep unmounts what servers left that no longer live, and returns where.
func Sweep() ([]string, error) {
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	var swept []string
	var failed error
	for _, line := range strings.Split(string(table), "\n") {
		fields := strings.Fields(line)
		if len(fields) < 2 || !strings.HasPrefix(fields[0], fsName) {
			continue
		}
		pid, err := strconv.Atoi(strings.TrimPrefix(fields[0], fsName))
		if err != nil || pid == os.Getpid() || lives(pid) {
			continue
		}
		dir := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(fields[1])
		if err := unmount(dir); err != nil { // by force: somebody may hang on it
			failed = errors.Join(failed, err)
			continue
		}
		swept = append(swept, dir)
	}
	return swept, failed
}

// lives says whether a process exists, also one of another user's.
func lives(pid int) bool { return !errors.Is(unix.Kill(pid, 0), unix.ESRCH) }

// Inject puts a fault in force and returns its number.
func (fs *FS) Inject(r Rule) (int, error) { return fs.r.add(r) }

// Remove ends a fault, lets go what it stalls, and returns how many calls it hit.
func (fs *FS) Remove(id int) (int, error) { return fs.r.remove(id), nil }

// ClearFaults ends all faults. Quotas stay.
func (fs *FS) ClearFaults() error { fs.r.clear(); return nil }

// Hits is how many calls a fault has hit.
func (fs *FS) Hits(id int) (int, error) { return fs.r.hits(id), nil }

// AbortStalled ends the calls that are stalled or delayed now with EIO: a killed
// process does not end before they do. The faults stay in force.
func (fs *FS) AbortStalled() error { fs.r.abortStalled(); return nil }

// SetCapacity sets the size of the disk in bytes, 0 for the size at the mount.
// Less than is in use makes every write that needs space fail with ENOSPC.
func (fs *FS) SetCapacity(bytes int64) error {
	if bytes <= 0 {
		bytes = fs.opts.Capacity
	}
	fs.d.capacity.Store(bytes)
	return nil
}

// FlipStored inverts a bit of a file where it is stored, for good.
func (fs *FS) FlipStored(path string, flip Flip) error {
	fs.d.gate.RLock()
	defer fs.d.gate.RUnlock()
	n, err := fs.d.find(path)
	if err != nil {
		return err
	}
	if n.isDir {
		return fmt.Errorf("%s is a directory", path)
	}
	return n.flipStored(flip.Offset, flip.Bit)
}

// Crash takes the power away: what was not synced is lost, as the mode says, and
// the mount serves what is left. The processes that use the mount must be dead;
// handles of a living one only give EIO from now on.
func (fs *FS) Crash(mode CrashMode, seed uint64) (CrashReport, error) {
	switch mode {
	case DropAll, KeepPrefix, KeepSubset:
	default:
		return CrashReport{}, fmt.Errorf("no mode of a crash is called %q", mode)
	}
	fs.r.abortStalled()
	return fs.d.crash(mode, seed, fs.raw.forgetHandles)
}

// SyncAll makes everything durable.
func (fs *FS) SyncAll() error { fs.d.syncAll(); return nil }

// Stats says what the disk holds and did.
func (fs *FS) Stats() (Stats, error) {
	d := fs.d
	return Stats{Capacity: d.capacity.Load(), Used: d.used.Load(), Unsynced: d.unsynced.Load(), Rules: int(fs.r.some.Load()), Stalled: int(fs.r.stalled.Load()),
		Syncs: d.stats.syncs.Load(), Lies: d.stats.lies.Load(), Writebacks: d.stats.writebacks.Load(), Crashes: d.stats.crashes.Load()}, nil
}
