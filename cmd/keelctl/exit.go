package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/internal/cliout"
)

// Exit codes, the same in every output format (KX3).
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitRefused     = 4
	exitUnavailable = 5
	exitUnhealthy   = 6
	exitPermission  = 7
	exitUnknown     = 8
	exitInterrupted = 130
)

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

// unhealthy is a check that did not hold; what it found has been printed.
type unhealthy struct{ why string }

func (e *unhealthy) Error() string { return e.why }

// interrupted is a command that a signal ended.
type interrupted struct{ err error }

func (e *interrupted) Error() string { return "interrupted: " + e.err.Error() }
func (e *interrupted) Unwrap() error { return e.err }

// unprinted is a command that did what it was asked and could not print it.
type unprinted struct{ err error }

func (e *unprinted) Error() string {
	return "it was done, but printing what it did failed: " + e.err.Error()
}
func (e *unprinted) Unwrap() error { return e.err }

// exitCode says how a command ended.
func exitCode(err error) int {
	var u *usageError
	var c *cliout.NoColumn
	var h *unhealthy
	var i *interrupted
	var p *unprinted
	var e *keel.Error
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &i):
		return exitInterrupted
	case errors.As(err, &p):
		return exitUnknown // never a code that stands for "not applied"
	case errors.As(err, &u), errors.As(err, &c):
		return exitUsage
	case errors.As(err, &h):
		return exitUnhealthy
	case errors.As(err, &e):
		return exitOf(e)
	default:
		return exitFailed
	}
}

func exitOf(e *keel.Error) int {
	is := func(list ...error) bool {
		for _, s := range list {
			if errors.Is(e, s) {
				return true
			}
		}
		return false
	}
	switch {
	case e.Code == "permission_denied" || e.Code == "unauthenticated":
		return exitPermission
	case e.Outcome != keel.OutcomeNotApplied:
		// Before the rest, whose codes say that nothing was applied (KX5): a
		// second attempt may well be refused because the first one was applied.
		return exitUnknown
	case is(keel.ErrInvalid, keel.ErrUnsupported):
		return exitUsage
	case is(keel.ErrNotFound, keel.ErrUndeclared):
		return exitNotFound
	case is(keel.ErrPrecondition, keel.ErrConflict, keel.ErrWrongKind, keel.ErrAlreadyFounded, keel.ErrIdentity):
		return exitRefused
	case is(keel.ErrCheckpoint):
		return exitFailed // may be tried again, but the cluster does answer
	case e.Retryable || is(keel.ErrDeadline, keel.ErrUnavailable, keel.ErrClosed):
		return exitUnavailable
	default:
		return exitFailed
	}
}

// failure is the error object; its keys are documented in docs/keelctl.md.
type failure struct {
	APIVersion   string `json:"apiVersion"`
	Kind         string `json:"kind"`
	Code         string `json:"code"`
	Outcome      string `json:"outcome"`
	Message      string `json:"message"`
	Field        string `json:"field,omitempty"`
	Hint         string `json:"hint,omitempty"`
	Retryable    bool   `json:"retryable"`
	RetryAfterMs int64  `json:"retryAfterMs,omitempty"`
	Shard        uint64 `json:"shard,omitempty"`
	LeaderHint   string `json:"leaderHint,omitempty"`
	Ordinal      *int   `json:"ordinal,omitempty"`
	ExitCode     int    `json:"exitCode"`
}

func failureOf(err error) failure {
	f := failure{APIVersion: cliout.APIVersion, Kind: "Error", Code: "failed", Outcome: keel.OutcomeNotApplied.String(),
		Message: err.Error(), ExitCode: exitCode(err)}
	var e *keel.Error
	if errors.As(err, &e) {
		f.Code, f.Outcome, f.Field, f.Hint = string(e.Code), e.Outcome.String(), e.Field, e.Hint
		f.Retryable, f.RetryAfterMs = e.Retryable, e.RetryAfter.Milliseconds()
		f.Shard, f.LeaderHint = e.Shard, e.LeaderHint
		if e.Ordinal >= 0 {
			f.Ordinal = &e.Ordinal
		}
	}
	var p *unprinted
	if errors.As(err, &p) {
		f.Code, f.Outcome = "unprinted", keel.OutcomeApplied.String()
	}
	switch f.ExitCode {
	case exitUsage:
		if e == nil {
			f.Code = "usage"
		}
	case exitUnhealthy:
		f.Code = "unhealthy"
	case exitInterrupted:
		if e == nil && p == nil {
			f.Code = "interrupted"
		}
	}
	return f
}

// fail prints an error in the chosen format and returns the exit code (KX2).
func (a *app) fail(cmd *cobra.Command, err error) int {
	f := failureOf(err)
	switch a.output {
	case "json", "yaml", "jsonl":
		format := a.output
		if format == "json" {
			format = "jsonl" // one line, as in a log
		}
		if b, encodeErr := cliout.Encoded(format, f); encodeErr == nil {
			fmt.Fprintf(a.stderr, "%s\n", b)
			return f.ExitCode
		}
	}
	fmt.Fprintf(a.stderr, "error: %s\n", err)
	if f.ExitCode == exitUsage && cmd != nil {
		fmt.Fprintf(a.stderr, "see: %s --help\n", cmd.CommandPath())
	}
	return f.ExitCode
}
