// Package s3server runs a real service that speaks S3 for tests: versitygw, as a
// process of its own over a directory. `make tools` builds it.
//
// It must not know the product.
//
// Concurrency: a Server belongs to one test; Stop and Start are not called at the
// same time.
package s3server

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// The credentials of every server.
const (
	AccessKey = "keelstate-test"
	SecretKey = "keelstate-test-secret"
)

// Bucket exists in every server.
const Bucket = "keelstate"

// Server is one running service.
type Server struct {
	// Endpoint is its address, host:port; it stays the same over Stop and Start.
	Endpoint string
	// Dir holds the buckets, as folders with the objects as files.
	Dir string

	t   testing.TB
	cmd *exec.Cmd
	out bytes.Buffer
}

// Run starts a service for a test, which ends it.
func Run(t testing.TB) *Server {
	t.Helper()
	s := &Server{t: t, Dir: t.TempDir(), Endpoint: freeAddress(t)}
	if err := os.Mkdir(filepath.Join(s.Dir, Bucket), 0o750); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	s.Start()
	return s
}

// binary finds what `make tools` built.
func binary(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for d := dir; d != filepath.Dir(d); d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			p := filepath.Join(d, ".deps", "bin", "versitygw")
			if _, err := os.Stat(p); err != nil {
				t.Fatalf("%v: run `make tools` first", err)
			}
			return p
		}
	}
	t.Fatalf("no module above %s", dir)
	return ""
}

func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// Start starts the service, again after Stop, and waits until it answers.
func (s *Server) Start() {
	s.t.Helper()
	s.out.Reset()
	s.cmd = exec.Command(binary(s.t), "--access", AccessKey, "--secret", SecretKey, "--port", s.Endpoint,
		"--health", "/health", "--quiet", "posix", "--sidecar", s.t.TempDir(), s.Dir)
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.out
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	deadline := time.Now().Add(30 * time.Second)
	for {
		if err := s.health(); err == nil {
			return
		} else if time.Now().After(deadline) {
			s.Stop()
			s.t.Fatalf("versitygw at %s does not answer: %v\n%s", s.Endpoint, err, s.out.String())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (s *Server) health() error {
	c := http.Client{Timeout: time.Second}
	r, err := c.Get("http://" + s.Endpoint + "/health")
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("status %s", r.Status)
	}
	return nil
}

// Stop kills the service; what it has stored stays.
func (s *Server) Stop() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait() // killed
	s.cmd = nil
}
