package transport

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/internal/base"
)

// Identity is what a node says about itself in every handshake (rule R4).
type Identity struct {
	Cluster base.ClusterID // empty while the node does not belong to a cluster
	Node    base.NodeID
	Disk    base.DiskID
	Engine  string // kind of storage engine; the same on all nodes of a cluster
}

// Options configures a Transport. The zero value of a field means the default
// that its comment names; fields without one are required.
type Options struct {
	// Network is what connections are made of. Default: TCP{}.
	Network Network
	// ListenAddr is the address to listen on ("host:port").
	ListenAddr string
	// Identity is this node's. Cluster may be empty; see SetCluster.
	Identity Identity
	// Resolver gives the address of a node, and false where it is not known.
	// It is called for every new connection and must not block.
	Resolver func(base.NodeID) (addr string, ok bool)
	// CheckPeer checks a peer of the same cluster, or one that belongs to none and
	// was dialled to admit it, against the cluster's record (node and disk) when a
	// connection is made. Nil accepts every peer. It must not block for long.
	CheckPeer func(Identity) error
	// Logger gets the transport's messages. Default: discard.
	Logger *slog.Logger
	// Registerer gets the metrics. Nil: the metrics are not exported.
	Registerer prometheus.Registerer

	// AppendConns is the number of connections per peer for log appends; a
	// group always uses the same one. Default 2, at most 16.
	AppendConns int
	// MaxInflight bounds the appends of one group to one peer that are under
	// way in a pipeline. Default 64.
	MaxInflight int
	// SmallTimeout bounds votes, heartbeats and TimeoutNow. Default 2 s.
	SmallTimeout time.Duration
	// AppendTimeout bounds an append. Default 10 s.
	AppendTimeout time.Duration
	// StallTimeout bounds the time without progress of an InstallSnapshot or a
	// file stream. Default 60 s.
	StallTimeout time.Duration
	// DialTimeout bounds connecting and the handshake. Default 1 s.
	DialTimeout time.Duration
	// BackoffMin and BackoffMax bound the pause after a failed connection; the
	// pause doubles and half of it is random. Requests fail at once meanwhile.
	// Defaults 20 ms and 500 ms.
	BackoffMin, BackoffMax time.Duration
	// PingInterval is how often an idle connection is tried; one that brought
	// nothing for three intervals is closed. Default 1 s.
	PingInterval time.Duration
	// SendQueueBytes bounds the bytes that wait for one connection's writer
	// (one frame may exceed it alone). Default 16 MiB.
	SendQueueBytes int
	// GroupQueueBytes bounds the bytes of received appends that wait for one
	// group. Default 128 MiB: it must admit the largest frame.
	GroupQueueBytes int
	// MaxServerConns bounds the accepted connections. Default 1024.
	MaxServerConns int
	// MaxCalls bounds the node-level calls that run at once for one
	// connection. Default 64.
	MaxCalls int
	// MaxFileStreams bounds the file streams that this node serves at once, and
	// those that it opens at once. Default 16.
	MaxFileStreams int
}

func (o *Options) ensureDefaults() {
	if o.Network == nil {
		o.Network = TCP{}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.CheckPeer == nil {
		o.CheckPeer = func(Identity) error { return nil }
	}
	setDefault(&o.AppendConns, 2)
	setDefault(&o.MaxInflight, 64)
	setDefault(&o.SmallTimeout, 2*time.Second)
	setDefault(&o.AppendTimeout, 10*time.Second)
	setDefault(&o.StallTimeout, time.Minute)
	setDefault(&o.DialTimeout, time.Second)
	setDefault(&o.BackoffMin, 20*time.Millisecond)
	setDefault(&o.BackoffMax, 500*time.Millisecond)
	setDefault(&o.PingInterval, time.Second)
	setDefault(&o.SendQueueBytes, 16<<20)
	setDefault(&o.GroupQueueBytes, 128<<20)
	setDefault(&o.MaxServerConns, 1024)
	setDefault(&o.MaxCalls, 64)
	setDefault(&o.MaxFileStreams, 16)
}

func setDefault[T int | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// Validate returns every problem of the options at once.
func (o *Options) Validate() error {
	var errs []error
	bad := func(field, hint string) { errs = append(errs, base.Invalid(field, hint)) }
	if o.Resolver == nil {
		bad("Resolver", "a function is required")
	}
	if o.Identity.Node == "" {
		bad("Identity.Node", "a node id is required")
	}
	if err := o.Identity.check(); err != nil {
		errs = append(errs, err)
	}
	if o.AppendConns < 1 || o.AppendConns > 16 {
		bad("AppendConns", "use 1 to 16")
	}
	if o.MaxInflight < 1 || o.MaxCalls < 1 || o.MaxFileStreams < 1 || o.MaxServerConns < 1 || o.SendQueueBytes < 1 {
		bad("MaxInflight, MaxCalls, MaxFileStreams, MaxServerConns, SendQueueBytes", "use positive limits")
	}
	if o.GroupQueueBytes < MaxAppendFrame {
		bad("GroupQueueBytes", "use at least MaxAppendFrame")
	}
	if o.BackoffMin < 0 || o.BackoffMax < o.BackoffMin {
		bad("BackoffMax", "use at least BackoffMin")
	}
	return errors.Join(errs...)
}

func (id Identity) check() error {
	if len(id.Cluster) > maxID || len(id.Node) > maxID || len(id.Disk) > maxID || len(id.Engine) > maxID {
		return fmt.Errorf("checking the identity of node %.32q: %w", id.Node, base.ErrTooLarge)
	}
	return nil
}
