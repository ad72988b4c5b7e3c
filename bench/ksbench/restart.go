package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// restart says how long a node took to serve again.
type restart struct {
	Node string `json:"node"`
	// ReadyMs is the time from the start of the process until /readyz is true.
	ReadyMs int64 `json:"ready_ms"`
	// ServedMs is the time until the node, made leader of a shard as soon as it
	// was ready, has answered a linearizable read of that shard.
	ServedMs int64 `json:"served_ms"`
	// Installed is the number of snapshots that it took from its peers.
	Installed float64 `json:"snapshots_installed"`
}

func restartCommand() *cobra.Command {
	var c common
	var node, url string
	var sinceMs int64
	var limit time.Duration
	cmd := &cobra.Command{Use: "restart", Short: "Time until a node that was started again serves", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), limit)
			defer cancel()
			load := loadAverage()
			r := &restart{Node: node}
			if err := r.run(ctx, &c, url, time.UnixMilli(sinceMs)); err != nil {
				return err
			}
			fmt.Printf("%s was ready after %d ms, served a linearizable read as leader after %d ms, installed %.0f snapshots (load %s)\n",
				node, r.ReadyMs, r.ServedMs, r.Installed, load)
			if err := c.save(record{What: "restart", At: time.Now().UTC(), LoadAvg: load, Restart: r}); err != nil {
				return err
			}
			if r.Installed > 0 {
				return errors.New("a restart must not need a snapshot from a peer")
			}
			return nil
		}}
	c.register(cmd)
	f := cmd.Flags()
	f.StringVar(&node, "node", "n1", "id of the node")
	f.StringVar(&url, "http", "", "the node's HTTP address, as http://127.0.0.1:7431")
	f.Int64Var(&sinceMs, "since", 0, "when the process was started, in ms since 1970")
	f.DurationVar(&limit, "limit", 2*time.Minute, "give up after that time")
	return cmd
}

func (r *restart) run(ctx context.Context, c *common, url string, since time.Time) error {
	for {
		body, ok := get(ctx, url+"/readyz")
		if ok {
			break
		}
		if err := wait(ctx, 10*time.Millisecond); err != nil {
			return fmt.Errorf("%s is not ready: %s: %w", r.Node, strings.TrimSpace(body), err)
		}
	}
	r.ReadyMs = time.Since(since).Milliseconds()
	client, err := c.open(ctx)
	if err != nil {
		return err
	}
	err = r.serve(ctx, client)
	r.ServedMs = time.Since(since).Milliseconds()
	if err = errors.Join(err, closeClient(client)); err != nil {
		return err
	}
	text, ok := get(ctx, url+"/metrics")
	if !ok {
		return fmt.Errorf("%s gives no metrics: %s", r.Node, text)
	}
	r.Installed, err = sumMetric(text, "keelstate_snapshots_total", `what="installed"`)
	return err
}

// serve makes the node leader of a shard and reads a filled key from it.
func (r *restart) serve(ctx context.Context, client *keel.Client) error {
	state, err := values(ctx, client)
	if err != nil {
		return err
	}
	topology, err := client.Topology(ctx)
	if err != nil {
		return err
	}
	router, err := newRouter(topology)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient("passthrough:///"+grpcAddress(topology, r.Node), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	entry, err := router.entry(fillKey(0))
	if err != nil {
		return err
	}
	q := &keelstatepb.ReadRequest{Shard: uint64(entry.Shard), Epoch: uint64(entry.Epoch), Incarnation: topology.GetIncarnation(),
		MetadataRevision: topology.GetRevision(), Queries: []*keelstatepb.Query{{State: state.Declaration().ID,
			Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: []byte(fillKey(0))}}}
	for {
		_, transferErr := keelstatepb.NewAdminClient(conn).TransferLeader(ctx, &keelstatepb.TransferLeaderRequest{Shard: q.Shard, To: r.Node})
		res, err := keelstatepb.NewStateClient(conn).Read(ctx, q)
		if err == nil {
			if !res.GetAnswers()[0].GetFound() {
				return errMissing
			}
			return nil
		}
		if e := wait(ctx, 10*time.Millisecond); e != nil {
			return fmt.Errorf("%s does not serve shard %d: %w", r.Node, q.Shard, errors.Join(e, err, transferErr))
		}
	}
}

// get returns the body of a page, or why there is none, and whether it is well.
func get(ctx context.Context, url string) (string, bool) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err.Error(), false
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err.Error(), false
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 16<<20))
	if err != nil {
		return err.Error(), false
	}
	return string(body), res.StatusCode == http.StatusOK
}

// sumMetric adds the values of a metric's series whose labels hold the text.
// A counter that never counted has no series, which is 0.
func sumMetric(text, name, label string) (float64, error) {
	sum := 0.0
	lines := bufio.NewScanner(strings.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		series, value, ok := strings.Cut(lines.Text(), "} ")
		if !ok || !strings.HasPrefix(series, name+"{") || !strings.Contains(series, label) {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			return 0, fmt.Errorf("reading %s: %w", name, err)
		}
		sum += v
	}
	return sum, lines.Err()
}
