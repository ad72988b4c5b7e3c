package keel

import (
	"context"
	"log/slog"
	"net"
	"time"

	"google.golang.org/grpc"
)

// Option changes how Open makes a client.
type Option func(*options)

type options struct {
	log            *slog.Logger
	dial           []grpc.DialOption
	credentials    bool // dial has transport credentials
	lease          time.Duration
	attemptTimeout time.Duration
	callTimeout    time.Duration
	backoffMin     time.Duration
	backoffMax     time.Duration
	retryRatio     float64
	retryFloor     float64
	window         int
	maxBytes       int64
	oneSession     bool
}

// Bounds that follow from the server's limits (engine/state, raftfsm).
const (
	// maxMessageBytes bounds a message on the wire.
	maxMessageBytes = 16 << 20
	// maxRequestBytes bounds the keys and values of one request to one shard.
	maxRequestBytes = 8 << 20
	// maxBatchBytes is where a message stops taking more requests.
	maxBatchBytes = 1 << 20
	// maxReadBytes bounds the queries of one request, with room in the message.
	maxReadBytes = maxMessageBytes - maxBatchBytes
	// maxReadQueries and chunkBytes are where a ReadBatch starts another request.
	maxReadQueries = 1000
	chunkBytes     = maxRequestBytes
	// maxNameBytes bounds each of a key, a user key and a namespace.
	maxNameBytes = 32 << 10
	// maxWindow is below the number of records that a shard keeps of a session.
	maxWindow = 512
)

func defaults() options {
	return options{
		log:            slog.New(slog.DiscardHandler),
		lease:          time.Minute,
		attemptTimeout: 5 * time.Second,
		backoffMin:     20 * time.Millisecond,
		backoffMax:     200 * time.Millisecond,
		retryRatio:     0.1,
		retryFloor:     10,
		window:         maxWindow,
		maxBytes:       64 << 20,
	}
}

// WithLogger sets where the client logs; without it nothing is logged.
func WithLogger(l *slog.Logger) Option { return func(o *options) { o.log = l } }

// WithDialOptions adds gRPC dial options, for example interceptors.
func WithDialOptions(d ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, d...) }
}

// WithTransportSecurity sets the credentials of the transport, for example
// grpc.WithTransportCredentials(credentials.NewTLS(config)). Without it the
// connections are in plain text.
func WithTransportSecurity(d grpc.DialOption) Option {
	return func(o *options) { o.dial, o.credentials = append(o.dial, d), true }
}

// WithDialer sets how addresses are dialled; tests lose and delay bytes here.
func WithDialer(f func(ctx context.Context, address string) (net.Conn, error)) Option {
	return WithDialOptions(grpc.WithContextDialer(f))
}

// WithSessionLease sets how long the cluster remembers the client's session
// after the last sign of life. Default one minute.
func WithSessionLease(d time.Duration) Option { return func(o *options) { o.lease = d } }

// WithOneSession keeps the client from opening another session once its first has
// ended, by a rollback of the cluster, say, or because its lease ran out: from then
// on writes are refused with ErrSessionEnded, which is not retryable. So whatever the
// client writes belongs to one incarnation of the cluster and to one registration of a
// Participant, which a job needs that rewinds its source.
func WithOneSession() Option { return func(o *options) { o.oneSession = true } }

// WithAttemptTimeout sets how long one node may keep a request without an
// answer before the client asks another. It ends no call. Default 5 s.
func WithAttemptTimeout(d time.Duration) Option { return func(o *options) { o.attemptTimeout = d } }

// WithCallTimeout bounds calls whose context has no deadline. Default none.
func WithCallTimeout(d time.Duration) Option { return func(o *options) { o.callTimeout = d } }

// WithBackoff bounds the pause between attempts, which doubles from min to max
// with jitter. Default 20 to 200 ms.
func WithBackoff(min, max time.Duration) Option {
	return func(o *options) { o.backoffMin, o.backoffMax = min, max }
}

// WithRetryBudget bounds retries to a ratio of the calls plus a floor per
// second; beyond it a retry waits, at most a second. Default 0.1 and 10. Not
// counted are requests that a node's refusal sends to another one by name, the
// open writes of a shard sent again together, and signs of life of the session.
func WithRetryBudget(ratio, perSecond float64) Option {
	return func(o *options) { o.retryRatio, o.retryFloor = ratio, perSecond }
}

// WithMaxInFlight bounds the open writes per shard (at most 512) and the bytes
// of all open writes. More calls wait. Default 512 and 64 MiB.
func WithMaxInFlight(perShard int, bytes int64) Option {
	return func(o *options) {
		o.window, o.maxBytes = min(max(perShard, 1), maxWindow), max(bytes, maxMessageBytes)
	}
}
