package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/keelstate/keelstate/jepsen/s3fault"
)

// What nodes need to know of the object store. Nobody else ever reaches it.
const (
	storeBucket    = "keelstate"
	storeAccessKey = "keelstate-jepsen"
	storeSecretKey = "keelstate-jepsen-secret"
)

// Ports of the object store's host: of the proxy and of the service behind it.
const (
	storePort   = 9000
	servicePort = 7070
)

// storeLimit is how long the service may take to answer for the first time.
const storeLimit = 30 * time.Second

// Store is the object store of a fleet: a service that speaks S3, as a process of
// its own, behind a proxy with faults; both on a host of their own.
type Store struct {
	// Proxy is what nodes reach.
	Proxy *s3fault.Proxy
	// LogFile has what the service wrote.
	LogFile string

	fleet    *Fleet
	dir      string
	endpoint string // of the proxy, host:port
	service  string
	listener net.Listener
	process  *process
}

// store is the one that the nodes use, or nil.
func (f *Fleet) store() *Store { return cmp.Or(f.Store, f.opts.Store) }

// newStore starts the service and the proxy. Close it even after an error.
func (f *Fleet) newStore() error {
	s := &Store{fleet: f, dir: filepath.Join(f.opts.Dir, f.name, StoreHost), LogFile: filepath.Join(f.opts.Dir, StoreHost+".log")}
	f.Store = s
	for _, dir := range []string{filepath.Join("data", storeBucket), "sidecar"} {
		if err := os.MkdirAll(filepath.Join(s.dir, dir), 0o755); err != nil {
			return err
		}
	}
	var err error
	if f.Net != nil {
		s.service = net.JoinHostPort(f.Net.Address(StoreHost), fmt.Sprint(servicePort))
		s.listener, err = f.Net.listen(StoreHost, storePort)
	} else {
		var port []string
		if port, err = freePorts(1); err == nil {
			s.service = net.JoinHostPort("127.0.0.1", port[0])
			s.listener, err = net.Listen("tcp", "127.0.0.1:0")
		}
	}
	if err != nil {
		return err
	}
	s.endpoint = s.listener.Addr().String()
	if err := s.start(); err != nil {
		return err
	}
	s.Proxy = s3fault.New(s.listener, s.service)
	return nil
}

// start starts the service and waits until it answers.
func (s *Store) start() error {
	log, err := os.OpenFile(s.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	argv := []string{s.fleet.opts.StoreBinary, "--access", storeAccessKey, "--secret", storeSecretKey, "--port", s.service, "--health", "/health", "--quiet",
		"posix", "--sidecar", filepath.Join(s.dir, "sidecar"), filepath.Join(s.dir, "data")}
	if s.fleet.Net != nil {
		argv = s.fleet.Net.inside(StoreHost, argv...)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := s.fleet.launcher.start(cmd); err != nil {
		return fmt.Errorf("starting the object store: %w", err)
	}
	p := &process{cmd: cmd, gone: make(chan struct{})}
	s.process = p
	s.fleet.wg.Go(func() {
		_ = cmd.Wait() // how it ended is asked for below
		close(p.gone)
	})
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	err = await(storeLimit, "the object store answers", func() bool {
		resp, err := client.Get("http://" + s.service + "/health")
		if err != nil {
			return p.ended()
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return errors.Join(err, s.Err())
}

// Endpoint is where nodes reach the store, host:port.
func (s *Store) Endpoint() string { return s.endpoint }

// Err says that the service has ended by itself, so that nothing that nodes say of
// their store counts.
func (s *Store) Err() error {
	if s.process != nil && s.process.ended() {
		return fmt.Errorf("the object store ended with code %d; see %s", s.process.cmd.ProcessState.ExitCode(), s.LogFile)
	}
	return nil
}

// flags are those of a node that uses the store, and its environment.
func (s *Store) flags() (flags, env []string) {
	return []string{"--object-store", "s3://" + storeBucket + "/jepsen", "--object-store-endpoint", "http://" + s.endpoint,
			"--object-store-region", "us-east-1", "--object-store-path-style", "true"},
		[]string{"AWS_ACCESS_KEY_ID=" + storeAccessKey, "AWS_SECRET_ACCESS_KEY=" + storeSecretKey, "AWS_SESSION_TOKEN=", "NO_PROXY=*", "no_proxy=*"}
}

// close ends both.
func (s *Store) close() error {
	var failed error
	switch {
	case s.Proxy != nil:
		failed = s.Proxy.Close()
	case s.listener != nil:
		failed = s.listener.Close()
	}
	if s.process == nil {
		return failed
	}
	if err := s.process.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return errors.Join(failed, fmt.Errorf("ending the object store: %w", err))
	}
	ctx, cancel := context.WithTimeout(context.Background(), goneLimit)
	defer cancel()
	select {
	case <-s.process.gone:
	case <-ctx.Done():
		failed = errors.Join(failed, errors.New("ending the object store: it hangs"))
	}
	return failed
}
