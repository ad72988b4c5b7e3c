package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	keel "github.com/keelstate/keelstate/client"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := &cobra.Command{Use: "ksbench", Short: "Measure a cluster", SilenceUsage: true}
	root.AddCommand(loadCommand(), fillCommand(), resumeCommand(), restartCommand(), checkpointsCommand(), reportCommand())
	if err := root.ExecuteContext(ctx); err != nil {
		os.Exit(1)
	}
}

// common are the flags of all commands that talk to a cluster.
type common struct {
	endpoints string
	json      string
	label     string
	verbose   bool
}

func (c *common) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.endpoints, "endpoints", "127.0.0.1:7401", "gRPC addresses, separated by commas")
	f.StringVar(&c.json, "json", "", "append the results to this file, one JSON object a line")
	f.BoolVar(&c.verbose, "verbose", false, "log what the client does, to stderr")
	f.StringVar(&c.label, "label", "", "text to keep with the results, such as the build")
}

// open makes a client and waits until it knows the cluster.
func (c *common) open(ctx context.Context, opts ...keel.Option) (*keel.Client, error) {
	if c.verbose {
		log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
		opts = append(opts, keel.WithLogger(log))
	}
	client, err := keel.Open(ctx, strings.Split(c.endpoints, ","), opts...)
	if err != nil {
		return nil, err
	}
	ready, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := client.Ready(ready); err != nil {
		return nil, errors.Join(err, closeClient(client))
	}
	return client, nil
}

// closeClient says farewell even when the command was interrupted.
func closeClient(client *keel.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return client.Close(ctx)
}

// values opens the state that all measurements use.
func values(ctx context.Context, client *keel.Client) (*keel.Value[[]byte], error) {
	return keel.DeclareValue(ctx, client.Keyspace("bench", keel.String.Type()), "value", keel.Bytes)
}

// record is one result in the file of results.
type record struct {
	What    string    `json:"what"` // load, fill, resume, restart, checkpoints
	At      time.Time `json:"at"`
	Label   string    `json:"label,omitempty"`
	LoadAvg string    `json:"load_average"` // of the machine, as the measurement began
	Load    *result   `json:"load,omitempty"`
	Resume  *resumed  `json:"resume,omitempty"`
	Restart *restart  `json:"restart,omitempty"`
	Fill    *filled   `json:"fill,omitempty"`
	Figures *figures  `json:"figures,omitempty"`
}

func (c *common) save(r record) error {
	r.Label = c.label
	if c.json == "" {
		return nil
	}
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(c.json, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("appending to %s: %w", c.json, err)
	}
	return nil
}

// loadAverage is the machine's, of the last minute; "?" where there is none.
func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "?"
	}
	one, _, _ := strings.Cut(string(b), " ")
	return one
}
