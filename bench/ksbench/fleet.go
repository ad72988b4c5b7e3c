package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	keel "github.com/keelstate/keelstate/client"
)

// Where the checkpoints of a fleet go.
const (
	storeFile = "file" // a directory
	storeS3   = "s3"   // versitygw, a process of its own over a directory
)

const (
	gatewayKey    = "keelstate-bench"
	gatewaySecret = "keelstate-bench-secret"
	gatewayBucket = "bench"
	startLimit    = time.Minute
)

// process is a program that this one has started, with its output in a file.
type process struct {
	name string
	log  string
	cmd  *exec.Cmd
	gone chan struct{} // closed when it has ended
}

func startProcess(name, log string, env []string, binary string, args ...string) (*process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, err
	}
	defer out.Close() // the process has its own
	p := &process{name: name, log: log, cmd: exec.Command(binary, args...), gone: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.SysProcAttr = childAttributes()
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its log
		close(p.gone)
	}()
	return p, nil
}

// stop asks the process to end, and insists after a while; kill insists at once.
func (p *process) stop() {
	if p.signal(syscall.SIGTERM) {
		select {
		case <-p.gone:
		case <-time.After(40 * time.Second):
		}
	}
	p.kill()
}

func (p *process) kill() {
	if p != nil && p.signal(syscall.SIGKILL) {
		<-p.gone
	}
}

func (p *process) signal(s syscall.Signal) bool {
	return p != nil && p.cmd.Process.Signal(s) == nil
}

// dead says which nodes have ended, which they should not have.
func (f *fleet) dead() error {
	var err error
	for _, n := range f.nodes {
		if n.process == nil {
			continue // it was not started
		}
		select {
		case <-n.process.gone:
			err = errors.Join(err, fmt.Errorf("%s has ended: %s", n.process.name, n.process.lastWords()))
		default:
		}
	}
	return err
}

// listens waits until somebody listens at the address, or the process has ended.
func (p *process) listens(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	var d net.Dialer
	for {
		c, err := d.DialContext(ctx, "tcp", address)
		if err == nil {
			return c.Close()
		}
		select {
		case <-p.gone:
			return fmt.Errorf("%s has ended: %s", p.name, p.lastWords())
		case <-ctx.Done():
			return fmt.Errorf("%s does not listen at %s: %s: %w", p.name, address, p.lastWords(), ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// lastWords are the end of the process's log.
func (p *process) lastWords() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	b = bytes.TrimSpace(b[max(len(b)-600, 0):])
	return string(b)
}

// fleetNode is a node and its addresses.
type fleetNode struct {
	id                       string
	grpc, raft, gossip, http string
	process                  *process
}

// fleet is a cluster of processes on this machine, in a folder of its own. All of
// it goes with close.
type fleet struct {
	dir, bin, store, memory string
	gateway                 *process
	gatewayAddress          string
	nodes                   []*fleetNode
}

// newFleet starts the object store, and no node yet.
func newFleet(ctx context.Context, o *checkpointOptions, store string) (*fleet, error) {
	dir, err := os.MkdirTemp(o.dir, "fleet-")
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	f := &fleet{dir: dir, bin: o.bin, store: store, memory: o.memory}
	if store != storeS3 {
		return f, nil
	}
	if err := f.startGateway(ctx, o.gateway); err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

// startGateway starts versitygw over the folder of the objects.
func (f *fleet) startGateway(ctx context.Context, binary string) error {
	for _, d := range []string{filepath.Join(f.objects(), gatewayBucket), filepath.Join(f.dir, "sidecar")} {
		if err := os.MkdirAll(d, 0o750); err != nil {
			return err
		}
	}
	addresses, err := freeAddresses(1)
	if err != nil {
		return err
	}
	f.gatewayAddress = addresses[0]
	f.gateway, err = startProcess("versitygw", filepath.Join(f.dir, "versitygw.log"), nil, binary, "--access", gatewayKey, "--secret", gatewaySecret,
		"--port", f.gatewayAddress, "--quiet", "posix", "--sidecar", filepath.Join(f.dir, "sidecar"), f.objects())
	if err != nil {
		return err
	}
	return f.gateway.listens(ctx, f.gatewayAddress)
}

// objects is the folder in which the object store keeps what it has.
func (f *fleet) objects() string { return filepath.Join(f.dir, "objects") }

// close ends all processes and removes all files. Nothing of it is wanted later,
// so the nodes are not asked.
func (f *fleet) close() error {
	f.dropNodes()
	f.gateway.kill()
	return os.RemoveAll(f.dir)
}

// dropNodes ends the nodes and removes what they had.
func (f *fleet) dropNodes() {
	for _, n := range f.nodes {
		n.process.kill()
		_ = os.RemoveAll(f.data(n)) // close says so if it stays
	}
	f.nodes = nil
}

func (f *fleet) data(n *fleetNode) string { return filepath.Join(f.dir, n.id) }

// start starts so many new nodes, of which nothing is left, and waits until they
// listen. The flags are given to all.
func (f *fleet) start(ctx context.Context, nodes int, flags ...string) error {
	f.dropNodes()
	addresses, err := freeAddresses(4 * nodes)
	if err != nil {
		return err
	}
	for i := range nodes {
		a := addresses[4*i:]
		f.nodes = append(f.nodes, &fleetNode{id: "n" + strconv.Itoa(i+1), grpc: a[0], raft: a[1], gossip: a[2], http: a[3]})
	}
	for _, n := range f.nodes {
		if err := f.startNode(ctx, n, flags...); err != nil {
			return err
		}
	}
	return nil
}

// startNode starts a node on whatever it has.
func (f *fleet) startNode(ctx context.Context, n *fleetNode, flags ...string) error {
	var seeds []string
	for _, o := range f.nodes {
		seeds = append(seeds, o.gossip)
	}
	args := []string{"--node-id", n.id, "--data-dir", f.data(n), "--grpc-addr", n.grpc, "--raft-addr", n.raft, "--gossip-addr", n.gossip,
		"--http-addr", n.http, "--join", strings.Join(seeds, ","), "--memory", f.memory, "--drain-timeout", "5s"}
	if f.store == storeS3 {
		args = append(args, "--object-store", "s3://"+gatewayBucket, "--object-store-endpoint", "http://"+f.gatewayAddress,
			"--object-store-region", "us-east-1", "--object-store-path-style", "true")
	} else {
		args = append(args, "--object-store", "file://"+f.objects())
	}
	env := []string{"AWS_ACCESS_KEY_ID=" + gatewayKey, "AWS_SECRET_ACCESS_KEY=" + gatewaySecret}
	var err error
	n.process, err = startProcess("node "+n.id, filepath.Join(f.dir, n.id+".log"), env, filepath.Join(f.bin, "keelstate-node"), append(args, flags...)...)
	if err != nil {
		return err
	}
	return n.process.listens(ctx, n.grpc)
}

// restart stops all nodes as an operator does and starts them on what they have.
func (f *fleet) restart(ctx context.Context, flags ...string) error {
	for _, n := range f.nodes {
		n.process.signal(syscall.SIGTERM)
	}
	for _, n := range f.nodes {
		n.process.stop()
	}
	for _, n := range f.nodes {
		if err := f.startNode(ctx, n, flags...); err != nil {
			return err
		}
	}
	return f.healthy(ctx)
}

// found makes the nodes a cluster that serves.
func (f *fleet) found(ctx context.Context, flags ...string) error {
	var members []string
	for _, n := range f.nodes {
		members = append(members, n.id+"="+n.raft)
	}
	args := append([]string{"cluster", "init", "--nodes", strings.Join(members, ","), "--wait", "5m", "--quiet"}, flags...)
	if err := f.keelctl(ctx, args...); err != nil {
		return err
	}
	return f.healthy(ctx)
}

func (f *fleet) healthy(ctx context.Context) error {
	return f.keelctl(ctx, "cluster", "status", "--exit-when-healthy", "--wait", "5m", "--quiet")
}

// keelctl runs a command of an operator's.
func (f *fleet) keelctl(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(f.bin, "keelctl"), append([]string{"--endpoints", f.endpoints()}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("keelctl %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out[max(len(out)-600, 0):]))
	}
	return nil
}

func (f *fleet) endpoints() string {
	var all []string
	for _, n := range f.nodes {
		all = append(all, n.grpc)
	}
	return strings.Join(all, ",")
}

// open makes a client of the cluster.
func (f *fleet) open(ctx context.Context) (*keel.Client, error) {
	c := common{endpoints: f.endpoints()}
	return c.open(ctx)
}

// sumOver adds a metric over nodes.
func sumOver(ctx context.Context, nodes []*fleetNode, name, label string) (float64, error) {
	total := 0.0
	for _, n := range nodes {
		text, ok := get(ctx, "http://"+n.http+"/metrics")
		if !ok {
			return 0, fmt.Errorf("%s gives no metrics: %s", n.id, text)
		}
		v, err := sumMetric(text, name, label)
		if err != nil {
			return 0, err
		}
		total += v
	}
	return total, nil
}

// freeAddresses are of ports on which nobody listens at the moment.
func freeAddresses(n int) ([]string, error) {
	var out []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // not before all are chosen
		out = append(out, l.Addr().String())
	}
	return out, nil
}

// sizeOf adds the sizes and the number of the files below a folder.
func sizeOf(dir string) (bytes int64, files int, err error) {
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			bytes, files = bytes+info.Size(), files+1
		}
		return err
	})
	return bytes, files, err
}
