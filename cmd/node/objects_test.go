package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/s3server"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/snapshot"
)

// lines is a log that may be read while it is written.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) has(text string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !strings.Contains(l.b.String(), text) {
		return fmt.Errorf("the log lacks %q:\n%s", text, l.b.String())
	}
	return nil
}

// startWithStore starts a node that is alone and not founded.
func startWithStore(t *testing.T, args ...string) (*process, *lines) {
	t.Helper()
	c, err := load(t, nil, append([]string{"--node-id", "n1", "--data-dir", filepath.Join(t.TempDir(), "data"), "--grpc-addr", "127.0.0.1:0",
		"--raft-addr", "127.0.0.1:0", "--gossip-addr", "", "--http-addr", "127.0.0.1:0", "--engine", "mem", "--memory", "256MiB"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.validate(); err != nil {
		t.Fatal(err)
	}
	log := &lines{}
	p, err := start(c, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.shutdown(context.Background(), false); err != nil {
			t.Error(err)
		}
		if p.objects == nil {
			return
		}
		if _, err := p.objects.Stat(context.Background(), "k"); !errors.Is(err, base.ErrClosed) {
			t.Errorf("the store is open after the node: %v", err)
		}
	})
	return p, log
}

func TestNoStore(t *testing.T) {
	p, _ := startWithStore(t)
	if p.objects != nil {
		t.Error("there is a store")
	}
}

func TestFileStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "objects of all nodes")
	p, log := startWithStore(t, "--object-store", "file://"+strings.ReplaceAll(dir, " ", "%20"))
	eventually(t, "the store serves", func() error { return log.has("the object store serves") })
	if err := p.objects.Put(context.Background(), "k", objectstore.Bytes([]byte("v"))); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "k")); err != nil {
		t.Error(err)
	}
}

// A store that is down, or whose directory cannot be, keeps no node from starting.
func TestStoreThatDoesNotServe(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "k")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
	in := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(in, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for uri, want := range map[string]string{"s3://bucket/x": "127.0.0.1:1", "file://" + in + "/objects": in} {
		args := []string{"--object-store", uri}
		if strings.HasPrefix(uri, "s3") {
			args = append(args, "--object-store-endpoint", "http://127.0.0.1:1", "--object-store-region", "r")
		}
		p, log := startWithStore(t, args...)
		eventually(t, "the log says so", func() error { return log.has("the object store does not serve") })
		if err := errors.Join(log.has(want), log.has(uri)); err != nil {
			t.Error(err)
		}
		if log.has("a-secret") == nil {
			t.Error("the log has the secret")
		}
		if code, body := get("http://" + p.conf.advertiseHTTP + "/livez"); code != http.StatusOK {
			t.Errorf("livez: %d %s", code, body)
		}
	}
}

func TestS3Store(t *testing.T) {
	server := s3server.Run(t)
	t.Setenv("AWS_ACCESS_KEY_ID", s3server.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s3server.SecretKey)
	p, log := startWithStore(t, "--object-store", "s3://"+s3server.Bucket+"/some/prefix", "--object-store-endpoint", "http://"+server.Endpoint)
	eventually(t, "the store serves", func() error { return log.has("the object store serves") })
	ctx := testContext(t)
	if err := p.objects.Put(ctx, "k", objectstore.Bytes([]byte("value"))); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(server.Dir, s3server.Bucket, "some", "prefix", "k")); err != nil || string(b) != "value" {
		t.Errorf("in the bucket: %q, %v", b, err)
	}
	// Down and up again: the calls meanwhile are repeated, and their figures seen. A
	// service that needs longer to start than a call is repeated proves nothing.
	var err error
	for range 5 {
		if err = acrossARestart(t, server, p); err == nil {
			break
		}
	}
	if err != nil {
		t.Error(err)
	}
}

// acrossARestart gets an object while its service is down, which comes back once the
// call was repeated.
func acrossARestart(t *testing.T, server *s3server.Server, p *process) error {
	t.Helper()
	repeats := func() string {
		_, body := get("http://" + p.conf.advertiseHTTP + "/metrics")
		for _, line := range strings.Split(body, "\n") {
			if strings.HasPrefix(line, `keelstate_object_store_repeats_total{op="stat"}`) {
				return line
			}
		}
		return ""
	}
	server.Stop()
	before, done := repeats(), make(chan error, 1)
	go func() {
		r, err := p.objects.Get(testContext(t), "k", 0, -1)
		if err == nil {
			_, err = io.ReadAll(r)
			err = errors.Join(err, r.Close())
		}
		done <- err
	}()
	eventually(t, "a repeat is counted", func() error {
		if now := repeats(); now == "" || now == before {
			return errors.New("no repeat yet")
		}
		return nil
	})
	server.Start()
	return <-done
}

// checkpoint makes a checkpoint through the API and returns how it ended.
func checkpoint(t *testing.T, addr string) *keelstatepb.Checkpoint {
	t.Helper()
	stream, err := keelstatepb.NewCheckpointsClient(dial(t, addr)).CreateCheckpoint(testContext(t), &keelstatepb.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for {
		c, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if c.Ended {
			return c
		}
	}
}

// A node's checkpoints go into a bucket; while the bucket's service is down they
// fail with a cause, state is served, and what was stored stays whole.
func TestCheckpointsInABucket(t *testing.T) {
	server := s3server.Run(t)
	t.Setenv("AWS_ACCESS_KEY_ID", s3server.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s3server.SecretKey)
	p, log := startWithStore(t, "--engine", "rocks", "--object-store", "s3://"+s3server.Bucket+"/cps", "--object-store-endpoint", "http://"+server.Endpoint)
	eventually(t, "the store serves", func() error { return log.has("the object store serves") })
	if err := p.foundSelf(testContext(t), cluster.FoundSpec{KeyGroups: 16, Shards: 2, Replication: 1}); err != nil {
		t.Fatal(err)
	}
	addr := p.grpcAddr()
	useShard(t, addr, "first")
	first := checkpoint(t, addr)
	if first.Phase != "completed" || first.NewBytes == 0 || !strings.HasPrefix(first.Uri, "s3://"+s3server.Bucket+"/cps/") {
		t.Fatalf("the first checkpoint: %v", first)
	}
	server.Stop()
	down := checkpoint(t, addr)
	if down.Phase != "failed" || !strings.Contains(down.Error, server.Endpoint) {
		t.Errorf("while the service is down: %s, %q", down.Phase, down.Error)
	}
	useShard(t, addr, "second")
	if got := useShard(t, addr, ""); got != "second" {
		t.Errorf("read %q while the service is down", got)
	}
	server.Start()
	again := checkpoint(t, addr)
	if again.Phase != "completed" || again.NewBytes >= again.FullBytes {
		t.Errorf("after it: %v", again)
	}
	for _, c := range []*keelstatepb.Checkpoint{first, again} {
		_, key, _ := strings.Cut(c.Uri, "/cps/")
		v, err := snapshot.VerifyCheckpoint(testContext(t), p.objects, key+"/_metadata", snapshot.VerifyOptions{Full: true})
		if err != nil || len(v.Bad) > 0 || v.ReadBytes == 0 {
			t.Errorf("checkpoint %d: %+v, %v", c.Number, v, err)
		}
	}
}
