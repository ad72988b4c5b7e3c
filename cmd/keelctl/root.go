package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/internal/cliout"
)

const (
	defaultEndpoint = "127.0.0.1:7401"
	defaultTimeout  = 10 * time.Second
)

// environment is what a command has of the process.
type environment struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) (string, bool)
	// patience bounds what is asked of the cluster beside the command itself; 0 is
	// defaultPatience, which is that of somebody who waits at a prompt.
	patience time.Duration
}

const defaultPatience = 2 * time.Second

// asideFor is the time for what is not the command itself.
func (e *environment) asideFor() time.Duration {
	if e.patience == 0 {
		return defaultPatience
	}
	return e.patience
}

// app holds the global flags of one run.
type app struct {
	environment
	endpoints []string
	timeout   time.Duration
	output    string
	columns   []string
	quiet     bool
	noInput   bool
	settled   bool         // output is the one asked for, and valid
	client    *keel.Client // opened by the first use
	root      *cobra.Command
}

// run runs one command line and returns its exit code.
func run(ctx context.Context, args []string, env environment) int {
	a := &app{environment: env}
	root := a.command()
	root.SetArgs(args)
	root.SetOut(env.stdout)
	root.SetErr(env.stderr)
	root.SetIn(env.stdin)
	cmd, err := root.ExecuteContextC(ctx)
	if a.client != nil {
		bye, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		closeErr := a.client.Close(bye)
		cancel()
		if closeErr != nil && !a.quiet && err == nil {
			// The session runs out by its lease; the command itself is done.
			fmt.Fprintln(env.stderr, "note: leaving the cluster:", closeErr)
		}
	}
	if err == nil {
		return exitDone
	}
	if ctx.Err() != nil {
		err = &interrupted{err}
	}
	if !a.settled {
		// Of a line that could not be parsed errors obey --output too (KX2).
		environment, _ := a.lookup("KEELSTATE_OUTPUT")
		a.output = cliout.Asked(args, environment)
	}
	return a.fail(cmd, err)
}

// command builds the command tree.
func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "keelctl",
		Short: "Operate a Keelstate cluster and its state",
		Long: `keelctl founds, inspects and operates a Keelstate cluster, and reads and writes
its keyed state.

Data goes to stdout and prose to stderr. Exit codes: 0 done, 1 failed and not
applied, 2 usage, 3 not found, 4 refused, 5 unavailable, 6 unhealthy,
7 permission, 8 applied or perhaps applied, 130 interrupted.`,
		Example:           "  keelctl cluster status\n  keelctl state list -o json\n  keelctl value get flights last --key ATL",
		SilenceUsage:      true,
		SilenceErrors:     true,
		Args:              cobra.NoArgs,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.settle(cmd) },
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	f := root.PersistentFlags()
	f.StringSliceVar(&a.endpoints, "endpoints", []string{defaultEndpoint}, "addresses of nodes; one is enough (KEELSTATE_ENDPOINTS)")
	f.DurationVar(&a.timeout, "timeout", defaultTimeout, "bound of the whole command, 0 for none (KEELSTATE_TIMEOUT)")
	f.StringVarP(&a.output, "output", "o", "table", "table, wide, json, yaml or jsonl (KEELSTATE_OUTPUT)")
	f.StringSliceVar(&a.columns, "columns", nil, "print only these columns or keys of an item")
	f.BoolVar(&a.quiet, "quiet", false, "no prose on stderr, only errors")
	f.BoolVar(&a.noInput, "no-input", false, "never ask; without --yes a destructive command is refused")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	root.AddCommand(a.clusterCommand(), a.nodeCommand(), a.shardCommand(), a.operationCommand(), a.checkpointCommand(), a.savepointCommand(), a.participantCommand(), a.stateCommand(),
		a.valueCommand(), a.listCommand(), a.mapCommand(), a.reducingCommand(), a.aggregatingCommand(),
		a.mergeCommand(), a.keysCommand(), a.scanCommand(), a.versionCommand(), a.configCommand())
	root.InitDefaultCompletionCmd()
	a.root = root
	finish(root)
	return root
}

// finish gives groups and generated commands what every command has.
func finish(c *cobra.Command) {
	for _, sub := range c.Commands() {
		finish(sub)
	}
	if c.HasSubCommands() && c.RunE == nil && c.Run == nil {
		c.RunE = func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage(fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath()))
			}
			return cmd.Help()
		}
	}
	if c.Example == "" {
		c.Example = "  " + c.CommandPath()
	}
	if check := c.Args; check != nil {
		c.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usage(err)
			}
			return nil
		}
	}
}

// setting is one value of the configuration and where it came from.
type setting struct{ name, flag, env string }

var settings = []setting{
	{"endpoints", "endpoints", "KEELSTATE_ENDPOINTS"},
	{"timeout", "timeout", "KEELSTATE_TIMEOUT"},
	{"output", "output", "KEELSTATE_OUTPUT"},
	{"columns", "columns", ""},
	{"quiet", "quiet", ""},
	{"no-input", "no-input", ""},
}

// settle takes the environment in, where no flag is given, and checks.
func (a *app) settle(cmd *cobra.Command) error {
	for _, s := range settings {
		v, set := a.lookup(s.env)
		if !set || v == "" || cmd.Flags().Changed(s.flag) {
			continue
		}
		if err := cmd.Flags().Lookup(s.flag).Value.Set(v); err != nil {
			return usage(fmt.Errorf("%s: %w", s.env, err))
		}
	}
	if !cliout.Valid(a.output) {
		return usage(fmt.Errorf("--output: %q is none of table, wide, json, yaml, jsonl", a.output))
	}
	a.settled = true
	if err := notNegative(cmd); err != nil || a.timeout < 0 { // the latter from the environment
		return usage(cmp.Or(err, errors.New("--timeout: must not be negative")))
	}
	if err := a.checkColumns(cmd); err != nil {
		return err
	}
	return usage(cmd.ValidateFlagGroups())
}

// notNegative refuses durations below zero, which would count as none given.
func notNegative(cmd *cobra.Command) (err error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Value.Type() == "duration" && strings.HasPrefix(f.Value.String(), "-") {
			err = fmt.Errorf("--%s: must not be negative", f.Name)
		}
	})
	return err
}

func (a *app) lookup(env string) (string, bool) {
	if env == "" || a.getenv == nil {
		return "", false
	}
	return a.getenv(env)
}

// given says that a setting has a value from the flag or the environment.
func (a *app) given(cmd *cobra.Command, flag string) bool {
	for _, s := range settings {
		if s.flag == flag {
			return a.origin(cmd, s) != originDefault
		}
	}
	return false
}

const originDefault = "default"

// origin says where a setting's value came from.
func (a *app) origin(cmd *cobra.Command, s setting) string {
	if cmd.Flags().Changed(s.flag) {
		return "flag --" + s.flag
	}
	if v, set := a.lookup(s.env); set && v != "" {
		return "environment " + s.env
	}
	return originDefault
}

// connect opens the client once.
func (a *app) connect(ctx context.Context) (*keel.Client, error) {
	if a.client == nil {
		c, err := keel.Open(ctx, a.endpoints)
		if err != nil {
			return nil, err
		}
		a.client = c
	}
	return a.client, nil
}

// bounded is the command's context under --timeout.
func (a *app) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, a.timeout)
}

// call runs an idempotent call on any node. reads says that it has no effect.
func (a *app) call(ctx context.Context, reads bool, f func(context.Context, grpc.ClientConnInterface) error, opts ...keel.CallOption) error {
	c, err := a.connect(ctx)
	if err != nil {
		return err
	}
	err = c.Call(ctx, f, opts...)
	var e *keel.Error
	if reads && errors.As(err, &e) {
		e.Outcome = keel.OutcomeNotApplied
	}
	return err
}

// prose prints a remark unless --quiet is given.
func (a *app) prose(format string, args ...any) {
	if !a.quiet {
		fmt.Fprintf(a.stderr, format+"\n", args...)
	}
}

// confirm asks for the name of what is to be destroyed, unless yes is given.
func (a *app) confirm(yes bool, what, name string) error {
	if yes {
		return nil
	}
	in, isFile := a.stdin.(*os.File)
	if a.noInput || !isFile || !isTerminal(in) {
		return usage(fmt.Errorf("%s needs --yes", what))
	}
	fmt.Fprintf(a.stderr, "%s. Type %s to go on: ", what, name)
	var typed string
	if _, err := fmt.Fscanln(in, &typed); err != nil || strings.TrimSpace(typed) != name {
		return usage(errors.New("not confirmed"))
	}
	return nil
}

func isTerminal(f *os.File) bool {
	st, err := f.Stat()
	if err != nil || st.Mode()&os.ModeCharDevice == 0 {
		return false
	}
	null, err := os.Stat(os.DevNull) // a character device too, and nobody answers there
	return err != nil || !os.SameFile(st, null)
}
