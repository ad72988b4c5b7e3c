package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/internal/base"
)

// Exit codes (CN4).
const (
	exitFailed = 1
	exitUsage  = 2
	exitFatal  = 70
)

// failpointsEnv arms failpoints in a build that has them (docs/failpoints.md).
const failpointsEnv = envPrefix + "FAILPOINTS"

func main() {
	os.Exit(run(os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// usageError is a mistake of who calls the program.
type usageError struct{ error }

func (u usageError) Unwrap() error { return u.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// diskError is a failure of the disk under the data directory, which another
// start does not mend (CN3).
type diskError struct {
	error
	dir string
}

func (d diskError) Unwrap() error { return d.error }

// asDiskError makes a failure of the disk a diskError. No space is none: that
// can come back by itself.
func asDiskError(err error, dir string) error {
	if err != nil && !errors.Is(err, syscall.ENOSPC) && (errors.Is(err, base.ErrDiskFailed) || errors.Is(err, syscall.EIO)) {
		return diskError{err, dir}
	}
	return err
}

// run is main with its surroundings passed in; it returns the exit code.
func run(args, environ []string, stdout, stderr io.Writer) int {
	root := newRoot(environ)
	root.SetArgs(append([]string{}, args...)) // nil would mean those of the process
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := armFailpoints(environ)
	if err == nil {
		err = root.ExecuteContext(context.Background())
	}
	if err == nil {
		return 0
	}
	fmt.Fprintf(stderr, "keelstate-node: %v\n", err)
	var usage usageError
	if errors.As(err, &usage) {
		fmt.Fprintln(stderr, "run with --help for usage")
		return exitUsage
	}
	var disk diskError
	if errors.As(err, &disk) {
		fmt.Fprintf(stderr, "the disk under %s failed; look at the kernel's log and the disk before the node is started again. "+
			"If its data is gone, give the node an empty data directory and a new id: the others have the data\n", disk.dir)
		return exitFatal
	}
	return exitFailed
}

func newRoot(environ []string) *cobra.Command {
	root := &cobra.Command{
		Use:   "keelstate-node",
		Short: "One node of a Keelstate cluster",
		Long: `Runs one node of a Keelstate cluster until it gets SIGTERM or SIGINT, which
hands over leadership and stops; a second signal stops at once.

Every flag is also a key of the YAML file named by --config and an environment
variable: --node-id is node-id there and KEELSTATE_NODE_ID here. A flag wins over
the environment, which wins over the file.

A new node waits until it is founded (keelctl cluster init) or admitted.`,
		Example: `  keelstate-node --node-id n1 --data-dir /var/lib/keelstate
  keelstate-node --config /etc/keelstate/node.yaml
  keelstate-node dev`,
		Args:          noArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := loadConfig(cmd.Flags(), environ, nodeSettings())
			if err != nil {
				return err
			}
			return runNode(cmd.Context(), c, cmd.ErrOrStderr())
		},
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	register(root.Flags(), nodeSettings())
	root.AddCommand(newConfigCommand(environ), newDevCommand(), newVersionCommand(), newDebugCommand(environ))
	return root
}

// noArgs refuses arguments as a mistake of usage: cobra's own check would also
// take a mistyped command for an argument without saying which are known.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%q is not a command or argument of %q", args[0], cmd.CommandPath())
	}
	return nil
}

func exactArgs(n int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return usagef("%q takes %s, got %d arguments", cmd.CommandPath(), what, len(args))
		}
		return nil
	}
}

// group is a command that only has commands below it.
func group(use, short string, sub ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: noArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return usagef("%q needs one of its commands", cmd.CommandPath())
	}}
	c.AddCommand(sub...)
	return c
}
