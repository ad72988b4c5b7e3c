package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
)

// devFoundTimeout bounds the founding of a throw-away node.
const devFoundTimeout = 30 * time.Second

// devSettings are those of a throw-away node.
func devSettings() []setting {
	return append([]setting{
		{name: "grpc-addr", def: "127.0.0.1:7401", usage: "listen here for clients", set: address(func(c *config) *string { return &c.grpcAddr }, false)},
		{name: "http-addr", def: "127.0.0.1:7431", usage: "listen here for health and metrics; empty: no HTTP", set: address(func(c *config) *string { return &c.httpAddr }, true)},
	}, commonSettings("mem", "512MiB", "warn")...)
}

func newDevCommand() *cobra.Command {
	var shards, groups int
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a throw-away single node with a founded cluster, ready at once",
		Long: `Runs a single node on a temporary directory, founds a cluster of it, and prints
where it serves once it is ready. Checkpoints go to a directory beside its data.
Everything is gone when it stops.`,
		Example: `  keelstate-node dev
  keelstate-node dev --grpc-addr 127.0.0.1:0 --http-addr 127.0.0.1:0`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if shards < 1 || groups < 1 {
				return usagef("shards and key-groups must be at least 1")
			}
			// Neither the environment nor a file: a leftover of a real node's
			// configuration must not leak into a throw-away one.
			c, err := loadConfig(cmd.Flags(), nil, devSettings())
			if err != nil {
				return err
			}
			return runDev(cmd.Context(), c, cluster.FoundSpec{KeyGroups: groups, Shards: shards, Replication: 1}, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	register(cmd.Flags(), devSettings())
	cmd.Flags().IntVar(&shards, "shards", 2, "shards of the cluster")
	cmd.Flags().IntVar(&groups, "key-groups", 128, "key groups of the cluster")
	return cmd
}

func runDev(ctx context.Context, c *config, spec cluster.FoundSpec, stdout, stderr io.Writer) (err error) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	dir, err := os.MkdirTemp("", "keelstate-dev-")
	if err != nil {
		return fmt.Errorf("making a temporary directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	c.nodeID, c.dataDir, c.raftAddr, c.drainTimeout, c.quick = "dev", filepath.Join(dir, "data"), "127.0.0.1:0", 5*time.Second, true
	store := url.URL{Scheme: "file", Path: filepath.Join(dir, "objects")}
	if err := setObjectStore(c, store.String()); err != nil {
		return err
	}
	if err := c.validate(); err != nil {
		return err
	}
	p, err := start(c, newLogger(c, stderr))
	if err != nil {
		return err
	}
	if err := p.foundSelf(ctx, spec); err != nil {
		return errors.Join(err, p.shutdown(context.Background(), false))
	}
	fmt.Fprintf(stdout, "KEELSTATE_ENDPOINTS=%s\n", p.grpcAddr())
	if c.advertiseHTTP != "" {
		fmt.Fprintf(stdout, "KEELSTATE_HTTP=http://%s\n", c.advertiseHTTP)
	}
	return p.wait(ctx, signals)
}

// foundSelf founds a cluster of this node alone and waits until it is ready.
func (p *process) foundSelf(ctx context.Context, spec cluster.FoundSpec) error {
	ctx, cancel := context.WithTimeout(ctx, devFoundTimeout)
	defer cancel()
	spec.Nodes = []cluster.FoundNode{{ID: base.NodeID(p.conf.nodeID), RaftAddr: p.node.RaftAddr()}}
	reply, err := p.node.Init(ctx, spec)
	if err != nil {
		return fmt.Errorf("founding: %w", err)
	}
	for {
		ready, why := p.node.Ready()
		if ready {
			return nil
		}
		pause := time.NewTimer(10 * time.Millisecond)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return fmt.Errorf("founding is in phase %q and the node not ready: %s: %w", reply.Phase, why, ctx.Err())
		}
	}
}
