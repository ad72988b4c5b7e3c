package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// checkpointOptions are of the measurements of checkpoints. Unlike the others they
// start the nodes that they measure.
type checkpointOptions struct {
	common
	parts, stores, modes, sizes string
	dir, bin, gateway, memory   string
	keys, valueBytes            int
	big                         int64
	rate, catchUpRate           int
	rounds                      int
	quiet                       time.Duration
}

// figure is one number of a measurement. Its unit is in its name.
type figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// figures are what one case of a part gave.
type figures struct {
	Part   string   `json:"part"`
	Case   string   `json:"case"`
	Values []figure `json:"values"`
}

// checkpointParts are the measurements, by name.
var checkpointParts = map[string]func(*checkpointOptions, context.Context) error{
	"checkpoint": (*checkpointOptions).measureCheckpoints,
	"modes":      (*checkpointOptions).measureModes,
	"rollback":   (*checkpointOptions).measureRollback,
	"restore":    (*checkpointOptions).measureRestore,
	"catchup":    (*checkpointOptions).measureCatchUp,
}

func checkpointsCommand() *cobra.Command {
	o := &checkpointOptions{}
	cmd := &cobra.Command{Use: "checkpoints", Short: "Measure checkpoints, rollback, restore and catch-up on clusters of its own", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) }}
	o.register(cmd)
	_ = cmd.Flags().MarkHidden("endpoints") // the clusters are its own
	f := cmd.Flags()
	f.StringVar(&o.parts, "parts", "checkpoint,modes,rollback,restore,catchup", "what is measured")
	f.StringVar(&o.stores, "stores", "file,s3", "where checkpoints go in the parts checkpoint and modes")
	f.StringVar(&o.modes, "modes", "incremental,changelog", "ways to make checkpoints that part modes compares")
	f.StringVar(&o.sizes, "sizes", "100MB,1GB", "sizes of the state in part modes")
	f.StringVar(&o.dir, "dir", ".bench", "all files go to a new folder in this one, and are removed")
	f.StringVar(&o.bin, "bin", "bin", "folder of keelstate-node and keelctl")
	f.StringVar(&o.gateway, "versitygw", ".deps/bin/versitygw", "program that serves S3 over a folder")
	f.StringVar(&o.memory, "memory", "1GiB", "--memory of the nodes")
	f.IntVar(&o.keys, "keys", 1_000_000, "keys in part checkpoint")
	f.IntVar(&o.valueBytes, "value-bytes", 100, "size of their values, which do not compress")
	f.Int64Var(&o.big, "big", 1_000_000_000, "bytes of state in the parts rollback, restore and catchup")
	f.IntVar(&o.rate, "rate", 1000, "writes a second during checkpoints")
	f.IntVar(&o.catchUpRate, "catch-up-rate", 5000, "writes a second in part catchup")
	f.IntVar(&o.rounds, "rounds", 3, "how often what is quick is measured")
	f.DurationVar(&o.quiet, "quiet", 8*time.Second, "how long writes are measured without a checkpoint")
	return cmd
}

func (o *checkpointOptions) run(ctx context.Context) error {
	if o.keys < 1000 || o.valueBytes < 1 || o.big < 1<<20 || o.rate < 1 || o.catchUpRate < 1 || o.rounds < 1 || o.quiet <= 0 {
		return errors.New("keys must be at least 1000, big at least a MiB, and the others positive")
	}
	parts := strings.Split(o.parts, ",")
	for _, p := range parts {
		if checkpointParts[p] == nil {
			return fmt.Errorf("there is no part %q", p)
		}
	}
	for _, s := range strings.Split(o.stores, ",") {
		if s != storeFile && s != storeS3 {
			return fmt.Errorf("store %q is not %s or %s", s, storeFile, storeS3)
		}
	}
	if err := os.MkdirAll(o.dir, 0o750); err != nil {
		return err
	}
	for _, p := range parts {
		if err := checkpointParts[p](o, ctx); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	return nil
}

// with gives a function a fleet, which it may use until it returns.
func (o *checkpointOptions) with(ctx context.Context, store string, f func(*fleet) error) (err error) {
	fl, err := newFleet(ctx, o, store)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fl.dead(), fl.close()) }()
	return f(fl)
}

// show prints and keeps one case of a part. load is the machine's as it began.
func (o *checkpointOptions) show(part, of, load string, all ...figure) error {
	line := fmt.Sprintf("%-10s %-44s", part, of)
	for _, v := range all {
		line += "  " + v.Name + " " + number(v.Value)
	}
	fmt.Printf("%s  (load %s)\n", line, load)
	return o.save(record{What: "checkpoints", At: time.Now().UTC(), LoadAvg: load, Figures: &figures{part, of, all}})
}

// number is short and has the digits that matter.
func number(v float64) string {
	switch {
	case v == float64(int64(v)):
		return strconv.FormatInt(int64(v), 10)
	case v >= 100 || v <= -100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

// compact rewrites the stores of all replicas, so that nothing is left to compact.
func (f *fleet) compact(ctx context.Context, client *keel.Client) error {
	topology, err := client.Topology(ctx)
	if err != nil {
		return err
	}
	for _, s := range topology.GetShards() {
		err := client.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
			_, err := keelstatepb.NewAdminClient(conn).CompactShard(ctx, &keelstatepb.CompactShardRequest{Shard: s.GetId()})
			return err
		}, keel.AttemptTimeout(5*time.Minute))
		if err != nil {
			return fmt.Errorf("compacting shard %d: %w", s.GetId(), err)
		}
	}
	return nil
}

// checkpoint makes one, and says how long that took from the call to its end.
func checkpoint(ctx context.Context, client *keel.Client) (*keelstatepb.Checkpoint, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	start := time.Now()
	var last *keelstatepb.Checkpoint
	err := client.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		stream, err := keelstatepb.NewCheckpointsClient(conn).CreateCheckpoint(ctx, &keelstatepb.CreateCheckpointRequest{})
		for err == nil {
			var next *keelstatepb.Checkpoint
			if next, err = stream.Recv(); err == nil {
				last = next
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}, keel.AttemptTimeout(0))
	if err == nil && last.GetPhase() != "completed" {
		err = fmt.Errorf("checkpoint %d is %s: %s", last.GetNumber(), last.GetPhase(), last.GetError())
	}
	return last, time.Since(start), err
}

// figuresOf are what is told of a checkpoint.
func figuresOf(c *keelstatepb.Checkpoint, took time.Duration) []figure {
	share := 0.0
	if c.GetFullBytes() > 0 {
		share = 100 * float64(c.GetNewBytes()) / float64(c.GetFullBytes())
	}
	return []figure{{"s", took.Seconds()}, {"new_bytes", float64(c.GetNewBytes())}, {"full_bytes", float64(c.GetFullBytes())}, {"new_%", share},
		{"objects", float64(c.GetObjects())}, {"requests", float64(c.GetRequests())}, {"sync_ms", float64(c.GetSyncMs())}, {"async_ms", float64(c.GetAsyncMs())}}
}

// takeCheckpoint makes a checkpoint and shows it.
func (o *checkpointOptions) takeCheckpoint(ctx context.Context, client *keel.Client, part, of string) (*keelstatepb.Checkpoint, error) {
	load := loadAverage()
	c, took, err := checkpoint(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", of, err)
	}
	return c, o.show(part, of, load, figuresOf(c, took)...)
}

// knowsModes says whether the nodes have --checkpoint-mode.
func (o *checkpointOptions) knowsModes(ctx context.Context) bool {
	out, err := exec.CommandContext(ctx, filepath.Join(o.bin, "keelstate-node"), "--help").CombinedOutput()
	return err == nil && strings.Contains(string(out), "--checkpoint-mode")
}

// bytesOf reads a size such as 100MB.
func bytesOf(text string) (int64, error) {
	units := []struct {
		suffix string
		factor int64
	}{{"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"", 1}}
	at := slices.IndexFunc(units, func(u struct {
		suffix string
		factor int64
	}) bool {
		return strings.HasSuffix(text, u.suffix)
	})
	n, err := strconv.ParseInt(strings.TrimSuffix(text, units[at].suffix), 10, 64)
	if err != nil || n < 1 || n > 1<<40/units[at].factor {
		return 0, fmt.Errorf("%q is not a size such as 100MB", text)
	}
	return n * units[at].factor, nil
}
