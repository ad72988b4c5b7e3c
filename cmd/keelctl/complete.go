package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

// completion is a function that cobra calls for the words of a line.
type completion = func(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective)

// fromCluster makes words of what the cluster tells; none where it cannot be
// asked. Those are kept that begin with what has been typed.
func (a *app) fromCluster(cmd *cobra.Command, typed string, words func(context.Context) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	if a.settle(cmd) != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	if most := a.asideFor(); a.timeout == 0 || a.timeout > most {
		a.timeout = most
	}
	ctx, cancel := a.bounded(cmd.Context())
	defer cancel()
	out, err := words(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return slices.DeleteFunc(out, func(w string) bool { return !strings.HasPrefix(w, typed) }), cobra.ShellCompDirectiveNoFileComp
}

// completeFlag gives a flag of the command its completion.
func (a *app) completeFlag(c *cobra.Command, flag string, f completion) {
	if err := c.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(fmt.Sprintf("%s --%s: %v", c.Name(), flag, err)) // no such flag, or twice: a mistake in this program
	}
}

// described is a word with what the shell shows beside it.
func described(word, format string, args ...any) string {
	return word + "\t" + fmt.Sprintf(format, args...)
}

// completeStates completes a keyspace and then a state of it.
func (a *app) completeStates(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.fromCluster(cmd, typed, func(ctx context.Context) ([]string, error) {
		c, err := a.connect(ctx)
		if err != nil {
			return nil, err
		}
		states, err := c.States(ctx, "")
		seen := make(map[string]bool)
		var out []string
		for _, d := range states {
			word := d.Keyspace
			if len(args) == 1 {
				if d.Keyspace != args[0] {
					continue
				}
				word = d.Name
			}
			if !seen[word] {
				seen[word] = true
				out = append(out, word)
			}
		}
		return out, err
	})
}

// completeKeyspaces completes a keyspace and nothing after it.
func (a *app) completeKeyspaces(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.completeStates(cmd, args, typed)
}

// completeShards completes the id of a shard.
func (a *app) completeShards(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.fromCluster(cmd, typed, func(ctx context.Context) (out []string, err error) {
		t, err := a.topology(ctx)
		for _, s := range t.GetShards() {
			r := s.GetRange()
			out = append(out, described(strconv.FormatUint(s.GetId(), 10), "key groups [%d, %d)", r.GetLo(), r.GetHi()))
		}
		return out, err
	})
}

// completeReplicas completes a node that can lead the shard named before: one
// with a voting replica. Before a shard is named it is any node.
func (a *app) completeReplicas(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	return a.fromCluster(cmd, typed, func(ctx context.Context) (out []string, err error) {
		t, err := a.topology(ctx)
		if err != nil {
			return nil, err
		}
		voters := make(map[string]bool)
		if len(args) > 0 {
			id, err := shardArg(args[0])
			if err != nil {
				return nil, err
			}
			for _, s := range t.GetShards() {
				for _, r := range s.GetReplicas() {
					if s.GetId() == id && r.GetVoter() {
						voters[r.GetNode()] = true
					}
				}
			}
		}
		for _, n := range t.GetNodes() {
			if voters[n.GetId()] || len(args) == 0 && n.GetState() != "removed" {
				out = append(out, described(n.GetId(), "%s", n.GetGrpcAddress()))
			}
		}
		return out, nil
	})
}

// completeOperations completes the id of an operation.
func (a *app) completeOperations(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.fromCluster(cmd, typed, func(ctx context.Context) (out []string, err error) {
		all, err := a.operations(ctx)
		for _, o := range all {
			out = append(out, described(o.GetId(), "%s, %s", o.GetKind(), o.GetPhase()))
		}
		return out, err
	})
}
