package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// resumed says how long writes stood still after a leader was killed.
type resumed struct {
	Node string `json:"node"` // killed
	// Shards are those that it led, with the time from the kill to the first
	// answer to a write that began after it.
	Shards    map[uint64]int64 `json:"shards_ms"`
	SlowestMs int64            `json:"slowest_ms"`
	// OthersMs is the longest pause between answers on all other shards.
	OthersMs int64 `json:"others_pause_ms"`
}

func resumeCommand() *cobra.Command {
	var c common
	var pids string
	var warmup, limit time.Duration
	cmd := &cobra.Command{Use: "resume", Short: "Kill a leader with SIGKILL and time until its shards take writes again", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ids, err := parsePids(pids)
			if err != nil {
				return err
			}
			load := loadAverage()
			r, err := resume(cmd.Context(), &c, ids, warmup, limit)
			if err != nil {
				return err
			}
			fmt.Printf("killed %s: its %d shards took writes again after %d ms; longest pause of the others %d ms (load %s)\n",
				r.Node, len(r.Shards), r.SlowestMs, r.OthersMs, load)
			return c.save(record{What: "resume", At: time.Now().UTC(), LoadAvg: load, Resume: r})
		}}
	c.register(cmd)
	f := cmd.Flags()
	f.StringVar(&pids, "pids", "", "node=pid of the nodes that may be killed, separated by commas")
	f.DurationVar(&warmup, "warmup", 2*time.Second, "how long to write before the kill")
	f.DurationVar(&limit, "limit", 30*time.Second, "give up when writes have not resumed by then")
	return cmd
}

func parsePids(list string) (map[string]int, error) {
	out := make(map[string]int)
	for _, s := range strings.Split(list, ",") {
		node, number, _ := strings.Cut(s, "=")
		pid, err := strconv.Atoi(number)
		if err != nil || node == "" || pid < 2 {
			return nil, fmt.Errorf("%q is not node=pid", s)
		}
		out[node] = pid
	}
	return out, nil
}

// answered is one acknowledged write.
type answered struct{ begun, done time.Time }

// prober writes to one shard, one call at a time, and remembers its answers.
type prober struct {
	shard uint64
	key   string

	mu      sync.Mutex
	answers []answered
	last    byte // newest value acknowledged
}

// write repeats until ctx ends; a failed write ends it with the error.
func (p *prober) write(ctx context.Context, state *keel.Value[[]byte]) error {
	for n := byte(0); ; n++ {
		begun := time.Now()
		_, err := state.Set(ctx, p.key, []byte{n})
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("writing to shard %d: %w", p.shard, err)
		}
		p.mu.Lock()
		p.answers = append(p.answers, answered{begun, time.Now()})
		p.last = n
		p.mu.Unlock()
	}
}

// resumedAfter is the time from killed to the first answer to a write that
// began after it: an answer to an older one may come from the dead node.
func resumedAfter(answers []answered, killed time.Time) (time.Duration, bool) {
	for _, a := range answers {
		if a.begun.After(killed) {
			return a.done.Sub(killed), true
		}
	}
	return 0, false
}

// longestPause is the longest time between two answers, from the kill on.
func longestPause(answers []answered, killed time.Time) time.Duration {
	longest := time.Duration(0)
	for i := 1; i < len(answers); i++ {
		if answers[i].done.After(killed) {
			longest = max(longest, answers[i].done.Sub(answers[i-1].done))
		}
	}
	return longest
}

func (p *prober) seen() []answered {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.answers)
}

func resume(ctx context.Context, c *common, pids map[string]int, warmup, limit time.Duration) (*resumed, error) {
	client, err := c.open(ctx)
	if err != nil {
		return nil, err
	}
	r, err := resumeWith(ctx, client, pids, warmup, limit)
	return r, errors.Join(err, closeClient(client))
}

func resumeWith(ctx context.Context, client *keel.Client, pids map[string]int, warmup, limit time.Duration) (*resumed, error) {
	state, err := values(ctx, client)
	if err != nil {
		return nil, err
	}
	topology, err := client.Topology(ctx)
	if err != nil {
		return nil, err
	}
	probers, err := newProbers(topology)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, warmup+limit)
	defer cancel()
	writing, stop := context.WithCancel(ctx)
	errs := make(chan error, len(probers))
	for _, p := range probers {
		go func() { errs <- p.write(writing, state) }()
	}
	r := &resumed{Shards: make(map[uint64]int64)}
	err = r.kill(ctx, client, probers, pids, warmup)
	stop()
	for range probers {
		err = errors.Join(err, <-errs)
	}
	return r, err
}

func newProbers(t *keelstatepb.Topology) ([]*prober, error) {
	router, err := newRouter(t)
	if err != nil {
		return nil, err
	}
	missing := make(map[uint64]bool)
	for _, id := range router.shards() {
		missing[id] = true
	}
	var out []*prober
	for i := 0; len(missing) > 0; i++ {
		key := "probe-" + strconv.Itoa(i)
		id, err := router.shardOf(key)
		if err != nil {
			return nil, err
		}
		if missing[id] {
			delete(missing, id)
			out = append(out, &prober{shard: id, key: key})
		}
	}
	return out, nil
}

// kill kills the node that leads most shards and waits until these take writes.
func (r *resumed) kill(ctx context.Context, client *keel.Client, probers []*prober, pids map[string]int, warmup time.Duration) error {
	if err := wait(ctx, warmup); err != nil {
		return err
	}
	topology, err := client.Topology(ctx)
	if err != nil {
		return err
	}
	led := make(map[string][]uint64)
	for _, s := range topology.GetShards() {
		led[s.GetLeaderHint()] = append(led[s.GetLeaderHint()], s.GetId())
	}
	for node := range pids {
		if len(led[node]) > len(led[r.Node]) || len(led[node]) == len(led[r.Node]) && node < r.Node {
			r.Node = node
		}
	}
	if len(led[r.Node]) == 0 {
		return errors.New("none of the nodes given leads a shard")
	}
	killed := time.Now()
	if err := syscall.Kill(pids[r.Node], syscall.SIGKILL); err != nil {
		return fmt.Errorf("killing %s: %w", r.Node, err)
	}
	for _, p := range probers {
		after, err := p.awaitResumed(ctx, killed)
		if err != nil {
			return err
		}
		if slices.Contains(led[r.Node], p.shard) {
			r.Shards[p.shard] = after.Milliseconds()
			r.SlowestMs = max(r.SlowestMs, after.Milliseconds())
			continue
		}
		r.OthersMs = max(r.OthersMs, longestPause(p.seen(), killed).Milliseconds())
	}
	return nil
}

func (p *prober) awaitResumed(ctx context.Context, killed time.Time) (time.Duration, error) {
	for {
		if after, ok := resumedAfter(p.seen(), killed); ok {
			return after, nil
		}
		if err := wait(ctx, 5*time.Millisecond); err != nil {
			return 0, fmt.Errorf("shard %d did not take writes again in time: %w", p.shard, err)
		}
	}
}

// wait waits for d or the end of ctx.
func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
