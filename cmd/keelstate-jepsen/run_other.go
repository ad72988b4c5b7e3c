//go:build !linux

package main

import (
	"errors"

	"github.com/spf13/cobra"
)

// runCommand says that nodes can only be hurt on Linux; reports can be read
// everywhere.
func (a *app) runCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "run",
		Short:              "Run a cluster under faults, and judge it (Linux only)",
		DisableFlagParsing: true,
		RunE:               func(*cobra.Command, []string) error { return errors.New("the faults exist on Linux only") },
	}
}
