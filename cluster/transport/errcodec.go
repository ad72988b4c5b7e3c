package transport

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// RemoteError is an error that another node answered. It unwraps to the
// sentinel of the same Reason, so errors.Is and base.OutcomeOf work across
// nodes. A reason that this build does not know becomes base.ErrInternal, whose
// outcome is unknown.
type RemoteError struct {
	Node     base.NodeID
	Text     string
	Sentinel *base.Sentinel
}

func (e *RemoteError) Error() string { return fmt.Sprintf("node %s: %s", e.Node, e.Text) }

// Unwrap returns the sentinel.
func (e *RemoteError) Unwrap() error { return e.Sentinel }

var sentinelsByReason = func() map[base.Reason]*base.Sentinel {
	m := make(map[base.Reason]*base.Sentinel)
	for _, s := range base.Sentinels() {
		m[s.Reason] = s
	}
	return m
}()

// putError encodes an error with the details of a base.Error, if it holds one.
func putError(b []byte, err error) []byte {
	s := base.SentinelOf(err)
	if s == base.ErrInternal && errors.Is(err, context.DeadlineExceeded) {
		s = base.ErrDeadline
	}
	text := err.Error()
	var d *base.Error
	detailed := errors.As(err, &d) && d.Cause != nil
	if detailed {
		text = d.Cause.Error() // the details add the rest when they are printed
	}
	b = putBytes16(b, s.Reason)
	b = putBytes16(b, text[:min(len(text), maxErrorText)])
	if !detailed {
		return append(b, 0)
	}
	b = append(b, 1)
	b = putBytes16(b, d.Field[:min(len(d.Field), maxErrorText)])
	b = putBytes16(b, d.Hint[:min(len(d.Hint), maxErrorText)])
	if d.Group != nil {
		b = putU64(append(b, 1), uint64(*d.Group))
	} else {
		b = append(b, 0)
	}
	b = putBytes16(b, d.LeaderHint)
	b = putU64(b, uint64(d.Epoch))
	b = putU64(b, uint64(d.RetryAfter))
	return putU64(b, uint64(int64(d.Ordinal)))
}

// decodeError is the inverse of putError. A damaged body gives an error too.
func decodeError(body []byte, from base.NodeID) error {
	r := wireReader{b: body}
	reason, text := base.Reason(r.str16()), r.str16()
	s := sentinelsByReason[reason]
	if s == nil {
		s = base.ErrInternal
		text = fmt.Sprintf("%s (reason %q)", text, reason)
	}
	remote := &RemoteError{Node: from, Text: text, Sentinel: s}
	if !r.boolean() {
		if err := r.finish("an error"); err != nil {
			return err
		}
		return remote
	}
	d := &base.Error{Cause: remote, Field: r.str16(), Hint: r.str16()}
	if r.boolean() {
		g := base.GroupID(r.u64())
		d.Group = &g
	}
	d.LeaderHint = base.NodeID(r.str16())
	d.Epoch = base.Epoch(r.u64())
	d.RetryAfter = time.Duration(r.u64())
	d.Ordinal = int(int64(r.u64()))
	if err := r.finish("an error's details"); err != nil {
		return err
	}
	return d
}
