package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/report"
	"github.com/keelstate/keelstate/jepsen/runner"
)

func (a *app) runCommand() *cobra.Command {
	var o runner.Options
	var out, net, disk string
	c := &cobra.Command{
		Use:   "run",
		Short: "Run a cluster under faults, and judge it",
		Long: `run starts a cluster of real nodes on this machine and hurts it in episodes until
--duration is over or one fails. As root each node has a network namespace, a control
group and a faulty disk of its own; what cannot be injected here is said and counted.

A run leaves a folder: run.json, the histories, the timeline, metrics, the nodes' logs
and report.html. After a failure the nodes' data stays too.`,
		Example: `  keelstate-jepsen run --duration 10m --seed 7
  keelstate-jepsen run --faults kill,partition,power-loss --workloads register,list
  keelstate-jepsen run --seed 7 --first-episode 12 --duration 1s --out again`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("seed") {
				o.Seed = rand.Uint64() >> 32
			}
			if err := noZeros(cmd.Flags()); err != nil {
				return err
			}
			if out == "" {
				out = fmt.Sprintf("jepsen-%d", o.Seed)
			}
			o.Dir, o.Net, o.Disk, o.Note = out, host.NetMode(net), host.DiskKind(disk), a.prose
			if disk == "auto" {
				o.Disk = ""
			}
			if err := errors.Join(besideUs(&o), findStore(&o)); err != nil {
				return err
			}
			o.Repeat = repeatCommand(cmd, o.Seed)
			rep, err := runner.Run(cmd.Context(), o)
			return a.ended(out, rep, err)
		},
	}
	f := c.Flags()
	f.Uint64Var(&o.Seed, "seed", 0, "of schedule, victims and workloads; drawn if it is not given")
	f.DurationVar(&o.Duration, "duration", 5*time.Minute, "how long episodes are begun")
	f.DurationVar(&o.Episode, "episode", 40*time.Second, "how long the faults of an episode last")
	f.IntVar(&o.First, "first-episode", 1, "number of the first episode, to repeat one")
	f.IntVar(&o.Nodes, "nodes", 3, "nodes of the cluster")
	f.IntVar(&o.Shards, "shards", 2, "shards of the cluster")
	f.StringVar(&o.Engine, "engine", "", "storage engine of the nodes; empty for their default")
	f.StringVar(&o.Memory, "memory", "256MiB", "memory budget of each node")
	f.StringVar(&o.LogSize, "log-size", "2MiB", "size at which the nodes cut their logs; small, so that snapshots are sent")
	f.StringVar(&net, "net", string(host.NetAuto), "auto, namespaces or loopback")
	f.StringVar(&disk, "disk", "auto", "auto, plain, fault, ext4 or tmpfs")
	f.StringSliceVar(&o.Faults, "faults", nil, "kinds or names of faults; all that are possible here if none are given")
	f.StringSliceVar(&o.Without, "without", nil, "kinds or names of faults to leave out")
	f.StringSliceVar(&o.Workloads, "workloads", nil, "workloads; all if none are given")
	f.Float64Var(&o.Rate, "rate", 4000, "operations a second of each workload, at most")
	f.IntVar(&o.Keys, "keys", 192, "keys that each workload uses at a time")
	f.IntVar(&o.Batch, "batch", 128, "operations that go in one call at most, each judged by itself; 1 for none")
	f.IntVar(&o.Clients, "clients", 6, "clients; every second has connections that break")
	f.IntVar(&o.Workers, "workers", 9, "workers of each workload")
	f.DurationVar(&o.CheckLimit, "limit", 2*time.Minute, "bound of each checker; one that cannot decide in it says unknown")
	f.BoolVar(&o.Checkpoints, "checkpoints", false, "give the cluster an object store that has faults too, and look at its checkpoints")
	f.BoolVar(&o.Rollback, "rollback", false, "take the live cluster back to a savepoint beside faults, after each episode; needs --checkpoints")
	f.StringVar(&o.StoreBinary, "store-binary", "", "versitygw, for the object store; the one of this tree or of the PATH if it is not given")
	f.StringArrayVar(&o.NodeFlags, "node-flag", nil, "a flag for every node, such as --node-flag=--log-level=debug")
	f.StringVar(&o.Revision, "revision", "", "what is tested, for the report; what keelctl says if it is not given")
	f.BoolVar(&o.KeepData, "keep-data", false, "keep the nodes' data after a pass too")
	f.StringVar(&out, "out", "", "folder of the report, new or empty; jepsen-SEED if it is not given")
	f.StringVar(&o.NodeBinary, "node-binary", "", "keelstate-node; the one beside this command if it is not given")
	f.StringVar(&o.CtlBinary, "keelctl", "", "keelctl; the one beside this command if it is not given")
	return c
}

// noZeros says which numbers were given as zero, which would be taken for the
// default.
func noZeros(f *pflag.FlagSet) error {
	var bad []error
	for _, name := range []string{"duration", "episode", "first-episode", "nodes", "shards", "rate", "keys", "batch", "clients", "workers", "limit"} {
		if v := f.Lookup(name).Value.String(); f.Changed(name) && (v == "0" || v == "0s" || v == "-0") {
			bad = append(bad, fmt.Errorf("--%s: must be positive", name))
		}
	}
	return usage(errors.Join(bad...))
}

// besideUs finds the binaries that were not named.
func besideUs(o *runner.Options) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for _, b := range []struct {
		path *string
		name string
	}{{&o.NodeBinary, "keelstate-node"}, {&o.CtlBinary, "keelctl"}} {
		if *b.path == "" {
			*b.path = filepath.Join(filepath.Dir(self), b.name)
		}
		if *b.path, err = filepath.Abs(*b.path); err != nil {
			return err
		}
		if _, err := os.Stat(*b.path); err != nil {
			return usage(fmt.Errorf("there is no %s: %w", b.name, err))
		}
	}
	return nil
}

// findStore finds the service for the object store, if it was not named: where
// make tools puts it in the tree that has this command in its bin, or in the PATH.
// That there is none is no mistake; the run says what it leaves out.
func findStore(o *runner.Options) error {
	if !o.Checkpoints {
		return nil
	}
	if o.StoreBinary != "" {
		if _, err := os.Stat(o.StoreBinary); err != nil {
			return usage(fmt.Errorf("there is no service for the object store: %w", err))
		}
	} else if self, err := os.Executable(); err == nil {
		for _, dir := range []string{filepath.Dir(filepath.Dir(self)), "."} {
			path := filepath.Join(dir, ".deps", "bin", "versitygw")
			if _, err := os.Stat(path); err == nil {
				o.StoreBinary = path
				break
			}
		}
	}
	if o.StoreBinary == "" {
		if path, err := exec.LookPath("versitygw"); err == nil {
			o.StoreBinary = path
		}
	}
	if o.StoreBinary == "" {
		return nil
	}
	path, err := filepath.Abs(o.StoreBinary)
	o.StoreBinary = path
	return err
}

// repeatCommand is the command line with the seed that was used, without what is
// only about where and how the report goes.
func repeatCommand(cmd *cobra.Command, seed uint64) string {
	words := []string{"keelstate-jepsen run", fmt.Sprintf("--seed %d", seed)}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = []string{strings.Join(list.GetSlice(), ",")}
			if f.Name == "node-flag" {
				values = list.GetSlice()
			}
		}
		switch f.Name {
		case "seed", "out", "output", "columns", "quiet", "revision":
		default:
			for _, v := range values {
				words = append(words, "--"+f.Name+"="+quoted(v))
			}
		}
	})
	return strings.Join(words, " ")
}

// quoted is a word for a shell.
func quoted(s string) string {
	if s != "" && !strings.ContainsAny(s, " \t\n'\"\\$`*?[]{}()<>|&;~#!") {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// ended prints what came of a run.
func (a *app) ended(out string, rep *report.Run, err error) error {
	if errors.Is(err, runner.ErrUsage) {
		return usage(err)
	}
	if rep == nil {
		return err
	}
	a.prose("report: " + filepath.Join(out, report.PageFile))
	if err := errors.Join(err, a.printOne("Run", runRecord(out, rep))); err != nil {
		return err
	}
	if rep.Verdict != "pass" {
		a.prose("to repeat it: " + rep.Repeat)
	}
	return verdictError(rep.Verdict, rep.Text)
}
