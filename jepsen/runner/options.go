//go:build linux

package runner

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/report"
	"github.com/keelstate/keelstate/jepsen/workload"
)

// Options of a run. Zero values have the defaults.
type Options struct {
	// Dir is the report's folder; it must not exist or be empty. Required.
	Dir string
	// NodeBinary and CtlBinary are keelstate-node and keelctl. Required.
	NodeBinary, CtlBinary string
	// Seed of the schedule, the victims and the workloads' choices.
	Seed uint64
	// Duration is how long episodes are begun; default 5 minutes.
	Duration time.Duration
	// Episode is how long the faults of one episode last; default 40 s.
	Episode time.Duration
	// First is the number of the first episode; default 1.
	First int
	// Nodes and Shards default to 3 and 2.
	Nodes, Shards int
	// Engine and Memory are flags of the nodes; empty for the nodes' defaults.
	Engine, Memory string
	// LogSize is the nodes' log-size; default 2MiB, so that in an episode logs are
	// cut, and replicas that were away get snapshots.
	LogSize string
	// Net and Disk default to what the machine can do best.
	Net  host.NetMode
	Disk host.DiskKind
	// DiskBytes is the size of each disk, 0 for the kind's default.
	DiskBytes int64
	// Faults are names or kinds; none means all that are possible here.
	Faults []string
	// Without are names or kinds that are left out of these.
	Without []string
	// Workloads are names; none means all.
	Workloads []string
	// Rate bounds each workload's operations a second; default 4000.
	Rate float64
	// Keys is how many keys each workload uses at a time; default 192.
	Keys int
	// Batch is how many operations go in one call at most; default 128, 1 for
	// none. Each is judged by itself.
	Batch int
	// Clients is how many clients there are, every second with connections that
	// break; default 6. Workers is how many each workload has; default 9.
	Clients, Workers int
	// CheckLimit bounds the time of one checker; default 2 minutes.
	CheckLimit time.Duration
	// Checkpoints gives the cluster an object store, has it make checkpoints every
	// few seconds, and looks at them at the end of each episode.
	Checkpoints bool
	// StoreBinary is a service that speaks S3 (versitygw). Without it checkpoints go
	// to a directory, and the object store has no faults.
	StoreBinary string
	// Rollback takes the cluster back to a savepoint at the end of each episode,
	// beside faults; it needs Checkpoints.
	Rollback bool
	// NodeFlags go to every node.
	NodeFlags []string
	// KeepData keeps the nodes' data after a pass too.
	KeepData bool
	// Revision says what is tested, for the report; empty for what keelctl says.
	Revision string
	// Repeat is the command that runs the same again, for the report.
	Repeat string
	// Note is called with lines of progress.
	Note func(string)
}

// ErrUsage is a mistake in the options.
var ErrUsage = errors.New("usage")

// mistake is an ErrUsage that says what is wrong and nothing else.
type mistake string

func (m mistake) Error() string        { return string(m) }
func (m mistake) Is(target error) bool { return target == ErrUsage }

func usage(format string, args ...any) error { return mistake(fmt.Sprintf(format, args...)) }

func (o *Options) ensureDefaults() {
	def(&o.Duration, 5*time.Minute)
	def(&o.Episode, 40*time.Second)
	def(&o.First, 1)
	def(&o.Nodes, 3)
	def(&o.Shards, 2)
	def(&o.Rate, 4000)
	def(&o.Keys, 192)
	def(&o.Batch, 128)
	def(&o.Clients, 6)
	def(&o.Workers, 9)
	def(&o.CheckLimit, 2*time.Minute)
	def(&o.LogSize, "2MiB")
	def(&o.Net, host.NetAuto)
	if o.Disk == "" {
		o.Disk = host.DiskPlain
		if host.Detect().Has(host.CapFuse) {
			o.Disk = host.DiskFault
		}
	}
	if o.Note == nil {
		o.Note = func(string) {}
	}
	if len(o.Workloads) == 0 {
		o.Workloads = allWorkloads()
	}
}

func allWorkloads() (names []string) {
	for _, w := range workload.All(workload.Config{}) {
		names = append(names, w.Name())
	}
	return names
}

func def[T comparable](v *T, to T) {
	var zero T
	if *v == zero {
		*v = to
	}
}

// validate returns all problems.
func (o *Options) validate() error {
	var bad []error
	if o.Dir == "" || o.NodeBinary == "" || o.CtlBinary == "" {
		bad = append(bad, usage("a run needs a directory and the two binaries"))
	}
	if o.Duration < 0 || o.Episode < time.Second {
		bad = append(bad, usage("the duration must not be negative, and an episode takes a second at least"))
	}
	for _, n := range []struct {
		what          string
		is, low, high int
	}{{"nodes", o.Nodes, 1, 100}, {"shards", o.Shards, 1, 1000}, {"keys", o.Keys, 1, 1_000_000}, {"batch", o.Batch, 1, 1000},
		{"clients", o.Clients, 1, 1000}, {"workers", o.Workers, 1, 10_000}, {"the first episode", o.First, 1, report.MaxEpisodes}} {
		if n.is < n.low || n.is > n.high {
			bad = append(bad, usage("%s must be %d to %d, not %d", n.what, n.low, n.high, n.is))
		}
	}
	if !(o.Rate > 0) || math.IsInf(o.Rate, 0) { // neither is a number that is none
		bad = append(bad, usage("the rate must be positive, not %v", o.Rate))
	}
	if o.Rollback && !o.Checkpoints {
		bad = append(bad, usage("--rollback needs --checkpoints: there is nothing else to go back to"))
	}
	if o.CheckLimit < 0 {
		bad = append(bad, usage("the limit of the checkers must be positive, not %v", o.CheckLimit))
	}
	for i, name := range o.Workloads {
		if _, ok := workload.New(name, workload.Config{}); !ok {
			bad = append(bad, usage("there is no workload %q; there are %s", name, strings.Join(allWorkloads(), ", ")))
		} else if slices.Contains(o.Workloads[:i], name) {
			bad = append(bad, usage("the workload %q is given twice", name))
		}
	}
	if !slices.Contains([]host.NetMode{host.NetAuto, host.NetNamespaces, host.NetLoopback}, o.Net) {
		bad = append(bad, usage("there is no network %q; there are auto, namespaces and loopback", o.Net))
	}
	if !slices.Contains([]host.DiskKind{host.DiskPlain, host.DiskFault, host.DiskExt4, host.DiskTmpfs}, o.Disk) {
		bad = append(bad, usage("there is no kind of disk %q; there are auto, plain, fault, ext4 and tmpfs", o.Disk))
	}
	return errors.Join(bad...)
}

// texts are the options for the report.
func (o *Options) texts() map[string]string {
	all := map[string]string{
		"duration": o.Duration.String(), "episode": o.Episode.String(), "nodes": strconv.Itoa(o.Nodes), "shards": strconv.Itoa(o.Shards),
		"engine": o.Engine, "memory": o.Memory, "log-size": o.LogSize, "net": string(o.Net), "disk": string(o.Disk), "faults": strings.Join(o.Faults, ","), "without": strings.Join(o.Without, ","),
		"workloads": strings.Join(o.Workloads, ","), "rate": strconv.FormatFloat(o.Rate, 'g', -1, 64), "clients": strconv.Itoa(o.Clients),
		"workers": strconv.Itoa(o.Workers), "keys": strconv.Itoa(o.Keys), "batch": strconv.Itoa(o.Batch), "node-flags": strings.Join(o.NodeFlags, " "), "node-binary": filepath.Base(o.NodeBinary),
	}
	if o.Checkpoints {
		all["checkpoints"], all["store-binary"] = "true", filepath.Base(cmp.Or(o.StoreBinary, "none"))
	}
	if o.Rollback {
		all["rollback"] = "true"
	}
	for k, v := range all {
		if v == "" {
			delete(all, k)
		}
	}
	return all
}
