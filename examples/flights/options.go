package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/keelstate/keelstate/examples/flights/job"
)

type options struct {
	endpoints []string
	keyspace  string
	input     string // "" only reports, "-" is standard input
	skipBad   bool
	report    string // "" none, "-" standard output
	days      string
	acks      string
	connect   time.Duration
	quiet     bool
	job       job.Options
	// Of a run with rollback:
	rollback    bool
	participant string
	every       time.Duration
	// within, if set, stands between the job and the cluster, in tests.
	within func(job.Cluster) job.Cluster
}

// The modes of --recovery.
const (
	recoverySession  = "session"
	recoveryRollback = "rollback"
)

const usage = `Usage: flights --input FILE [--report FILE] [--days FILE] [options]
       flights --report FILE

Counts flights (CSV or .csv.gz with the columns date, delay, distance, origin,
destination) into keyed state by origin, exactly once. Killed and started again
with the same input it goes on where it stopped: by the position of each origin,
which is written with its state (--recovery session), or by checkpoints alone, which
keep the position in the input (--recovery rollback; the whole cluster is taken back
to the newest one). A keyspace is counted in one of the two ways. Without --input it only writes
the reports of what the cluster holds. "-" is standard input or output.

Examples:
  flights --input examples/flights/testdata/flights-20k.csv --report report.csv
  flights --input flights.csv.gz --rate 5000 --skip-bad
  flights --report - --days days.csv
  flights --input flights.csv --recovery rollback --participant flights-job

Options:
`

// parse reads the command line; environ gives the default endpoints. An error
// is a usage error.
func parse(args []string, getenv func(string) string, stderr io.Writer) (*options, error) {
	o := &options{}
	o.job.EnsureDefaults()
	f := flag.NewFlagSet("flights", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprint(stderr, usage)
		f.PrintDefaults()
	}
	endpoints := getenv("KEELSTATE_ENDPOINTS")
	if endpoints == "" {
		endpoints = "127.0.0.1:7401"
	}
	f.StringVar(&endpoints, "endpoints", endpoints, "any nodes of the cluster, host:port, separated by commas (KEELSTATE_ENDPOINTS)")
	f.StringVar(&o.keyspace, "keyspace", "flights", "keyspace of the states")
	f.StringVar(&o.input, "input", "", "the flights")
	f.BoolVar(&o.skipBad, "skip-bad", false, "name lines that are no flights and go on")
	f.StringVar(&o.report, "report", "", "write one line per origin here, read back from the cluster")
	f.StringVar(&o.days, "days", "", "write origin, day and flights here, read back from the cluster")
	f.StringVar(&o.acks, "acks", "", "append a line per acknowledged update: unix ms, rows so far, shard, origin, rows, ms waited")
	f.Float64Var(&o.job.RowsPerSecond, "rate", 0, "rows per second, 0 for as many as the cluster takes")
	f.IntVar(&o.job.WindowRows, "window", o.job.WindowRows, "rows that may be read and not yet acknowledged")
	f.IntVar(&o.job.BatchRows, "batch", o.job.BatchRows, "most rows of one update")
	f.IntVar(&o.job.Workers, "workers", o.job.Workers, "updates on their way at once")
	f.DurationVar(&o.job.GiveUp, "give-up", o.job.GiveUp, "end when one call gets no answer for so long")
	f.DurationVar(&o.connect, "connect-timeout", 30*time.Second, "how long to wait for the cluster at the start")
	recovery := recoverySession
	f.StringVar(&recovery, "recovery", recovery, "how a run goes on: session or rollback")
	f.StringVar(&o.participant, "participant", "", "name under which checkpoints keep the position, with --recovery rollback (the keyspace)")
	f.DurationVar(&o.every, "checkpoint-every", 2*time.Second, "take a checkpoint after so long without one, with --recovery rollback; 0 leaves it to the cluster's --checkpoint-interval")
	f.BoolVar(&o.quiet, "quiet", false, "no progress")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	o.endpoints = strings.Split(endpoints, ",")
	o.job.Run, o.job.Keyspace = runName(), o.keyspace
	o.rollback = recovery == recoveryRollback
	if !o.rollback && recovery != recoverySession {
		return nil, fmt.Errorf("--recovery: %q is neither %s nor %s", recovery, recoverySession, recoveryRollback)
	}
	return o, o.validate(f.Args())
}

func (o *options) validate(rest []string) error {
	var errs []error
	if len(rest) > 0 {
		errs = append(errs, fmt.Errorf("unexpected argument %q", rest[0]))
	}
	if o.input == "" && o.report == "" && o.days == "" {
		errs = append(errs, errors.New("--input: give the flights to count, or --report or --days to read what was counted"))
	}
	if o.report == "-" && o.days == "-" {
		errs = append(errs, errors.New("--days: only one report can go to standard output"))
	}
	for _, e := range o.endpoints {
		if e == "" {
			errs = append(errs, errors.New("--endpoints: an entry is empty"))
		}
	}
	if o.keyspace == "" {
		errs = append(errs, errors.New("--keyspace: it is empty"))
	}
	switch {
	case !o.rollback && o.participant != "":
		errs = append(errs, errors.New("--participant: it is for --recovery rollback"))
	case o.rollback && o.input == "-":
		errs = append(errs, errors.New("--input: with --recovery rollback it is read again, so it must be a file"))
	case o.every < 0:
		errs = append(errs, errors.New("--checkpoint-every: not below 0"))
	case o.rollback && o.participant == "":
		o.participant = o.keyspace
	}
	if err := o.job.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("--%w", err))
	}
	return errors.Join(errs...)
}

// openInput opens the flights. size is 0 where it is not known.
func openInput(name string) (f *os.File, size int64, err error) {
	if name == "-" {
		return os.Stdin, 0, nil
	}
	f, err = os.Open(name)
	if err != nil {
		return nil, 0, fmt.Errorf("--input: %w", err)
	}
	if st, err := f.Stat(); err == nil && st.Mode().IsRegular() {
		size = st.Size()
	}
	return f, size, nil
}
