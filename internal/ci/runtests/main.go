package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

type options struct {
	stages   string
	long     bool
	fuzzTime string
}

// runner runs stages in a module's directory and reports to out.
type runner struct {
	dir  string
	opts options
	out  io.Writer
}

func main() {
	var opts options
	flag.StringVar(&opts.stages, "stages", "", "comma-separated stages to run (default: all but fuzz)")
	flag.BoolVar(&opts.long, "long", false, "race detector everywhere, repetitions, fuzzing")
	flag.StringVar(&opts.fuzzTime, "fuzztime", "10s", "time for each fuzz target")
	list := flag.Bool("list", false, "list the stages")
	flag.Parse()
	if *list {
		for _, s := range stages() {
			fmt.Printf("%-8s %s (at most %s)\n", s.name, s.about, s.limit)
		}
		return
	}
	chosen, err := choose(stages(), opts)
	if err != nil || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "runtests:", errors.Join(err, argError(flag.Args())))
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r := &runner{dir: ".", opts: opts, out: os.Stdout}
	if !r.runStages(ctx, chosen) {
		stop()
		os.Exit(1)
	}
}

func argError(args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("unexpected argument %q", args[0])
}

// choose picks the stages of a run, in their fixed order.
func choose(all []stage, opts options) ([]stage, error) {
	var wanted []string
	if opts.stages != "" {
		wanted = strings.Split(opts.stages, ",")
	}
	for _, name := range wanted {
		if !slices.ContainsFunc(all, func(s stage) bool { return s.name == name }) {
			return nil, fmt.Errorf("there is no stage %q", name)
		}
	}
	var chosen []stage
	for _, s := range all {
		if slices.Contains(wanted, s.name) || wanted == nil && (s.byDefault || opts.long) {
			if opts.long {
				s.limit *= 6
			}
			chosen = append(chosen, s)
		}
	}
	return chosen, nil
}

// runStages runs the stages one after the other, prints the report, and says
// whether nothing failed.
func (r *runner) runStages(ctx context.Context, chosen []stage) bool {
	var total tally
	began := time.Now()
	for _, s := range chosen {
		if ctx.Err() != nil {
			total.add(failure(s.name, "stage "+s.name, "interrupted before it began\n"))
			continue
		}
		total.add(r.runStage(ctx, s))
	}
	r.report(total, time.Since(began))
	return len(total.Failed) == 0
}

func (r *runner) runStage(ctx context.Context, s stage) tally {
	r.say("== %s: %s", s.name, s.about)
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	t := s.run(ctx, r)
	switch err := ctx.Err(); {
	case errors.Is(err, context.DeadlineExceeded):
		t.add(failure(s.name, "stage "+s.name, fmt.Sprintf("ended at its limit of %s\n", s.limit)))
	case err != nil:
		t.add(failure(s.name, "stage "+s.name, "interrupted\n"))
	}
	r.say("== %s: %d passed, %d failed, %d skipped in %s", s.name, t.Passed, len(t.Failed), len(t.Skipped), time.Since(began).Round(100*time.Millisecond))
	return t
}

func (r *runner) say(format string, args ...any) { fmt.Fprintf(r.out, format+"\n", args...) }

func (r *runner) report(t tally, took time.Duration) {
	if len(t.Skipped) > 0 {
		r.say("\nskipped:")
		for _, o := range t.Skipped {
			r.say("  [%s] %s: %s", o.Stage, o.name(), o.Detail)
		}
	}
	if len(t.Failed) > 0 {
		r.say("\nfailed:")
		for _, o := range t.Failed {
			r.say("  [%s] %s", o.Stage, o.name())
			for _, line := range strings.Split(strings.TrimRight(o.Detail, "\n"), "\n") {
				r.say("      %s", line)
			}
		}
		// Again without the details: who keeps only the end of the output finds
		// there what failed.
		r.say("\nfailed, in short:")
		for _, o := range t.Failed {
			r.say("  [%s] %s: %s", o.Stage, o.name(), o.cause())
		}
	}
	r.say("\nleaf tests, in %s:", took.Round(time.Second))
	r.say("%d passed, %d failed, %d skipped", t.Passed, len(t.Failed), len(t.Skipped))
}

// own puts a command into a process group of its own, and makes the end of its
// context kill the whole group: go test's children, and theirs, included.
func own(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
}

// check runs a command that counts as one test.
func (r *runner) check(ctx context.Context, stage, name string, argv ...string) tally {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	own(cmd)
	cmd.Dir = r.dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return failure(stage, name, fmt.Sprintf("%s%v\n", tail(out.String()), err))
	}
	return tally{Passed: 1}
}

// tail keeps the last part of a long output.
func tail(s string) string {
	if len(s) > maxOutput {
		return "... (cut)\n" + s[len(s)-maxOutput:]
	}
	return s
}

// gofmt checks every Go file that git knows or would add.
func (r *runner) gofmt(ctx context.Context) tally {
	list := exec.CommandContext(ctx, "git", "ls-files", "-co", "--exclude-standard", "-z", "*.go")
	list.Dir = r.dir
	files, err := list.Output()
	if err != nil {
		return failure("checks", "gofmt", "listing files with git: "+err.Error()+"\n")
	}
	args := []string{"-l"}
	for _, f := range strings.Split(strings.TrimRight(string(files), "\x00"), "\x00") {
		// A file that git knows may be gone from the tree.
		if _, err := os.Stat(r.dir + "/" + f); f != "" && err == nil {
			args = append(args, f)
		}
	}
	cmd := exec.CommandContext(ctx, "gofmt", args...)
	cmd.Dir = r.dir
	out, err := cmd.CombinedOutput()
	if err != nil || len(out) > 0 {
		return failure("checks", "gofmt", "not formatted:\n"+string(out))
	}
	return tally{Passed: 1}
}

// goTest runs go test over packages and counts its events.
func (r *runner) goTest(ctx context.Context, stage string, pkgs []string, args ...string) tally {
	if len(pkgs) == 0 {
		r.say("%s: no package has such tests yet", stage)
		return tally{}
	}
	args = append([]string{"test", "-json", "-vet=off", "-timeout", timeoutFor(ctx).String()}, args...)
	cmd := exec.CommandContext(ctx, "go", append(args, pkgs...)...)
	own(cmd)
	cmd.Dir = r.dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return failure(stage, "go test", err.Error())
	}
	if err := cmd.Start(); err != nil {
		return failure(stage, "go test", err.Error())
	}
	c := newCollector(stage)
	// A grandchild that left the process group may hold the pipe open after the
	// kill; the end of the stage must not wait for it.
	unhook := context.AfterFunc(ctx, func() { _ = stdout.Close() })
	defer unhook()
	feed := &progress{r: r, stage: stage, packages: len(pkgs)}
	feed.start()
	other, readErr := c.read(feed.count(stdout))
	feed.stop()
	runErr := cmd.Wait()
	c.unfinished("go test ended before this package did")
	if (runErr != nil || readErr != nil) && len(c.total.Failed) == 0 {
		// It failed, and no event says where.
		c.total.add(failure(stage, "go test", fmt.Sprintf("%s%s%v\n", tail(other), tail(stderr.String()), errors.Join(runErr, readErr))))
	}
	return c.total
}

// timeoutFor leaves go test a little less than the stage has, so that a hanging
// test is named with its stack before the stage is cut off.
func timeoutFor(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return 10 * time.Minute
	}
	return max(time.Until(deadline)*9/10, time.Second).Round(time.Second)
}

// progress prints a line every half minute while a go test runs.
type progress struct {
	r        *runner
	stage    string
	packages int
	done     chan struct{}
	wait     sync.WaitGroup
	mu       struct {
		sync.Mutex
		bytes int64
	}
}

func (p *progress) start() {
	p.done = make(chan struct{}) // closed by stop
	p.wait.Add(1)
	began := time.Now()
	go func() {
		defer p.wait.Done()
		tick := time.NewTicker(30 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-p.done:
				return
			case <-tick.C:
				p.mu.Lock()
				n := p.mu.bytes
				p.mu.Unlock()
				p.r.say("   %s: still running after %s (%d packages, %d KB of events)", p.stage, time.Since(began).Round(time.Second), p.packages, n>>10)
			}
		}
	}()
}

func (p *progress) stop() {
	close(p.done)
	p.wait.Wait()
}

// count passes r through and counts its bytes.
func (p *progress) count(r io.Reader) io.Reader { return &countingReader{p: p, r: r} }

type countingReader struct {
	p *progress
	r io.Reader
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.p.mu.Lock()
	c.p.mu.bytes += int64(n)
	c.p.mu.Unlock()
	return n, err
}
