package crashtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	keel "github.com/keelstate/keelstate/client"
)

var long = flag.Bool("long", os.Getenv("KEELSTATE_LONG") != "", "longer runs")

// binaries is the directory of what build made; removed by TestMain.
var binaries string

func TestMain(m *testing.M) {
	flag.Parse()
	dir, err := os.MkdirTemp("", "crashtest")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binaries = dir
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// The programs, each made once per process, as the environment says (the
// Makefile's flags for the release build of RocksDB apply).
var programs = map[string]func() error{
	"node":            build("node", "../../cmd/node"),
	"node-failpoints": build("node-failpoints", "../../cmd/node", "-tags", "failpoints"),
	"keelctl":         build("keelctl", "../../cmd/keelctl"),
}

func build(name, pkg string, flags ...string) func() error {
	return sync.OnceValue(func() error {
		args := append([]string{"build", "-o", filepath.Join(binaries, name)}, flags...)
		if out, err := exec.Command("go", append(args, pkg)...).CombinedOutput(); err != nil {
			return fmt.Errorf("building %s: %w: %s", name, err, out)
		}
		return nil
	})
}

// seeded returns the random numbers of a test and says how to repeat them.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("KEELSTATE_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("KEELSTATE_SEED: %v", err)
		}
	}
	t.Logf("KEELSTATE_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// node is one node's place: its ports and directory outlive its processes.
type node struct {
	id, dir, log            string
	grpc, raft, gossip, web string

	cmd  *exec.Cmd // nil while down
	gone chan struct{}
	// told and shot: it got SIGTERM, or SIGKILL.
	told, shot bool
	env        []string // added to the environment of the next process
}

type nodes struct {
	t         *testing.T
	n         [3]*node
	program   string
	args      []string // added to those of every process
	engine    string
	endpoints []string
}

// handedOut are the ports that a test of this process has or has had: none is given
// twice, for its node may be down, or not up yet.
var handedOut sync.Map

// freePorts finds ports below the range of outgoing connections, so that nobody
// gets one by chance while its node is down. The harness's tests use others.
func freePorts(t *testing.T, count int) []string {
	t.Helper()
	var found []string
	for range 10000 {
		addr := fmt.Sprintf("127.0.0.1:%d", 15000+rand.IntN(7000))
		if _, taken := handedOut.LoadOrStore(addr, true); taken {
			continue
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if found = append(found, addr); len(found) == count {
			return found
		}
	}
	t.Fatal("no free ports")
	return nil
}

// newNodes starts three nodes that do not form a cluster yet.
func newNodes(t *testing.T, engine string) *nodes {
	t.Helper()
	c := placeNodes(t, "node", engine)
	for i := range c.n {
		c.start(i)
	}
	return c
}

// placeNodes prepares three nodes that run a program, and starts none.
func placeNodes(t *testing.T, program, engine string) *nodes {
	t.Helper()
	if err := errors.Join(programs[program](), programs["keelctl"]()); err != nil {
		t.Fatal(err)
	}
	c := &nodes{t: t, program: program, engine: engine}
	dir, ports := t.TempDir(), freePorts(t, 12)
	for i := range c.n {
		id := fmt.Sprintf("n%d", i+1)
		c.n[i] = &node{id: id, dir: filepath.Join(dir, id), log: filepath.Join(dir, id+".log"),
			grpc: ports[4*i], raft: ports[4*i+1], gossip: ports[4*i+2], web: ports[4*i+3]}
		c.endpoints = append(c.endpoints, ports[4*i])
	}
	t.Cleanup(c.end)
	return c
}

func (c *nodes) end() {
	for i := range c.n {
		c.kill(i)
		if !c.t.Failed() {
			continue
		}
		if b, err := os.ReadFile(c.n[i].log); err == nil {
			c.t.Logf("the end of the log of %s:\n%s", c.n[i].id, b[max(0, len(b)-6000):])
		}
	}
}

// start starts the process of a node; it does not wait until it listens.
func (c *nodes) start(i int) {
	c.t.Helper()
	n := c.n[i]
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	var seeds []string
	for _, o := range c.n {
		seeds = append(seeds, o.gossip)
	}
	args := append([]string{"--node-id", n.id, "--data-dir", n.dir, "--grpc-addr", n.grpc,
		"--raft-addr", n.raft, "--gossip-addr", n.gossip, "--http-addr", n.web, "--join", strings.Join(seeds, ","),
		"--engine", c.engine, "--memory", "256MiB"}, c.args...)
	n.cmd = exec.Command(filepath.Join(binaries, c.program), args...)
	n.cmd.Env = append(os.Environ(), n.env...)
	n.cmd.Stdout, n.cmd.Stderr, n.cmd.SysProcAttr = log, log, childAttr()
	if err := n.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	n.gone, n.told, n.shot = make(chan struct{}), false, false
	go func(cmd *exec.Cmd, gone chan struct{}) {
		_ = cmd.Wait() // how it ended is in its log
		close(gone)
	}(n.cmd, n.gone)
}

func (c *nodes) signal(i int, s syscall.Signal) {
	if n := c.n[i]; n.cmd != nil {
		n.told, n.shot = n.told || s == syscall.SIGTERM, n.shot || s == syscall.SIGKILL
		_ = n.cmd.Process.Signal(s) // it may have ended by itself
	}
}

// kill is kill -9, and waits until the process is gone. One that has ended by
// itself fails the test (CR4).
func (c *nodes) kill(i int) {
	n := c.n[i]
	if n.cmd == nil {
		return
	}
	if c.ended(i) && !n.shot && (!n.told || n.cmd.ProcessState.ExitCode() != 0) {
		c.t.Errorf("%s has ended by itself: %v", n.id, n.cmd.ProcessState)
	}
	c.signal(i, syscall.SIGKILL)
	<-n.gone
	n.cmd = nil
}

// ended says whether a node's process ended without being killed by us.
func (c *nodes) ended(i int) bool {
	select {
	case <-c.n[i].gone:
		return true
	default:
		return false
	}
}

// logHas says whether a node's log, over all its processes, has a text.
func (c *nodes) logHas(i int, text string) bool {
	b, err := os.ReadFile(c.n[i].log)
	return err == nil && bytes.Contains(b, []byte(text))
}

// ctl runs keelctl and returns its standard output.
func (c *nodes) ctl(args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	args = append([]string{"--endpoints", strings.Join(c.endpoints, ",")}, args...)
	cmd := exec.CommandContext(ctx, filepath.Join(binaries, "keelctl"), args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return out, fmt.Errorf("keelctl %v: %w: %s", args[2:], err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

func (c *nodes) initArgs(shards int) []string {
	var members []string
	for _, n := range c.n {
		members = append(members, n.id+"="+n.raft)
	}
	return []string{"cluster", "init", "--nodes", strings.Join(members, ","), "--shards", strconv.Itoa(shards), "--timeout", "90s"}
}

// found makes the nodes a cluster.
func (c *nodes) found(shards int) {
	c.t.Helper()
	if _, err := c.ctl(c.initArgs(shards)...); err != nil {
		c.t.Fatal(err)
	}
	c.healthy()
}

func (c *nodes) healthy() {
	c.t.Helper()
	if _, err := c.ctl("cluster", "status", "--exit-when-healthy", "--wait", "90s", "--timeout", "100s"); err != nil {
		c.t.Fatal(err)
	}
}

// leader returns the node that leads a shard as far as the others know.
func (c *nodes) leader(shard int) int {
	out, err := c.ctl("shard", "list", "-o", "json")
	var list struct {
		Items []struct {
			ID     int    `json:"id"`
			Leader string `json:"leader"`
		} `json:"items"`
	}
	if err == nil {
		err = json.Unmarshal(out, &list)
	}
	if err != nil {
		c.t.Logf("no leader of shard %d known: %v", shard, err)
		return -1
	}
	for _, s := range list.Items {
		for i, n := range c.n {
			if s.ID == shard && s.Leader == n.id {
				return i
			}
		}
	}
	return -1
}

// agree fails the test unless every replica of every shard has one content and
// one op hash at one index.
func (c *nodes) agree() {
	c.t.Helper()
	out, err := c.ctl("shard", "hash", "-o", "json", "--timeout", "60s")
	if err != nil {
		c.t.Fatalf("hashes of the replicas: %v\n%s", err, out)
	}
	var list struct {
		Items []struct {
			Shard   int    `json:"shard"`
			Content string `json:"content"`
			Index   uint64 `json:"index"`
			Error   string `json:"error"`
		} `json:"items"`
	}
	if err := json.Unmarshal(out, &list); err != nil {
		c.t.Fatal(err)
	}
	seen, replicas := make(map[int]string), make(map[int]int)
	for _, r := range list.Items {
		is := fmt.Sprint(r.Content, r.Index)
		if was, ok := seen[r.Shard]; r.Error != "" || r.Content == "" || ok && was != is {
			c.t.Errorf("shard %d: %+v, others %s", r.Shard, r, was)
		}
		seen[r.Shard] = is
		replicas[r.Shard]++
	}
	for shard, count := range replicas {
		if count != len(c.n) {
			c.t.Errorf("shard %d: %d replicas answered", shard, count)
		}
	}
}

// client opens a client that ends with the test at the latest.
func (c *nodes) client(opts ...keel.Option) *keel.Client {
	c.t.Helper()
	cl, err := keel.Open(c.t.Context(), c.endpoints, opts...)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { closeClient(cl) })
	return cl
}

func closeClient(cl *keel.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = cl.Close(ctx) // the nodes may be down; a second Close does nothing
}

// serves waits until the cluster takes writes on all shards again (CR3).
func (c *nodes) serves(probe *keel.Value[int64]) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 60*time.Second)
	defer cancel()
	for i := range int64(16) {
		if _, err := probe.Set(ctx, "probe"+strconv.FormatInt(i, 10), i); err != nil {
			c.t.Fatalf("the cluster takes no writes: %v", err)
		}
	}
}

// eventually repeats a look until it finds no error.
func eventually(t *testing.T, what string, look func() error) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		err := look()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain until %s: %v", what, err)
		}
		pause(t.Context(), 50*time.Millisecond)
	}
}

// pause is a gap in a schedule of faults, never a wait for something to happen.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// outcome of an error of the client; nil means applied.
func outcome(err error) keel.Outcome {
	var e *keel.Error
	switch {
	case err == nil:
		return keel.OutcomeApplied
	case errors.As(err, &e):
		return e.Outcome
	default:
		return keel.OutcomeUnknown
	}
}
