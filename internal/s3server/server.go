// Package s3server runs a real service that speaks S3 for tests: versitygw, as a
// process of its own over a directory. `make tools` builds it, and so does the
// first test that needs it.
//
// It must not know the product.
//
// Concurrency: a Server belongs to one test; Stop and Start are not called at the
// same time.
package s3server

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
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

	t        testing.TB
	binary   string
	readOnly bool
	sidecar  string        // what the service knows of its objects beside their bytes
	cmd      *exec.Cmd     // nil while it is stopped
	exited   chan struct{} // closed when cmd has ended
	out      bytes.Buffer
}

// Run starts a service for a test, which ends it.
func Run(t testing.TB) *Server {
	t.Helper()
	s := &Server{t: t, Dir: t.TempDir(), Endpoint: freeAddress(t), sidecar: t.TempDir(), binary: binary(t)}
	if err := os.Mkdir(filepath.Join(s.Dir, Bucket), 0o750); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	s.Start()
	return s
}

// binary finds what `make tools` builds, and builds it if it is not there.
func binary(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for d := dir; d != filepath.Dir(d); d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err != nil {
			continue
		}
		p := filepath.Join(d, ".deps", "bin", "versitygw")
		if out, err := exec.Command(filepath.Join(d, "build", "tools.sh")).CombinedOutput(); err != nil {
			t.Fatalf("building %s: %v\n%s", p, err, out)
		}
		return p
	}
	t.Fatalf("no module above %s", dir)
	return ""
}

// handedOut are the addresses that a test of this process has or has had: none is
// given twice, for its service may be stopped.
var handedOut sync.Map

// freeAddress is below the range of outgoing connections, so that nobody gets it by
// chance while the service is stopped; the nodes of other tests have others.
func freeAddress(t testing.TB) string {
	t.Helper()
	for range 10000 {
		addr := fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(2000))
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

// Start starts the service, again after Stop, and waits until it answers. One that
// ends before, for want of its port, is started again.
func (s *Server) Start() {
	s.t.Helper()
	s.launch()
	deadline := time.Now().Add(time.Minute)
	for {
		err := s.health()
		select {
		case <-s.exited:
			err = errors.New("it has ended")
		default:
		}
		switch {
		case err == nil:
			return
		case time.Now().After(deadline):
			s.Stop()
			s.t.Fatalf("versitygw at %s does not answer: %v\n%s", s.Endpoint, err, s.out.String())
		}
		time.Sleep(20 * time.Millisecond)
		select {
		case <-s.exited:
			s.launch()
		default:
		}
	}
}

// launch starts the process.
func (s *Server) launch() {
	s.t.Helper()
	s.out.Reset()
	args := []string{"--access", AccessKey, "--secret", SecretKey, "--port", s.Endpoint, "--health", "/health", "--quiet"}
	if s.readOnly {
		args = append(args, "--readonly")
	}
	s.cmd = exec.Command(s.binary, append(args, "posix", "--sidecar", s.sidecar, s.Dir)...)
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.out
	if err := s.cmd.Start(); err != nil {
		s.cmd = nil
		s.t.Fatal(err)
	}
	s.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan struct{}) {
		_ = cmd.Wait() // it is killed, or says why in its output
		close(exited)
	}(s.cmd, s.exited)
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

// StartReadOnly starts a service that refuses whatever changes something.
func (s *Server) StartReadOnly() {
	s.t.Helper()
	s.readOnly = true
	s.Start()
	s.readOnly = false
}

// Stop kills the service; what it has stored stays.
func (s *Server) Stop() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill() // it may have ended
	<-s.exited
	s.cmd = nil
}
