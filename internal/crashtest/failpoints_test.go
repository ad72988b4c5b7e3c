package crashtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/failpoint"
)

// smallLogs makes logs, segments and what is kept so small that a short load
// rotates, cuts, flushes and snapshots again and again.
const smallLogs = "raftlog.segment-bytes=value(65536);cluster.log-max-bytes=value(65536);cluster.log-keep-bytes=value(8192);cluster.changelog-segment-bytes=value(4096)"

// run is one crash at one point.
type run struct {
	*nodes
	r     *rand.Rand
	point string
	s     *states
	l     *load // nil where the way needs none
	// checkpoints says that checkpoints were made.
	checkpoints bool
	// died are the nodes that ended at the point.
	died []int
}

// TestCrashAtEveryFailpoint ends a node of a loaded cluster at each point that
// can end one, and starts it again: the others serve meanwhile, it comes back,
// nothing is lost, nothing is there twice, and the replicas agree. A short run
// takes a few at random.
func TestCrashAtEveryFailpoint(t *testing.T) {
	r := seeded(t)
	var points []string
	for _, p := range failpoint.Points() {
		if p.Kind != failpoint.KindInt {
			points = append(points, p.Name)
		}
	}
	for name := range ways {
		if !slices.Contains(points, name) {
			t.Errorf("there is a way to %s, which is no failpoint", name)
		}
	}
	if !*long {
		r.Shuffle(len(points), func(i, j int) { points[i], points[j] = points[j], points[i] })
		points = points[:5]
	}
	// Not counted as time of the first point.
	if err := errors.Join(programs["node-failpoints"](), programs["keelctl"]()); err != nil {
		t.Fatal(err)
	}
	begin, done := time.Now(), 0
	for i, name := range points {
		if !*long && time.Since(begin) > 25*time.Second && done > 0 {
			t.Logf("%d of %d points, for lack of time", done, len(points))
			break
		}
		seed := r.Uint64()
		t.Run(name, func(t *testing.T) { crashAt(t, name, rand.New(rand.NewPCG(seed, uint64(i)))) })
		done++
	}
}

func crashAt(t *testing.T, name string, r *rand.Rand) {
	way := ways[name]
	if way == nil {
		way = underLoad
	}
	c := &run{nodes: placeNodes(t, "node-failpoints", "rocks"), r: r, point: name}
	c.args = []string{"--fault-injection", "--object-store", "file://" + filepath.Join(t.TempDir(), "objects"), "--checkpoint-retain", "1"}
	if strings.HasPrefix(name, "cluster.links.") {
		c.args = append(c.args, "--checkpoint-local-links")
	}
	if slices.Contains([]string{"cluster.upload.segments", "cluster.upload.ahead", "cluster.changelog.ahead"}, name) {
		c.args = append(c.args, "--checkpoint-mode", "changelog")
	}
	for i := range c.n {
		c.n[i].env = []string{"KEELSTATE_FAILPOINTS=" + smallLogs}
	}
	way(c)
	t.Logf("%v died", c.ids(c.died))
	c.serves(c.s.probe)
	if c.l != nil {
		c.l.end()
	}
	c.healthy()
	if c.l != nil {
		c.l.judge(c.s)
	}
	before := total(t, c.s)
	count(t, c.s, 30)
	if after := total(t, c.s); after != before+30 {
		t.Errorf("sum %d, want %d", after, before+30)
	}
	c.agree()
	if c.checkpoints {
		c.checkpointed()
	}
	for i := range c.n {
		if c.ended(i) {
			t.Errorf("%s has ended after all", c.n[i].id)
		}
	}
}

func (c *run) ids(which []int) (ids []string) {
	for _, i := range which {
		ids = append(ids, c.n[i].id)
	}
	return ids
}

// loaded starts all nodes, founds the cluster and its load.
func (c *run) loaded() {
	for i := range c.n {
		c.start(i)
	}
	c.found(2)
	c.s = declare(c.t, c.client())
	c.l = startLoad(c.t, c.nodes, c.r.Uint64())
	c.serves(c.s.probe)
}

// call asks a node's failpoints over HTTP.
func (c *run) call(i int, method, body string) ([]failpointState, error) {
	ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+c.n[i].web+"/debug/failpoints", strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", res.Status, raw)
	}
	var list []failpointState
	return list, json.Unmarshal(raw, &list)
}

// failpointState is what a node says of a point.
type failpointState struct {
	Name, Armed string
	Hits        uint64
}

// arm makes running nodes crash when they come to the point once more, after
// skip times.
func (c *run) arm(skip int, which ...int) {
	c.t.Helper()
	c.t.Logf("arming %v, skip %d", c.ids(which), skip)
	for _, i := range which {
		if _, err := c.call(i, http.MethodPost, fmt.Sprintf("%s=crash@%d", c.point, skip)); err != nil && !c.ended(i) {
			c.t.Fatalf("arming %s: %v", c.n[i].id, err)
		}
	}
}

// startArmed starts a node that crashes at the point after skip times.
func (c *run) startArmed(i, skip int) {
	c.t.Logf("starting %s armed, skip %d", c.n[i].id, skip)
	env := c.n[i].env
	c.n[i].env = []string{fmt.Sprintf("KEELSTATE_FAILPOINTS=%s;%s=crash@%d", smallLogs, c.point, skip)}
	c.start(i)
	c.n[i].env = env
}

// crash repeats drive until a node has ended, and fails unless it ended at the
// point. Nodes that are armed still are armed no more; all that ended are
// started again after a while.
func (c *run) crash(drive func(ctx context.Context) error) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 60*time.Second)
	defer cancel()
	drivesUntil := make(chan error, 1)
	go func() { // a drive may wait for the node that is gone
		var last error
		for ctx.Err() == nil {
			if err := drive(ctx); err != nil && ctx.Err() == nil {
				last = err
			}
			pause(ctx, 20*time.Millisecond)
		}
		drivesUntil <- last
	}()
	for len(c.justDied()) == 0 && ctx.Err() == nil {
		pause(ctx, 5*time.Millisecond)
	}
	timedOut := ctx.Err() != nil
	cancel()
	if timedOut {
		c.t.Fatalf("nobody came to %s; the last try: %v%s", c.point, <-drivesUntil, c.hits())
	}
	for i := range c.n {
		// One that cannot be asked is ending at this moment.
		if _, err := c.call(i, http.MethodDelete, ""); err != nil {
			select {
			case <-c.n[i].gone:
			case <-time.After(20 * time.Second):
				c.t.Fatalf("disarming %s: %v", c.n[i].id, err)
			}
		}
	}
	<-drivesUntil
	c.reap()
	// Another may have come to the point just before it was disarmed.
	pause(c.t.Context(), time.Duration(100+c.r.IntN(1000))*time.Millisecond)
	c.reap()
	for _, i := range c.died {
		c.start(i)
	}
}

func (c *run) justDied() (which []int) {
	for i := range c.n {
		if c.n[i].cmd != nil && c.ended(i) {
			which = append(which, i)
		}
	}
	return which
}

// reap notes every node that has ended, and fails if it did not end at the
// point, by its own hand.
func (c *run) reap() {
	c.t.Helper()
	for _, i := range c.justDied() {
		n := c.n[i]
		ws, ok := n.cmd.ProcessState.Sys().(syscall.WaitStatus)
		log, err := os.ReadFile(n.log)
		words := "failpoint: crash at " + c.point + "\n"
		if err != nil || !ok || !ws.Signaled() || ws.Signal() != syscall.SIGKILL || !strings.Contains(string(log[max(0, len(log)-4096):]), words) {
			c.t.Fatalf("%s ended with %v, not at %s (%v)", n.id, n.cmd.ProcessState, c.point, err)
		}
		n.cmd = nil
		c.died = append(c.died, i)
	}
}

// hits says how often the nodes came to the point, for a failed test.
func (c *run) hits() string {
	out := make(map[string]uint64)
	for i := range c.n {
		list, err := c.call(i, http.MethodGet, "")
		if err != nil {
			continue
		}
		for _, p := range list {
			if p.Name == c.point {
				out[c.n[i].id] = p.Hits
			}
		}
	}
	var b strings.Builder
	for _, id := range slices.Sorted(maps.Keys(out)) {
		fmt.Fprintf(&b, "; %s came there %d times", id, out[id])
	}
	return b.String()
}
