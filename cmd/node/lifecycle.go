package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/api/server"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/rocks"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// process is a running node with everything around it.
type process struct {
	conf     *config
	log      *slog.Logger
	registry *prometheus.Registry
	grpc     net.Listener
	driver   engine.Driver
	objects  objectstore.Store // nil: none is configured
	attempts objectstore.Store // the same without repeats
	observer *observer
	node     *cluster.Node
	gossip   *gossiper
	server   *server.Server
	clock    *faultClock // nil without fault injection

	stop    chan struct{} // closed when the stop begins: background loops end
	loops   sync.WaitGroup
	serving chan error // one value when the gRPC server stops serving; never closed
}

// runNode runs a node until a signal or a failure.
func runNode(ctx context.Context, c *config, stderr io.Writer) error {
	if err := c.validate(); err != nil {
		return err
	}
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	p, err := start(c, newLogger(c, stderr))
	if err != nil {
		return asDiskError(err, c.dataDir)
	}
	p.log.Info("serving", "grpc", p.grpcAddr(), "raft", p.node.RaftAddr(), "http", p.conf.advertiseHTTP, "cluster", string(p.node.Identity().Cluster))
	return asDiskError(p.wait(ctx, signals), c.dataDir)
}

// start brings everything up in the order of the package comment; on failure
// what was started is stopped again.
func start(c *config, log *slog.Logger) (_ *process, err error) {
	bridgeGRPCLog(log)
	p := &process{conf: c, log: log, registry: newRegistry(), stop: make(chan struct{}), serving: make(chan error, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.shutdown(context.Background(), false))
		}
	}()
	if p.grpc, err = listen("grpc-addr", c.grpcAddr, &c.advertiseGRPC); err != nil {
		return nil, err
	}
	if c.faultInjection {
		p.clock = newFaultClock()
	}
	if err = p.startHTTP(); err != nil {
		return nil, err
	}
	if p.driver, err = newDriver(c); err != nil {
		return nil, err
	}
	if err = p.openObjects(); err != nil {
		return nil, err
	}
	if err = p.startNode(); err != nil {
		return nil, err
	}
	if err = p.writePID(); err != nil {
		return nil, err
	}
	if err = p.startServer(); err != nil {
		return nil, err
	}
	return p, nil
}

// listen opens a listener and fills in what is advertised for it.
func listen(name, addr string, advertised *string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if *advertised == "" {
		*advertised = advertisedFor(addr, l.Addr())
	}
	return l, nil
}

// advertisedFor keeps the host as configured (it may be a name that means more
// to others than the address it resolves to) and takes the port as bound.
func advertisedFor(configured string, bound net.Addr) string {
	host, _, err := net.SplitHostPort(configured)
	_, port, err2 := net.SplitHostPort(bound.String())
	if err != nil || err2 != nil {
		return bound.String()
	}
	return net.JoinHostPort(host, port)
}

func (p *process) startHTTP() error {
	if p.conf.httpAddr == "" {
		p.observer = &observer{} // readiness still feeds the gRPC health service
		return nil
	}
	l, err := listen("http-addr", p.conf.httpAddr, &p.conf.advertiseHTTP)
	if err != nil {
		return err
	}
	p.observer = startObserver(l, p.registry, p.conf, p.clock, p.log)
	return nil
}

// newDriver makes the storage engine and divides the memory budget: RocksDB
// gets half for its caches and buffers, Go the rest as its soft limit.
func newDriver(c *config) (engine.Driver, error) {
	if c.engine == mem.Name {
		debug.SetMemoryLimit(c.memory)
		return mem.NewDriver(), nil
	}
	share := c.memory / 2
	d, err := rocks.NewDriver(rocks.Options{MemoryBytes: share})
	if err != nil {
		return nil, fmt.Errorf("starting the storage engine: %w", err)
	}
	debug.SetMemoryLimit(c.memory - share)
	return d, nil
}

// boundLog sets the bounds of the logs in the proportions of the cluster's
// defaults, which it leaves as they are.
func (c *config) boundLog(o *cluster.Options) {
	if c.logSize == 0 || c.logSize == defaultLogSize { // 0: the throw-away node
		return
	}
	size := uint64(c.logSize)
	o.LogMaxBytes, o.LogKeepBytes, o.LogHardBytes = size, size/4, 4*size
}

func (p *process) startNode() error {
	c := p.conf
	p.gossip = newGossiper(c, p.log)
	o := cluster.Options{
		NodeID: base.NodeID(c.nodeID), DataDir: c.dataDir, Zone: c.zone,
		RaftAddr: c.raftAddr, AdvertiseRaftAddr: c.advertiseRaft, GRPCAddr: c.advertiseGRPC, HTTPAddr: c.advertiseHTTP,
		Driver: p.driver, Logger: p.log, Registerer: p.registry, OnFatal: p.fatal,
	}
	if c.gossipAddr != "" {
		o.Gossip = p.gossip
	}
	if p.objects != nil {
		o.Objects, o.ObjectsURI, o.RebuildFromStore = p.objects, c.objects.uri, c.objects.rebuildFromStore
	}
	if o.ScrubInterval = c.scrubInterval; c.scrubInterval == 0 {
		o.ScrubInterval = -1
	}
	c.checkpoints.apply(&o)
	c.boundLog(&o)
	if p.clock != nil {
		o.WallClock = p.clock.Now
	}
	if c.quick {
		o.ElectionTimeout, o.CheckInterval = 100*time.Millisecond, 100*time.Millisecond
	}
	n, err := cluster.New(o)
	if err != nil {
		return fmt.Errorf("opening node %s: %w", c.nodeID, err)
	}
	p.node = n
	if err := n.Start(); err != nil {
		return fmt.Errorf("starting node %s: %w", c.nodeID, err)
	}
	p.observer.node.Store(n)
	if c.gossipAddr == "" {
		return nil
	}
	return p.gossip.start(n)
}

// fatal ends the process: the node cannot go on, and whatever it would still do
// could break a promise (CN3).
func (p *process) fatal(err error) {
	p.log.Error("the node cannot go on; the process ends", "cause", err, "code", exitFatal)
	exit(exitFatal)
}

// exit is os.Exit, for tests of what leads to it.
var exit = os.Exit

func (p *process) startServer() error {
	s, err := server.New(server.Node(p.node), server.Options{Logger: p.log, Registerer: p.registry})
	if err != nil {
		return fmt.Errorf("starting the gRPC server: %w", err)
	}
	p.server = s
	p.loops.Add(1)
	go p.watchReadiness()
	if p.objects != nil {
		p.loops.Add(1)
		go p.watchObjects()
	}
	go func() { p.serving <- s.Serve(p.grpc) }()
	return nil
}

// readinessPoll is how often readiness is looked at for the gRPC health service
// and gossip's metadata; both are hints.
const readinessPoll = 250 * time.Millisecond

func (p *process) watchReadiness() {
	defer p.loops.Done()
	tick := time.NewTicker(readinessPoll)
	defer tick.Stop()
	was := false
	for {
		ready, why := p.observer.isReady()
		if ready != was {
			p.log.Info("readiness changed", "ready", ready, "why", why)
			was = ready
		}
		p.server.SetServing(ready)
		p.gossip.refresh(p.node)
		select {
		case <-tick.C:
		case <-p.stop:
			return
		}
	}
}

func (p *process) grpcAddr() string { return p.conf.advertiseGRPC }

// wait waits for a reason to stop, and stops. A second signal ends the process
// at once.
func (p *process) wait(ctx context.Context, signals <-chan os.Signal) error {
	var cause error
	select {
	case s := <-signals:
		p.log.Info("stopping; a second signal stops at once", "signal", s.String())
	case <-ctx.Done():
	case cause = <-p.serving:
		cause = fmt.Errorf("serving gRPC on %s: %w", p.grpcAddr(), cause)
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case s := <-signals:
			p.log.Warn("stopping at once", "signal", s.String())
			exit(exitFailed)
		case <-done:
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), p.conf.drainTimeout)
	defer cancel()
	err := p.shutdown(ctx, cause == nil)
	p.log.Info("stopped")
	return errors.Join(cause, err)
}

// shutdown stops what was started, in the reverse order. With drain, offices
// and calls are handed over first, at most until ctx ends.
func (p *process) shutdown(ctx context.Context, drain bool) error {
	var errs []error
	failed := func(doing string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", doing, err))
		}
	}
	if p.observer != nil {
		p.observer.stopping.Store(true)
	}
	close(p.stop)
	p.loops.Wait()
	if p.server != nil {
		p.server.SetServing(false)
		if drain {
			p.drain(ctx)
		}
		p.server.Stop()
	} else if p.grpc != nil {
		failed("closing the gRPC listener", p.grpc.Close())
	}
	if p.gossip != nil {
		failed("leaving gossip", p.gossip.close(drain))
	}
	if p.observer != nil {
		p.observer.node.Store(nil)
	}
	if p.node != nil {
		failed("closing the node", p.node.Close())
	}
	if p.objects != nil {
		failed("closing the object store", p.objects.Close())
	}
	if p.driver != nil {
		failed("closing the storage engine", p.driver.Close())
	}
	if p.observer != nil {
		failed("closing HTTP", p.observer.close())
	}
	failed("removing the pid file", p.removePID())
	return errors.Join(errs...)
}

// drain hands over offices and lets calls end. What does not work in time is no
// failure of the stop: the others elect, and clients retry.
func (p *process) drain(ctx context.Context) {
	if err := p.node.Drain(ctx); err != nil {
		p.log.Warn("not every office was handed over", "error", err)
	}
	if err := p.server.Drain(ctx); err != nil {
		p.log.Warn("calls were cut off", "error", err)
	}
}

// writePID writes the pid file, after the data directory's lock is held: the
// file is always that of the process that owns the directory.
func (p *process) writePID() error {
	if p.conf.pidFile == "" {
		return nil
	}
	if dir := filepath.Dir(p.conf.pidFile); dir != "" {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return fmt.Errorf("pid-file: %w", err)
		}
	}
	if err := os.WriteFile(p.conf.pidFile, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644); err != nil {
		return fmt.Errorf("pid-file: %w", err)
	}
	return nil
}

// removePID removes the pid file if it is this process's.
func (p *process) removePID() error {
	if p.conf.pidFile == "" {
		return nil
	}
	raw, err := os.ReadFile(p.conf.pidFile)
	if errors.Is(err, os.ErrNotExist) || err == nil && string(raw) != strconv.Itoa(os.Getpid())+"\n" {
		return nil
	}
	if err != nil {
		return err
	}
	return os.Remove(p.conf.pidFile)
}
