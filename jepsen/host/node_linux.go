package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// goneLimit is how long a killed process may take to end.
const goneLimit = 30 * time.Second

// Node is the place of a node: its addresses, disk and log outlive its processes.
type Node struct {
	// ID is the node's name in the cluster, and its name as a host.
	ID string
	// Addresses, each host:port.
	GRPC, Raft, Gossip, HTTP string
	// LogFile has what all its processes wrote.
	LogFile string
	Disk    *Disk
	// Group is nil if the fleet was started without control groups.
	Group *Group

	fleet *Fleet

	mu struct {
		sync.Mutex
		process *process // nil while down
		starts  int
		extra   []string
		env     []string
	}
	// deaths has a lock of its own: a process is waited for while mu is held.
	deaths struct {
		sync.Mutex
		list []Death
	}
}

// Death is the end of a node's process that the harness did not ask for, or not
// in this way: a node that is asked to stop ends with code 0. Faults of disk and
// memory bring some (exit code 70; signal "killed" by the kernel); any other is a
// finding.
type Death struct {
	Node string    `json:"node"`
	Time time.Time `json:"time"`
	// Code is the exit code, -1 if a signal ended it, which Signal then names.
	Code   int    `json:"code"`
	Signal string `json:"signal,omitempty"`
}

// process is one life of a node.
type process struct {
	cmd  *exec.Cmd
	gone chan struct{} // closed when it has ended and was waited for
	// killing and stopping are set before the harness kills it, or asks it to end.
	killing, stopping atomic.Bool
}

// asAsked says that a process ended as the harness asked it to. What ends by
// itself a moment before it is killed, or with an error when it is asked to stop,
// did not.
func (p *process) asAsked() bool {
	ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	switch {
	case !ok:
		return false
	case ws.Signaled():
		// A process that has just begun does not catch SIGTERM yet.
		return ws.Signal() == syscall.SIGKILL && p.killing.Load() || ws.Signal() == syscall.SIGTERM && p.stopping.Load()
	default:
		return p.stopping.Load() && ws.ExitStatus() == 0
	}
}

func (p *process) ended() bool {
	select {
	case <-p.gone:
		return true
	default:
		return false
	}
}

// Start starts the node's process; it does not wait until it serves. Starting a
// node that runs is an error.
func (n *Node) Start() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.process != nil && !n.mu.process.ended() {
		return fmt.Errorf("starting %s: it runs", n.ID)
	}
	log, err := os.OpenFile(n.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	n.mu.starts++
	fmt.Fprintf(log, "# start %d of %s at %s\n", n.mu.starts, n.ID, time.Now().UTC().Format(time.RFC3339Nano))
	argv := append([]string{n.fleet.opts.NodeBinary}, n.flags()...)
	if n.fleet.Net != nil {
		argv = n.fleet.Net.inside(n.ID, argv...)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), n.mu.env...)
	if s := n.fleet.store(); s != nil {
		_, env := s.flags()
		cmd.Env = append(cmd.Env, env...)
	}
	// A group of its own, so that a terminal's interrupt is the harness's alone.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := n.fleet.launcher.start(cmd); err != nil {
		return fmt.Errorf("starting %s: %w", n.ID, err)
	}
	p := &process{cmd: cmd, gone: make(chan struct{})}
	n.fleet.wg.Go(func() {
		_ = cmd.Wait() // how it ended is in its state and its log
		if !p.asAsked() {
			n.noteDeath(cmd)
		}
		close(p.gone)
	})
	n.mu.process = p
	if n.Group != nil {
		if err := n.Group.add(cmd.Process.Pid); err != nil && !p.ended() {
			return errors.Join(fmt.Errorf("starting %s: %w", n.ID, err), n.killLocked())
		}
	}
	return nil
}

func (n *Node) noteDeath(cmd *exec.Cmd) {
	d := Death{Node: n.ID, Time: time.Now(), Code: cmd.ProcessState.ExitCode()}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		d.Signal = ws.Signal().String()
	}
	n.deaths.Lock()
	defer n.deaths.Unlock()
	n.deaths.list = append(n.deaths.list, d)
}

// Deaths are the ends of the node's processes that the harness did not ask for
// (see Death).
func (n *Node) Deaths() []Death {
	n.deaths.Lock()
	defer n.deaths.Unlock()
	return slices.Clone(n.deaths.list)
}

func (n *Node) flags() []string {
	o := n.fleet.opts
	var seeds []string
	for _, other := range n.fleet.Nodes {
		seeds = append(seeds, other.Gossip)
	}
	flags := []string{"--node-id", n.ID, "--data-dir", n.Disk.DataDir(), "--grpc-addr", n.GRPC, "--raft-addr", n.Raft,
		"--gossip-addr", n.Gossip, "--http-addr", n.HTTP, "--join", strings.Join(seeds, ",")}
	if o.Engine != "" {
		flags = append(flags, "--engine", o.Engine)
	}
	if o.Memory != "" {
		flags = append(flags, "--memory", o.Memory)
	}
	if s := n.fleet.store(); s != nil {
		store, _ := s.flags()
		flags = append(flags, store...)
	}
	return append(append(flags, o.Flags...), n.mu.extra...)
}

// SetFlags sets flags and environment that only this node gets, from its next
// start on.
func (n *Node) SetFlags(flags, env []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.extra, n.mu.env = flags, env
}

// Pid is the number of the running process, 0 while the node is down.
func (n *Node) Pid() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.process == nil || n.mu.process.ended() {
		return 0
	}
	return n.mu.process.cmd.Process.Pid
}

// Running says whether the node's process lives; a paused one does.
func (n *Node) Running() bool { return n.Pid() != 0 }

// Ended says whether the node was started and ended, not being killed or stopped
// by us, and its exit code (-1 for a signal).
func (n *Node) Ended() (code int, ended bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.process == nil || !n.mu.process.ended() {
		return 0, false
	}
	return n.mu.process.cmd.ProcessState.ExitCode(), true
}

// Stop asks the node to end (SIGTERM) and waits until it has, or until the
// context is done, when it still runs. It returns the exit code.
func (n *Node) Stop(ctx context.Context) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.mu.process
	if p == nil {
		return 0, nil
	}
	p.stopping.Store(true)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return 0, fmt.Errorf("stopping %s: %w", n.ID, err)
	}
	select {
	case <-p.gone:
		n.mu.process = nil
		return p.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("stopping %s: %w", n.ID, ctx.Err())
	}
}

// Kill is kill -9. The process is gone when it returns (HO6). Killing a node that
// is down does nothing.
func (n *Node) Kill() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.killLocked()
}

func (n *Node) killLocked() error {
	p := n.mu.process
	if p == nil {
		return nil
	}
	p.killing.Store(true)
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("killing %s: %w", n.ID, err)
	}
	if n.Group != nil {
		// A frozen process dies when it thaws. It makes no step on the way.
		if _, ok := n.Group.dirs["freezer"]; ok {
			if err := n.Group.Freeze(false); err != nil {
				return err
			}
		}
	}
	timer := time.NewTimer(goneLimit)
	defer timer.Stop()
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	for {
		select {
		case <-p.gone:
			n.mu.process = nil
			return nil
		case <-look.C:
			// A call that hangs on the disk must end before its process can.
			if n.Disk.Fault != nil {
				_ = n.Disk.Fault.AbortStalled()
			}
		case <-timer.C:
			return fmt.Errorf("killing %s: it hangs in the kernel (is its disk frozen?)", n.ID)
		}
	}
}

// Pause stops the process (SIGSTOP) and returns when it stands.
func (n *Node) Pause() error {
	if err := n.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	return await(10*time.Second, n.ID+" stands", func() bool {
		s := n.state()
		return s == 'T' || s == 0
	})
}

// Resume continues a paused process. Resuming one that runs, or none, does nothing.
func (n *Node) Resume() error { return n.signal(syscall.SIGCONT) }

// signal signals the process, if there is one (HO1).
func (n *Node) signal(s syscall.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.process == nil {
		return nil
	}
	if err := n.mu.process.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signalling %s: %w", n.ID, err)
	}
	return nil
}

// state is the letter of the process's state in /proc, 0 while it is down.
func (n *Node) state() byte {
	pid := n.Pid()
	if pid == 0 {
		return 0
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name before it is in parentheses and may have any bytes.
	if i := bytes.LastIndexByte(b, ')'); i >= 0 && i+2 < len(b) {
		return b[i+2]
	}
	return 0
}

// Wipe empties the data directory of a node that is down, as if it had a new disk.
func (n *Node) Wipe() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.process != nil && !n.mu.process.ended() {
		return fmt.Errorf("wiping %s: it runs", n.ID)
	}
	if err := os.RemoveAll(n.Disk.DataDir()); err != nil {
		return err
	}
	return n.Disk.prepare()
}

// LogHas says whether the log, over all its processes, has a text.
func (n *Node) LogHas(text string) bool {
	b, err := os.ReadFile(n.LogFile)
	return err == nil && bytes.Contains(b, []byte(text))
}

// Files lists the node's files below its data directory.
func (n *Node) Files() ([]string, error) {
	var found []string
	err := filepath.WalkDir(n.Disk.DataDir(), func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			found = append(found, path)
		}
		return err
	})
	return found, err
}

// Heal ends every fault of the node but that it is down: it thaws, resumes, and
// ends the limits and the faults of its disk.
func (n *Node) Heal() error {
	failed := n.Disk.Heal()
	if n.Group != nil {
		failed = errors.Join(failed, n.Group.Clear())
	}
	return errors.Join(failed, n.Resume())
}
