package server

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
)

// Options of a server; the zero value means the documented defaults.
type Options struct {
	// Logger; default: discard. Requests are logged at debug level.
	Logger *slog.Logger
	// Registerer for metrics; nil: not exported.
	Registerer prometheus.Registerer
	// GRPC is passed to the gRPC server, for instance credentials.
	GRPC []grpc.ServerOption

	// StreamRequests and StreamBytes bound what one stream holds, from receipt
	// until the result is sent (SV3). Defaults 4096 and 32 MiB. One request
	// larger than StreamBytes is served alone.
	StreamRequests int
	StreamBytes    int
	// StreamReads bounds the reads of one stream that run at once. Default 32.
	StreamReads int
	// ReadBytes bounds what the reads that run at once on the node may be
	// expected to answer; more reads wait. Default 256 MiB.
	ReadBytes int
	// MaxStreams bounds the calls and streams that one connection has open; more
	// wait at the client. Default 1024.
	MaxStreams int

	// KeepAlive is how long a connection may be silent before the server asks
	// whether the client is there, and how long it waits for the answer before
	// it closes the connection. Default 10 s; at least 1 s.
	KeepAlive time.Duration
	// ScanIdle is how long a client may take no page of a scan, which keeps old
	// versions of the data in the engine. Then the scan ends with ErrDeadline;
	// the client may resume after its last cursor. Default 2 minutes.
	ScanIdle time.Duration
}

// EnsureDefaults replaces zero fields by their defaults.
func (o *Options) EnsureDefaults() {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&o.StreamRequests, 4096)
	def(&o.StreamBytes, 32<<20)
	def(&o.StreamReads, 32)
	def(&o.ReadBytes, 256<<20)
	def(&o.MaxStreams, 1024)
	if o.KeepAlive == 0 {
		o.KeepAlive = 10 * time.Second
	}
	if o.ScanIdle == 0 {
		o.ScanIdle = 2 * time.Minute
	}
}

// Server is the gRPC server of one node.
type Server struct {
	backend Backend
	opts    Options
	logger  *slog.Logger
	metrics *metrics
	grpc    *grpc.Server
	health  *health.Server
	hints   addressCache
	reads   *semaphore.Weighted // of ReadBytes

	// draining is closed by Drain: watches and idle streams end.
	draining  chan struct{}
	drainOnce sync.Once
	// receivers counts the goroutines of streams other than the handlers.
	receivers sync.WaitGroup
}

// New makes a server; Serve starts it.
func New(b Backend, o Options) (*Server, error) {
	o.EnsureDefaults()
	m, err := newMetrics(o.Registerer)
	if err != nil {
		return nil, err
	}
	s := &Server{backend: b, opts: o, logger: o.Logger, metrics: m, draining: make(chan struct{}), health: health.NewServer(),
		reads: semaphore.NewWeighted(int64(o.ReadBytes))}
	opts := append([]grpc.ServerOption{
		grpc.MaxRecvMsgSize(state.MaxMessageBytes),
		grpc.MaxSendMsgSize(state.MaxMessageBytes),
		// A stream's window is what the server holds (SV3), not what gRPC
		// buffers before it: large enough for a full message in flight.
		grpc.InitialWindowSize(4 << 20),
		grpc.InitialConnWindowSize(16 << 20),
		grpc.WaitForHandlers(true),
		grpc.MaxConcurrentStreams(uint32(o.MaxStreams)),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: o.KeepAlive, Timeout: o.KeepAlive}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.ChainUnaryInterceptor(s.interceptUnary),
		grpc.ChainStreamInterceptor(s.interceptStream),
	}, o.GRPC...)
	s.grpc = grpc.NewServer(opts...)
	keelstatepb.RegisterStateServer(s.grpc, &stateService{s: s})
	keelstatepb.RegisterClusterServer(s.grpc, &clusterService{s: s})
	keelstatepb.RegisterAdminServer(s.grpc, &adminService{s: s})
	keelstatepb.RegisterCheckpointsServer(s.grpc, &checkpointService{s: s})
	healthpb.RegisterHealthServer(s.grpc, s.health)
	reflection.Register(s.grpc)
	s.SetServing(false)
	return s, nil
}

// Serve accepts connections until Drain or Stop; it closes the listener.
func (s *Server) Serve(l net.Listener) error { return s.grpc.Serve(l) }

// SetServing tells the answer of the gRPC health service, for the whole server
// and for each service.
func (s *Server) SetServing(serving bool) {
	status := healthpb.HealthCheckResponse_NOT_SERVING
	if serving {
		status = healthpb.HealthCheckResponse_SERVING
	}
	for _, name := range []string{"", keelstatepb.State_ServiceDesc.ServiceName, keelstatepb.Cluster_ServiceDesc.ServiceName,
		keelstatepb.Admin_ServiceDesc.ServiceName, keelstatepb.Checkpoints_ServiceDesc.ServiceName} {
		s.health.SetServingStatus(name, status)
	}
}

// Drain accepts no new connections and calls, tells clients to go elsewhere,
// and waits for calls and streams to end, at most until the context does.
// Watches end at once; other streams when nothing of theirs is outstanding.
func (s *Server) Drain(ctx context.Context) error {
	s.drainOnce.Do(func() { close(s.draining) })
	s.health.Shutdown()
	done := make(chan struct{})
	go func() {
		s.grpc.GracefulStop()
		close(done)
	}()
	select {
	case <-done:
		s.waitReceivers(ctx)
		return nil
	case <-ctx.Done():
		s.Stop()
		<-done
		return ctx.Err()
	}
}

// stopPatience bounds how long Stop waits for receivers whose streams have ended:
// one that still hangs in the backend must not keep the process.
const stopPatience = 5 * time.Second

// Stop ends every call and closes every connection. It waits for the handlers,
// and for what they have begun as long as that ends with its context.
func (s *Server) Stop() {
	s.drainOnce.Do(func() { close(s.draining) })
	s.grpc.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), stopPatience)
	defer cancel()
	s.waitReceivers(ctx)
}

// waitReceivers waits for the goroutines of streams, no longer than ctx.
func (s *Server) waitReceivers(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		s.receivers.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		s.logger.Warn("a stream that has ended still waits for the node; going on without it")
	}
}

// addressCache finds the gRPC address of a node for error details. It asks for
// the topology at most once per addressAge: errors with a hint come in bursts.
type addressCache struct {
	// at is when it was last looked, with its monotonic reading: a step of the
	// wall clock neither stops the looks nor makes one for every error.
	at    atomic.Pointer[time.Time]
	known atomic.Pointer[map[base.NodeID]string]
}

const addressAge = time.Second

func (c *addressCache) lookup(ctx context.Context, b Backend, n base.NodeID) string {
	last, now := c.at.Load(), time.Now()
	if (last == nil || now.Sub(*last) > addressAge) && c.at.CompareAndSwap(last, &now) {
		if t, err := b.Topology(ctx, 0); err == nil {
			m := make(map[base.NodeID]string, len(t.Nodes))
			for _, node := range t.Nodes {
				m[node.ID] = node.GRPCAddr
			}
			c.known.Store(&m)
		}
	}
	if m := c.known.Load(); m != nil {
		return (*m)[n]
	}
	return ""
}
