package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

const apiPrefix = "/keelstate.v1."

// methodLabel is "State/Write" for ours, "other" for the rest: full method
// names come from the network and would not be bounded.
func methodLabel(full string) string {
	if rest, ok := strings.CutPrefix(full, apiPrefix); ok {
		return rest
	}
	return "other"
}

func (s *Server) interceptUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (reply any, err error) {
	if !strings.HasPrefix(info.FullMethod, apiPrefix) {
		return handler(ctx, req)
	}
	start := time.Now()
	method := methodLabel(info.FullMethod)
	err = s.guard(method, func() (err error) {
		if err = s.sameCluster(ctx); err == nil {
			reply, err = handler(ctx, req)
		}
		return err
	})
	s.metrics.seconds.WithLabelValues(method).Observe(time.Since(start).Seconds())
	if err == nil {
		s.metrics.requests.WithLabelValues(method, reasonOK).Inc()
		s.logRequest(ctx, method, start, nil)
		return reply, nil
	}
	d := s.detail(ctx, err)
	s.metrics.requests.WithLabelValues(method, reasonOf(apierr.FromDetail(d))).Inc()
	s.logRequest(ctx, method, start, err)
	return nil, apierr.StatusOfDetail(d).Err()
}

func (s *Server) interceptStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !strings.HasPrefix(info.FullMethod, apiPrefix) {
		return s.untilDrained(srv, stream, handler)
	}
	start := time.Now()
	method := methodLabel(info.FullMethod)
	open := s.metrics.open.WithLabelValues(method)
	open.Inc()
	defer open.Dec()
	ctx := stream.Context()
	err := s.guard(method, func() error {
		if err := s.sameCluster(ctx); err != nil {
			return err
		}
		return handler(srv, stream)
	})
	s.logRequest(ctx, method, start, err)
	if err == nil {
		s.metrics.streams.WithLabelValues(method, reasonOK).Inc()
		return nil
	}
	d := s.detail(ctx, err)
	s.metrics.streams.WithLabelValues(method, reasonOf(apierr.FromDetail(d))).Inc()
	return apierr.StatusOfDetail(d).Err()
}

// sameCluster refuses a client that belongs to another cluster, before anything of
// its request is looked at (SV7): two clusters of one incarnation number their
// sessions, shards and epochs alike, above all two that were restored from one
// checkpoint.
func (s *Server) sameCluster(ctx context.Context) error {
	named := metadata.ValueFromIncomingContext(ctx, base.ClusterHeader)
	if len(named) == 0 {
		return nil // a client that does not know yet
	}
	own := s.backend.ClusterID()
	if own == "" || named[0] == string(own) {
		return nil
	}
	return &base.Error{Cause: base.ErrIdentity, Field: "cluster", Ordinal: -1,
		Hint: fmt.Sprintf("the client belongs to cluster %.64q, this node to %s; begin again with a new client", named[0], own)}
}

// untilDrained ends the streams of other services (health watches) at a drain:
// they would hold it up for ever.
func (s *Server) untilDrained(srv any, stream grpc.ServerStream, handler grpc.StreamHandler) error {
	ctx, cancel := s.drainContext(stream.Context())
	defer cancel()
	return s.guard("other", func() error { return handler(srv, &contextStream{ServerStream: stream, ctx: ctx}) })
}

// contextStream is a stream with another context.
type contextStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (c *contextStream) Context() context.Context { return c.ctx }

// drainContext is ctx that also ends when the server drains.
func (s *Server) drainContext(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-s.draining:
			cancel(base.ErrShuttingDown)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// guard turns a panic of f into base.ErrInternal (SV6).
func (s *Server) guard(method string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.metrics.panics.Inc()
			s.logger.Error("panic while serving a request", "method", method, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = fmt.Errorf("serving %s: %w", method, base.ErrInternal)
		}
	}()
	return f()
}

// detail encodes an error with the address of the leader that it hints at.
func (s *Server) detail(ctx context.Context, err error) *keelstatepb.ErrorDetail {
	d := apierr.ToDetail(err)
	if d.GetLeaderHint() != "" {
		d.LeaderAddress = s.hints.lookup(ctx, s.backend, base.NodeID(d.LeaderHint))
	}
	return d
}

func (s *Server) logRequest(ctx context.Context, method string, start time.Time, err error) {
	level := slog.LevelDebug
	if err != nil && errors.Is(err, base.ErrInternal) {
		level = slog.LevelWarn
	}
	if !s.logger.Enabled(ctx, level) {
		return
	}
	args := []any{"method", method, "duration", time.Since(start), "reason", reasonOf(err)}
	if p, ok := peer.FromContext(ctx); ok {
		args = append(args, "peer", p.Addr.String())
	}
	if err != nil {
		args = append(args, "error", err)
	}
	s.logger.Log(ctx, level, "served", args...)
}
