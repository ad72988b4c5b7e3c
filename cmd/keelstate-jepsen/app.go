package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/cliout"
	"github.com/keelstate/keelstate/jepsen/check"
)

// Exit codes, the same in every output format (KJ3).
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitVerdictFail = 6
	exitUndecided   = 8
	exitInterrupted = 130
)

// environment is what a command has of the process.
type environment struct {
	stdout, stderr io.Writer
	getenv         func(string) (string, bool)
}

// app holds the global flags of one command.
type app struct {
	environment
	output  string
	columns []string
	quiet   bool
	settled bool // output is the one asked for, and valid
}

// usageError is a mistake on the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usage(err error) error {
	var u *usageError
	if err == nil || errors.As(err, &u) {
		return err
	}
	return &usageError{err}
}

// judged is a verdict that is not a pass; it has been printed.
type judged struct {
	verdict check.Verdict
	text    string
}

func (e *judged) Error() string { return "verdict " + string(e.verdict) + ": " + e.text }

// verdictError is nil for a pass only.
func verdictError(v check.Verdict, text string) error {
	if v == check.Pass {
		return nil
	}
	return &judged{v, text}
}

// interrupted is a command that a signal ended.
type interrupted struct{ err error }

func (e *interrupted) Error() string { return "interrupted: " + e.err.Error() }
func (e *interrupted) Unwrap() error { return e.err }

// run runs one command line and returns its exit code.
func run(ctx context.Context, args []string, env environment) int {
	a := &app{environment: env}
	root := a.command()
	root.SetArgs(args)
	root.SetOut(env.stdout)
	root.SetErr(env.stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitDone
	}
	if ctx.Err() != nil {
		err = &interrupted{err}
	}
	if !a.settled {
		// Of a line that could not be parsed errors obey --output too (KJ2).
		environment, _ := a.lookup("KEELSTATE_OUTPUT")
		a.output = cliout.Asked(args, environment)
	}
	return a.fail(cmd, err)
}

// command builds the command tree.
func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "keelstate-jepsen",
		Short: "Hurt a Keelstate cluster and judge what its clients saw",
		Long: `keelstate-jepsen starts a cluster of real nodes on this machine, hurts it with faults
on a seeded schedule while clients use it, heals it, and judges what they saw.

Data goes to stdout and prose to stderr. Exit codes: 0 pass, 1 the harness could not
do it, 2 usage, 3 no such run, 6 verdict fail, 8 verdict unknown, 130 interrupted.`,
		Example:           "  keelstate-jepsen run --duration 10m --seed 7\n  keelstate-jepsen check jepsen-7\n  keelstate-jepsen report jepsen-7",
		SilenceUsage:      true,
		SilenceErrors:     true,
		Args:              cobra.NoArgs,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.settle(cmd) },
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	f := root.PersistentFlags()
	f.StringVarP(&a.output, "output", "o", "table", "table, wide, json, yaml or jsonl (KEELSTATE_OUTPUT)")
	f.StringSliceVar(&a.columns, "columns", nil, "print only these columns or keys of an item")
	f.BoolVar(&a.quiet, "quiet", false, "no prose on stderr, only errors")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	root.AddCommand(a.runCommand(), a.checkCommand(), a.reportCommand())
	root.InitDefaultCompletionCmd()
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
	if ok := c.Args; ok != nil {
		c.Args = func(cmd *cobra.Command, args []string) error { return usage(ok(cmd, args)) }
	}
}

// settle takes the environment in, where no flag is given, and checks.
func (a *app) settle(cmd *cobra.Command) error {
	if v, set := a.lookup("KEELSTATE_OUTPUT"); set && v != "" && !cmd.Flags().Changed("output") {
		a.output = v
	}
	if !cliout.Valid(a.output) {
		return usage(fmt.Errorf("--output: %q is none of %s", a.output, strings.Join(cliout.Formats, ", ")))
	}
	a.settled = true
	if err := a.checkColumns(cmd); err != nil {
		return usage(err)
	}
	return usage(cmd.ValidateFlagGroups())
}

func (a *app) lookup(env string) (string, bool) {
	if a.getenv == nil {
		return "", false
	}
	return a.getenv(env)
}

// prose prints a line of progress.
func (a *app) prose(line string) {
	if !a.quiet {
		fmt.Fprintln(a.stderr, line)
	}
}

// exitCode says how a command ended.
func exitCode(err error) int {
	var u *usageError
	var j *judged
	var i *interrupted
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &i):
		return exitInterrupted
	case errors.As(err, &u):
		return exitUsage
	case errors.As(err, &j) && j.verdict == check.Fail:
		return exitVerdictFail
	case errors.As(err, &j):
		return exitUndecided
	case errors.Is(err, base.ErrNotFound):
		return exitNotFound
	default:
		return exitFailed
	}
}

// failure is the error object.
type failure struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Code       string `json:"code"`
	Message    string `json:"message"`
	ExitCode   int    `json:"exitCode"`
}

var codes = map[int]string{exitFailed: "failed", exitUsage: "usage", exitNotFound: "not_found", exitVerdictFail: "verdict_fail",
	exitUndecided: "verdict_unknown", exitInterrupted: "interrupted"}

// fail prints an error in the chosen format and returns the exit code (KJ2).
func (a *app) fail(cmd *cobra.Command, err error) int {
	code := exitCode(err)
	switch format := a.output; format {
	case "json", "yaml", "jsonl":
		if format == "json" {
			format = "jsonl" // one line, as in a log
		}
		b, encodeErr := cliout.Encoded(format, failure{cliout.APIVersion, "Error", codes[code], err.Error(), code})
		if encodeErr == nil {
			fmt.Fprintf(a.stderr, "%s\n", b)
			return code
		}
	}
	fmt.Fprintf(a.stderr, "error: %s\n", err)
	if code == exitUsage && cmd != nil {
		fmt.Fprintf(a.stderr, "see: %s --help\n", cmd.CommandPath())
	}
	return code
}
