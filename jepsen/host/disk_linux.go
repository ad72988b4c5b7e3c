package host

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/jepsen/faultfs"
)

// DiskKind is what a node's data directory is on.
type DiskKind string

// The kinds of disks.
const (
	DiskPlain DiskKind = "plain" // a directory
	DiskFault DiskKind = "fault" // faultfs: power loss and every fault of it
	DiskExt4  DiskKind = "ext4"  // a small ext4 on a loop device: full, frozen
	DiskTmpfs DiskKind = "tmpfs" // a small tmpfs: full
)

// needs of each kind.
var diskNeeds = map[DiskKind][]Capability{DiskPlain: nil, DiskFault: {CapFuse}, DiskExt4: {CapLoop}, DiskTmpfs: {CapTmpfs}}

// Disk is what a node's data directory is on.
type Disk struct {
	Kind DiskKind
	// Dir is the root of the disk; the node's data is below it.
	Dir string
	// Fault is the faulty file system, nil for the other kinds.
	Fault *faultfs.FS

	mu      sync.Mutex
	mounted bool
	frozen  bool
	filled  bool
}

// ballast is the file that fills a disk.
const ballast = "ballast"

// newDisk makes a disk of some size (0: as large as it gets) below dir.
func newDisk(kind DiskKind, dir string, bytes int64) (*Disk, error) {
	d := &Disk{Kind: kind, Dir: filepath.Join(dir, "disk")}
	if err := os.MkdirAll(d.Dir, 0o755); err != nil {
		return nil, err
	}
	var err error
	switch kind {
	case DiskPlain:
	case DiskFault:
		d.Fault, err = faultfs.Mount(faultfs.Options{Mountpoint: d.Dir, Backing: filepath.Join(dir, "backing"), Capacity: bytes})
	case DiskExt4:
		err = d.mountExt4(filepath.Join(dir, "ext4.img"), bytes)
	case DiskTmpfs:
		err = unix.Mount("keelj", d.Dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("size=%d", bytes))
		d.mounted = err == nil
	default:
		err = errors.New("there is no such kind")
	}
	if err != nil {
		return nil, fmt.Errorf("making a disk of kind %q: %w", kind, err)
	}
	if err := d.prepare(); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

// prepare makes the empty data directory, for good: that it exists is the
// operator's business, not the node's.
func (d *Disk) prepare() error {
	err := os.MkdirAll(d.DataDir(), 0o755)
	if err == nil && d.Fault != nil {
		err = d.Fault.SyncAll()
	}
	return err
}

func (d *Disk) mountExt4(image string, bytes int64) error {
	f, err := os.Create(image)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(bytes), f.Close()); err != nil {
		return err
	}
	if err := run("", "mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1", image); err != nil {
		return err
	}
	if err := run("", "mount", "-o", "loop,nosuid,nodev", image, d.Dir); err != nil {
		return err
	}
	d.mounted = true
	return nil
}

// DataDir is the node's own directory on the disk.
func (d *Disk) DataDir() string { return filepath.Join(d.Dir, "data") }

// Fill takes all space but so many bytes. Filling a full disk does nothing.
func (d *Disk) Fill(leave int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.filled {
		return nil
	}
	switch d.Kind {
	case DiskFault:
		st, err := d.Fault.Stats()
		if err != nil {
			return err
		}
		d.filled = true
		return d.Fault.SetCapacity(st.Used + max(1, leave))
	case DiskExt4, DiskTmpfs:
		d.filled = true
		return d.writeBallast(leave)
	}
	return fmt.Errorf("a %s disk cannot be filled: it is the machine's own", d.Kind)
}

func (d *Disk) writeBallast(leave int64) error {
	f, err := os.OpenFile(filepath.Join(d.Dir, ballast), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	// Blocks are taken one by one until none is left, since what a file system
	// calls free is not always to be had.
	block := make([]byte, 64<<10)
	for size := len(block); size >= 512; {
		if _, err := f.Write(block[:size]); errors.Is(err, unix.ENOSPC) {
			size /= 2
		} else if err != nil {
			return err
		}
	}
	end, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(max(0, end-leave)), f.Sync())
}

// Unfill gives the space back. Doing it again does nothing.
func (d *Disk) Unfill() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.filled {
		return nil
	}
	var err error
	if d.Kind == DiskFault {
		err = d.Fault.SetCapacity(0)
	} else if err = os.Remove(filepath.Join(d.Dir, ballast)); errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	d.filled = err != nil
	return err
}

// The requests of linux/fs.h that fsfreeze makes.
const (
	ioctlFreeze = 0xc0045877
	ioctlThaw   = 0xc0045878
)

// Freeze makes every write to an ext4 disk hang until it is thawed.
func (d *Disk) Freeze(frozen bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.Kind != DiskExt4 {
		return fmt.Errorf("a %s disk cannot be frozen", d.Kind)
	}
	if d.frozen == frozen {
		return nil
	}
	dir, err := os.Open(d.Dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	request := uint(ioctlThaw)
	if frozen {
		request = ioctlFreeze
	}
	if err := unix.IoctlSetInt(int(dir.Fd()), request, 0); err != nil {
		return fmt.Errorf("freezing %s (%v): %w", d.Dir, frozen, err)
	}
	d.frozen = frozen
	return nil
}

// Heal ends every fault of the disk; lost data stays lost.
func (d *Disk) Heal() error {
	var failed error
	if d.Kind == DiskExt4 {
		failed = d.Freeze(false)
	}
	failed = errors.Join(failed, d.Unfill())
	if d.Fault != nil {
		failed = errors.Join(failed, d.Fault.ClearFaults())
	}
	return failed
}

// close heals the disk and unmounts it. The files of a faulty one are then plain
// files beside it.
func (d *Disk) close() error {
	failed := d.Heal()
	if d.Fault != nil {
		return errors.Join(failed, d.Fault.Close())
	}
	if d.mounted {
		failed = errors.Join(failed, unmount(d.Dir))
		d.mounted = false
	}
	return failed
}

func unmount(dir string) error {
	err := unix.Unmount(dir, 0)
	if errors.Is(err, unix.EBUSY) {
		err = unix.Unmount(dir, unix.MNT_DETACH)
	}
	if err == nil || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return fmt.Errorf("unmounting %s: %w", dir, err)
}

// sweepMounts unmounts what dead harnesses left.
func sweepMounts() (swept []string, err error) {
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(string(table), "\n") {
		fields := strings.Fields(line)
		if len(fields) < 3 || !ofDead(fields[1]) || strings.HasPrefix(fields[2], "fuse") {
			continue
		}
		d := &Disk{Kind: DiskExt4, Dir: fields[1], frozen: true}
		if fields[2] == "ext4" {
			_ = d.Freeze(false) // most were not frozen
		}
		err = errors.Join(err, unmount(fields[1]))
		swept = append(swept, "mount "+fields[1])
	}
	fuse, e := faultfs.Sweep()
	for _, dir := range fuse {
		swept = append(swept, "mount "+dir)
	}
	return swept, errors.Join(err, e)
}
