//go:build linux

package runner

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/nemesis"
	"github.com/keelstate/keelstate/jepsen/report"
)

// sampled are the series that the report keeps of the nodes' metrics.
var sampled = []string{
	"keelstate_leader", "keelstate_raft_term", "keelstate_applied_index", "keelstate_raft_log_bytes", "keelstate_store_disk_bytes",
	"keelstate_replica_damaged", "keelstate_replicas_damaged_total", "keelstate_snapshots_total", "keelstate_write_queue_requests",
	"keelstate_raftlog_oldest_fsync_seconds", "keelstate_node_ready", "process_resident_memory_bytes", "process_open_fds", "go_goroutines",
}

// maxMetricsBytes bounds a node's answer.
const maxMetricsBytes = 4 << 20

// sample asks every node for its metrics once a second until ctx ends.
func (r *run) sample(ctx context.Context) {
	client := &http.Client{Timeout: 900 * time.Millisecond}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		var wg sync.WaitGroup
		for _, n := range r.fleet.Nodes {
			wg.Go(func() {
				s := report.Sample{At: r.now(), Node: n.ID}
				values, err := scrape(ctx, client, "http://"+n.HTTP+"/metrics")
				s.Values, s.Missed = values, err != nil
				if ctx.Err() == nil {
					r.samples.Write(s)
				}
			})
		}
		wg.Wait()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// scrape reads the sampled series of a node.
func scrape(ctx context.Context, client *http.Client, url string) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("metrics: %s", resp.Status)
	}
	return parseMetrics(io.LimitReader(resp.Body, maxMetricsBytes))
}

// parseMetrics reads the text format of Prometheus as far as it is needed: of
// the labels it takes the group, and sums over the others.
func parseMetrics(r io.Reader) (map[string]float64, error) {
	values := map[string]float64{}
	in := bufio.NewScanner(r)
	for in.Scan() {
		line := in.Text()
		name, rest, labelled := strings.Cut(line, "{")
		if !labelled {
			name, rest, _ = strings.Cut(line, " ")
		}
		if !slices.Contains(sampled, name) {
			continue
		}
		if labelled {
			labels, value, _ := strings.Cut(rest, "} ")
			rest = value
			if _, after, ok := strings.Cut(labels, `group="`); ok {
				group, _, _ := strings.Cut(after, `"`)
				name += ":" + group
			}
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
		if err != nil {
			return nil, fmt.Errorf("metrics: line %q: %w", line, err)
		}
		values[name] += v
	}
	return values, in.Err()
}

func deathText(d host.Death) string {
	if d.Signal != "" {
		return fmt.Sprintf("%s was ended by the signal %s", d.Node, d.Signal)
	}
	return fmt.Sprintf("%s ended with code %d", d.Node, d.Code)
}

// exitStorage is the code with which a node ends when it cannot trust its disk,
// exitFailed that with which it refuses to start, or did not stop cleanly.
const (
	exitStorage = 70
	exitFailed  = 1
)

// hits are the kinds of faults that hit each node.
type hits map[string][]nemesis.Kind

// add notes what an episode injected, or tried to.
func (h hits) add(records []nemesis.Record) {
	for _, r := range records {
		for _, node := range r.Targets {
			h[node] = append(h[node], r.Kind)
		}
	}
}

// next is what the next episode begins with: damage stays on a disk.
func (h hits) next() hits {
	left := hits{}
	for node, kinds := range h {
		for _, k := range kinds {
			if (k == nemesis.KindBitFlip || k == nemesis.KindLyingFsync) && !slices.Contains(left[node], k) {
				left[node] = append(left[node], k)
			}
		}
	}
	return left
}

// judgeDeaths says whether processes ended only as the faults that hit their
// nodes allow: with the code for failed storage under faults of the disk, with
// that for a failed start or stop while the disk fails, and killed by the kernel
// where memory was short. A power loss alone allows nothing: the disk was honest.
func judgeDeaths(deaths []host.Death, faults hits) check.Result {
	res := check.Result{Name: "deaths", Verdict: check.Pass, Text: "none that the harness did not ask for"}
	for _, d := range deaths {
		any := func(kinds ...nemesis.Kind) bool {
			return slices.ContainsFunc(kinds, func(k nemesis.Kind) bool { return slices.Contains(faults[d.Node], k) })
		}
		v, why := check.Fail, "and no fault of this node allows that"
		switch {
		case d.Code == exitStorage && any(nemesis.KindFsyncError, nemesis.KindReadError, nemesis.KindFullDisk, nemesis.KindHungDisk,
			nemesis.KindBitFlip, nemesis.KindLyingFsync):
			v, why = check.Pass, "as it should when its disk fails"
		case d.Code == exitFailed && any(nemesis.KindFsyncError, nemesis.KindReadError, nemesis.KindFullDisk):
			// If it still refuses when the disk is well, it is not live (RU4).
			v, why = check.Pass, "as it may when it starts or stops while its disk fails"
		case d.Signal == "killed" && any(nemesis.KindMemory):
			v, why = check.Pass, "for want of memory"
		case d.Signal == "killed":
			v, why = check.Unknown, "by somebody else than the harness"
		}
		if v != check.Pass {
			res.Details = append(res.Details, check.Detail{Verdict: v, Key: d.Node, Text: deathText(d) + ", " + why})
		}
		if v == check.Pass && len(res.Details) == 0 {
			res.Text = deathText(d) + ", " + why
		}
		if check.Combine(res.Verdict, v) != res.Verdict {
			res.Verdict, res.Text = v, deathText(d)+", "+why
		}
	}
	if n := len(deaths) - 1; n > 0 {
		res.Text += fmt.Sprintf(" (of %d deaths)", n+1)
	}
	return res
}

// alarms are texts of a log that a node must never write.
var alarms = []string{"panic:", "fatal error:", "WARNING: DATA RACE", "unexpected fault address", "Assertion `", "SIGABRT", "SIGSEGV"}

// damages are texts by which a node says that what is on its disk cannot be what it
// wrote. An honest disk, whose power may fail, gives no reason for one.
var damages = []string{"cannot be trusted", "replica damaged", "system group is damaged"}

// pardoned is why a replica may stop as damaged on the best of disks: others went back
// before it had fetched what it needs to.
var pardoned = []byte("was not prepared for the rollback")

// mayBeDamaged says whether something has hit a node that leaves damage on its disk,
// or looks like it.
func (h hits) mayBeDamaged(node string) bool {
	return slices.ContainsFunc(h[node], func(k nemesis.Kind) bool {
		return k == nemesis.KindBitFlip || k == nemesis.KindLyingFsync || k == nemesis.KindReadError
	})
}

// logWatch reads what nodes add to their logs.
type logWatch struct {
	nodes []*host.Node
	read  []int64
}

func newLogWatch(nodes []*host.Node) *logWatch {
	return &logWatch{nodes: nodes, read: make([]int64, len(nodes))}
}

// judge looks for alarms in what was written since the last time, and for damage
// that no fault explains.
func (l *logWatch) judge(faults hits) check.Result {
	res := check.Result{Name: "logs", Verdict: check.Pass, Text: "no panic, no race, no damage without a cause"}
	for i, n := range l.nodes {
		texts := alarms
		if !faults.mayBeDamaged(n.ID) {
			texts = slices.Concat(alarms, damages)
		}
		lines, end, err := linesWith(n.LogFile, l.read[i], texts)
		l.read[i] = end
		if err != nil && res.Verdict == check.Pass {
			res.Verdict, res.Text = check.Unknown, fmt.Sprintf("the log of %s: %v", n.ID, err)
		}
		for _, line := range lines {
			if len(res.Details) < 20 {
				res.Details = append(res.Details, check.Detail{Verdict: check.Fail, Key: n.ID, Text: line})
			}
			if res.Verdict != check.Fail {
				res.Verdict, res.Text = check.Fail, n.ID+": "+line
			}
		}
	}
	return res
}

// linesWith returns the lines with one of the texts from an offset on, and the
// offset behind the last whole line.
func linesWith(path string, from int64, texts []string) (lines []string, end int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, from, err
	}
	defer f.Close()
	if _, err := f.Seek(from, io.SeekStart); err != nil {
		return nil, from, err
	}
	in := bufio.NewReaderSize(f, 64<<10)
	for end = from; ; {
		line, err := in.ReadSlice('\n')
		if errors.Is(err, io.EOF) {
			return lines, end, nil
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return lines, end, err
		}
		end += int64(len(line))
		for _, a := range texts {
			if bytes.Contains(line, []byte(a)) && !bytes.Contains(line, pardoned) {
				lines = append(lines, trim(line[:min(len(line), 500)]))
				break
			}
		}
	}
}
