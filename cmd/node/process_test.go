package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// useShard declares a state and writes or reads one value of it, and returns
// the value.
func useShard(t *testing.T, addr, write string) string {
	t.Helper()
	conn := dial(t, addr)
	ctx := testContext(t)
	c, s := keelstatepb.NewClusterClient(conn), keelstatepb.NewStateClient(conn)
	d, err := c.DeclareState(ctx, &keelstatepb.DeclareStateRequest{Declaration: &keelstatepb.Declaration{Keyspace: "ks", Name: "v",
		Kind: keelstatepb.StateKind_STATE_KIND_VALUE, KeyType: "string", ValueType: "string"}})
	if err != nil {
		t.Fatalf("declaring: %v", err)
	}
	topo, err := c.GetTopology(ctx, &keelstatepb.GetTopologyRequest{MinRevision: d.Revision})
	if err != nil {
		t.Fatalf("topology: %v", err)
	}
	value := ""
	// One of the shards has the key; a leader may still be taking office.
	eventually(t, "a shard serves the key", func() error {
		var last error
		for _, sh := range topo.Shards {
			if write != "" {
				_, last = s.Write(ctx, &keelstatepb.WriteRequest{Shard: sh.Id, Epoch: sh.Epoch, MetadataRevision: d.Revision, Mutations: []*keelstatepb.Mutation{
					{State: d.Declaration.Id, Op: keelstatepb.MutationOp_MUTATION_OP_VALUE_PUT, Key: []byte("k"), Value: []byte(write)}}})
				if last == nil {
					return nil
				}
				continue
			}
			var r *keelstatepb.ReadResult
			r, last = s.Read(ctx, &keelstatepb.ReadRequest{Shard: sh.Id, Epoch: sh.Epoch, MetadataRevision: d.Revision, Queries: []*keelstatepb.Query{
				{State: d.Declaration.Id, Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: []byte("k")}}})
			if last != nil {
				continue
			}
			if last = apierr.FromDetail(r.Answers[0].Error); last == nil {
				value = string(r.Answers[0].Value)
				return nil
			}
		}
		return last
	})
	return value
}

// TestKillDevNode starts the throw-away node, uses it and ends it.
func TestKillDevNode(t *testing.T) {
	tmp := t.TempDir()
	p := launch(t, tmp, "dev", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--pprof")
	addr, web := p.line("KEELSTATE_ENDPOINTS="), p.line("KEELSTATE_HTTP=")
	waitReady(t, web)
	useShard(t, addr, "hello")
	if got := useShard(t, addr, ""); got != "hello" {
		t.Errorf("read %q", got)
	}
	for path, want := range map[string]string{"/livez": "ok", "/metrics": "keelstate_api_requests_total", "/debug/pprof/": "goroutine"} {
		if code, body := get(web + path); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d %.200s", path, code, body)
		}
	}
	p.signal(syscall.SIGTERM)
	if code := p.code(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// TestKillBySecondSignal: a reflection stream that its client leaves open holds
// up the drain; the second signal does not wait for it.
func TestKillBySecondSignal(t *testing.T) {
	p := launch(t, t.TempDir(), "dev", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--engine", "mem", "--log-level", "info")
	addr, web := p.line("KEELSTATE_ENDPOINTS="), p.line("KEELSTATE_HTTP=")
	s, err := reflectpb.NewServerReflectionClient(dial(t, addr)).ServerReflectionInfo(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&reflectpb.ServerReflectionRequest{MessageRequest: &reflectpb.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	p.signal(syscall.SIGINT)
	eventually(t, "the node is not ready", func() error { // CN2
		if code, body := get(web + "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "stopping") {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	p.signal(syscall.SIGTERM)
	if code := p.code(); code != exitFailed {
		t.Errorf("exit code %d", code)
	}
	if !strings.Contains(p.errText(), "stopping at once") {
		t.Error("the log does not say so")
	}
}

// TestKillNode runs a node with the RocksDB engine: unfounded, founded,
// doubled, killed, restarted, stopped, and looked at offline.
func TestKillNode(t *testing.T) {
	dir, tmp := filepath.Join(t.TempDir(), "data"), t.TempDir()
	pidFile := filepath.Join(tmp, "run", "node.pid")
	grpcAddr, raftAddr, webAddr := freeAddr(t), freeAddr(t), freeAddr(t)
	args := []string{"--node-id", "n1", "--data-dir", dir, "--grpc-addr", grpcAddr, "--raft-addr", raftAddr, "--gossip-addr", "127.0.0.1:0",
		"--http-addr", webAddr, "--memory", "128MiB", "--pid-file", pidFile, "--log-format", "json"}
	web := "http://" + webAddr
	p := launch(t, tmp, args...)
	eventually(t, "the node serves HTTP", func() error {
		if code, body := get(web + "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "does not belong to a cluster") {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	if code, body := get(web + "/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("profiles without --pprof: %d %.100s", code, body)
	}
	conn := dial(t, grpcAddr)
	if _, err := keelstatepb.NewClusterClient(conn).GetTopology(testContext(t), &keelstatepb.GetTopologyRequest{}); !errors.Is(apierr.FromError(err), base.ErrNotFounded) {
		t.Errorf("the topology of no cluster: %v", err)
	}
	r, err := keelstatepb.NewAdminClient(conn).InitCluster(testContext(t), &keelstatepb.InitClusterRequest{Nodes: []*keelstatepb.InitNode{{Id: "n1", RaftAddress: raftAddr}}, Shards: 1})
	if err != nil || r.Phase != "done" {
		t.Fatalf("founding: %v %v", r, err)
	}
	waitReady(t, web)
	useShard(t, grpcAddr, "kept")
	if raw, err := os.ReadFile(pidFile); err != nil || strings.TrimSpace(string(raw)) != strconv.Itoa(p.cmd.Process.Pid) {
		t.Errorf("pid file: %q %v", raw, err)
	}

	second := launch(t, tmp, "--node-id", "n1", "--data-dir", dir, "--grpc-addr", "127.0.0.1:0", "--raft-addr", "127.0.0.1:0",
		"--gossip-addr", "", "--http-addr", "", "--memory", "128MiB")
	if code := second.code(); code != exitFailed || !strings.Contains(second.errText(), dir+" is in use by another process") {
		t.Errorf("a second node on the directory: code %d, %s", code, second.errText())
	}
	taken := launch(t, tmp, args...)
	if code := taken.code(); code != exitFailed || !strings.Contains(taken.errText(), "grpc-addr: ") {
		t.Errorf("a second node on the addresses: code %d, %s", code, taken.errText())
	}

	p.signal(syscall.SIGKILL)
	p.code()
	p = launch(t, tmp, args...) // the pid file of the killed one is replaced
	waitReady(t, web)
	if got := useShard(t, grpcAddr, ""); got != "kept" {
		t.Errorf("after the kill: %q", got)
	}
	p.signal(syscall.SIGTERM)
	if code := p.code(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if _, err := os.Stat(pidFile); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the pid file is left: %v", err)
	}
	other := launch(t, tmp, "--node-id", "n2", "--data-dir", dir, "--grpc-addr", "127.0.0.1:0", "--raft-addr", "127.0.0.1:0", "--gossip-addr", "", "--http-addr", "", "--memory", "128MiB")
	if code := other.code(); code != exitFailed || !strings.Contains(other.errText(), `belongs to node "n1"`) {
		t.Errorf("another node on the directory: code %d, %s", code, other.errText())
	}
	lookOffline(t, dir)
}

// lookOffline runs the offline commands on a stopped node's directory.
func lookOffline(t *testing.T, dir string) {
	t.Helper()
	store := ""
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == engine.MarkerFile {
			store = filepath.Dir(path)
		}
		return err
	})
	if err != nil || store == "" {
		t.Fatalf("no store in %s: %v", dir, err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"debug", "identity", dir}, `"node": "n1"`},
		{[]string{"debug", "raftlog", "verify", dir}, `"Segments": `},
		{[]string{"debug", "raftlog", "dump", dir}, "group"},
		{[]string{"debug", "store", "marker", store}, `"engine": "rocks"`},
		{[]string{"debug", "store", "verify", store}, "ok"},
	} {
		if code, out, stderr := here(nil, c.args...); code != 0 || !strings.Contains(out, c.want) {
			t.Errorf("%v: code %d, %.300s %s", c.args, code, out, stderr)
		}
	}
	for _, args := range [][]string{
		{"debug", "identity", store}, {"debug", "raftlog", "verify", filepath.Join(dir, "nothing")}, {"debug", "store", "marker", dir},
		{"debug", "manifest", "dump", filepath.Join(dir, "IDENTITY")},
	} {
		if code, out, stderr := here(nil, args...); code != exitFailed || out != "" || stderr == "" {
			t.Errorf("%v: code %d, %q %q", args, code, out, stderr)
		}
	}
}

// handedOut are the addresses that a test of this process has or has had: none is
// given twice, for its node may be down, or not up yet.
var handedOut sync.Map

// freeAddr is below the range of outgoing connections, so that nobody gets it by
// chance while its node is down; other packages' tests use others.
func freeAddr(t *testing.T) string {
	t.Helper()
	for range 10000 {
		addr := fmt.Sprintf("127.0.0.1:%d", 12000+rand.IntN(3000))
		if _, taken := handedOut.LoadOrStore(addr, true); taken {
			continue
		}
		if l, err := net.Listen("tcp", addr); err == nil {
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			return addr
		}
	}
	t.Fatal("no free ports")
	return ""
}

// TestFatal is CN3.
func TestFatal(t *testing.T) {
	defer func(old func(int)) { exit = old }(exit)
	code := -1
	exit = func(c int) { code = c }
	var log strings.Builder
	p := &process{log: newLogger(&config{logFormat: "text"}, &log)}
	p.fatal(fmt.Errorf("fsync of segment 7: %w", base.ErrDiskFailed))
	if code != exitFatal || !strings.Contains(log.String(), "fsync of segment 7") {
		t.Errorf("code %d, log %q", code, log.String())
	}
}

// CN3, CN4: a disk that fails its reads at the start ends the process with the
// code of a failed disk, and the words say what to do. Reading the memory of this
// process at address 0 fails as a bad sector does.
func TestDiskThatFailsAtTheStart(t *testing.T) {
	const bad = "/proc/self/mem"
	args := func(dir string) []string {
		return []string{"--node-id", "n1", "--data-dir", dir, "--grpc-addr", "127.0.0.1:0", "--raft-addr", "127.0.0.1:0",
			"--gossip-addr", "", "--http-addr", "127.0.0.1:0", "--engine", "mem"}
	}
	replace := func(path string) {
		t.Helper()
		if err := errors.Join(os.Remove(path), os.Symlink(bad, path)); err != nil {
			t.Fatal(err)
		}
	}
	whole := t.TempDir()
	if c, err := load(t, nil, args(whole)...); err != nil {
		t.Fatal(err)
	} else if p, err := start(c, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	} else if err := p.shutdown(context.Background(), false); err != nil {
		t.Fatal(err)
	}
	replace(filepath.Join(whole, "IDENTITY"))
	code, _, stderr := here(nil, args(whole)...)
	if code != exitFatal || !strings.Contains(stderr, syscall.EIO.Error()) || !strings.Contains(stderr, "the disk under "+whole+" failed") {
		t.Errorf("code %d, %s", code, stderr)
	}
	for err, want := range map[error]bool{
		nil: false, syscall.EIO: true, base.ErrDiskFailed: true, syscall.ENOENT: false, base.ErrCorrupt: false,
		errors.Join(base.ErrDiskFailed, syscall.ENOSPC): false,
	} {
		if got := errors.As(asDiskError(err, "d"), new(diskError)); got != want {
			t.Errorf("%v is a failure of the disk: %v, want %v", err, got, want)
		}
	}
}

func TestVersionAndHelp(t *testing.T) {
	if code, out, _ := here(nil, "version"); code != 0 || !strings.Contains(out, "keelstate-node ") || !strings.Contains(out, "rocks") {
		t.Errorf("%d %s", code, out)
	}
	for _, args := range [][]string{{"--help"}, {"dev", "--help"}, {"debug", "raftlog", "--help"}, {"config", "explain", "--help"}} {
		if code, out, stderr := here(nil, args...); code != 0 || !strings.Contains(out, "Usage:") || stderr != "" {
			t.Errorf("%v: %d %s", args, code, stderr)
		}
	}
	for _, args := range [][]string{{"debug"}, {"debug", "raftlog", "dump"}, {"debug", "nothing"}, {"dev", "--shards", "0"}, {"version", "x"}} {
		if code, _, _ := here(nil, args...); code != exitUsage {
			t.Errorf("%v: code %d", args, code)
		}
	}
}
