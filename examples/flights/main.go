package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/examples/flights/job"
)

// Exit codes, as keelctl's.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitRefused     = 4 // another run has taken over, or another input was counted
	exitUnavailable = 5
	exitInterrupted = 130
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, getenv func(string) string, stdout io.Writer, stderr *os.File) int {
	o, err := parse(args, getenv, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "flights: %v\n", err)
		return exitUsage
	}
	if err := execute(ctx, o, stdout, stderr); err != nil {
		if ctx.Err() != nil {
			fmt.Fprintln(stderr, "flights: interrupted; run it again to go on")
			return exitInterrupted
		}
		fmt.Fprintf(stderr, "flights: %v\n", err)
		return exitCode(err)
	}
	return 0
}

func exitCode(err error) int {
	var fenced *job.Fenced
	var other *job.OtherInput
	var failed *job.Failure
	var replaced *job.Replaced
	var unknown *job.NoPosition
	switch {
	case errors.As(err, &fenced), errors.As(err, &other), errors.As(err, &replaced), errors.As(err, &unknown), errors.Is(err, keel.ErrConflict):
		return exitRefused
	case errors.As(err, &failed), errors.Is(err, keel.ErrUnavailable), errors.Is(err, keel.ErrDeadline), errors.Is(err, keel.ErrNotFounded):
		return exitUnavailable
	}
	return exitFailed
}

// runName makes a name that no other run has.
func runName() string {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

func execute(ctx context.Context, o *options, stdout io.Writer, stderr *os.File) error {
	// The input is looked at before anything is written, so that a broken line
	// leaves the cluster as it was.
	rows, err := precheck(o)
	if err != nil {
		return err
	}
	client, err := connect(ctx, o)
	if err != nil {
		return err
	}
	defer func() {
		farewell, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		client.Close(farewell) // the session's lease ends it where this fails
	}()
	s, err := openStore(ctx, client, o.keyspace)
	if err != nil {
		return err
	}
	if o.input != "" {
		if err := count(ctx, o, s, rows, stderr); err != nil {
			return err
		}
	}
	return reports(ctx, o, s, stdout, stderr)
}

// precheck reads the whole input once and counts its rows. Standard input can
// be read only once, and bad lines are wanted to be skipped with --skip-bad.
func precheck(o *options) (rows int64, err error) {
	if o.input == "" || o.input == "-" {
		return 0, nil
	}
	f, size, err := openInput(o.input)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if size == 0 { // no regular file
		return 0, nil
	}
	rows, err = job.Check(f, o.skipBad)
	if err == nil {
		return rows, nil
	}
	var bad *job.BadLine
	if errors.As(err, &bad) && bad.Line > 1 {
		return 0, fmt.Errorf("%s: %w (nothing was written; --skip-bad goes on without such lines)", o.input, err)
	}
	return 0, fmt.Errorf("%s: %w", o.input, err)
}

func connect(ctx context.Context, o *options, more ...keel.Option) (*keel.Client, error) {
	client, err := keel.Open(ctx, o.endpoints, append(more, keel.WithCallTimeout(20*time.Second), keel.WithBackoff(10*time.Millisecond, 200*time.Millisecond))...)
	if err != nil {
		return nil, err
	}
	ready, cancel := context.WithTimeout(ctx, o.connect)
	defer cancel()
	if err := client.Ready(ready); err != nil {
		client.Close(ctx)
		return nil, fmt.Errorf("connecting to %v: %w", o.endpoints, err)
	}
	return client, nil
}

// count runs the job.
func count(ctx context.Context, o *options, s *store, rows int64, stderr *os.File) error {
	in, file, err := openReader(o.input)
	if err != nil {
		return err
	}
	defer file.Close()
	var c job.Counters
	p := newProgress(stderr, &c, rows, o.quiet)
	if o.skipBad {
		o.job.OnBadLine = func(b *job.BadLine) { p.say(fmt.Sprintf("%s: skipped %v", o.input, b)) }
	}
	if o.acks != "" {
		log, err := os.OpenFile(o.acks, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			return fmt.Errorf("--acks: %w", err)
		}
		defer log.Close()
		o.job.OnAck = func(a job.Ack) { // one write each: complete lines, also when this process is killed
			fmt.Fprintf(log, "%d,%d,%d,%s,%d,%d\n", a.At.UnixMilli(), a.Total, a.Shard, a.Origin, a.Rows, a.Waited.Milliseconds())
		}
	}
	p.start()
	if o.rollback {
		err = countWithRollback(ctx, o, &c, p)
	} else {
		err = job.Run(ctx, in, s, o.job, &c)
	}
	p.finish(err)
	return err
}

// openReader opens the flights at their beginning.
func openReader(name string) (*job.Reader, io.Closer, error) {
	f, _, err := openInput(name)
	if err != nil {
		return nil, nil, err
	}
	in, err := job.NewReader(f)
	if err != nil {
		f.Close()
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	return in, f, nil
}

// reports writes what was asked for, and both before either takes its name.
func reports(ctx context.Context, o *options, s *store, stdout io.Writer, stderr *os.File) error {
	if o.report != "" {
		err := writeFile(o.report, stdout, func(w io.Writer) error {
			n, err := job.WriteReport(ctx, w, s, o.job.Workers)
			if err == nil && !o.quiet {
				fmt.Fprintf(stderr, "flights: read back %d origins\n", n)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("--report: %w", err)
		}
	}
	if o.days != "" {
		err := writeFile(o.days, stdout, func(w io.Writer) error {
			_, err := job.WriteDays(ctx, w, s)
			return err
		})
		if err != nil {
			return fmt.Errorf("--days: %w", err)
		}
	}
	return nil
}

// writeFile writes a file that has its name only when it is complete.
func writeFile(name string, stdout io.Writer, write func(io.Writer) error) (err error) {
	if name == "-" {
		return write(stdout)
	}
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	buffered := bufio.NewWriter(f)
	if err := write(buffered); err != nil {
		return err
	}
	if err := errors.Join(buffered.Flush(), f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}
