package objectstore

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// ProbePrefix is where probes put their objects; nothing else lies there.
const ProbePrefix = "keelstate-probe/"

// probeKept is how old a probe's object is when its probe has surely ended.
const probeKept = time.Hour

// Probe tries all that is asked of a store, on a small object of its own, which it
// removes again: that a key is never stored twice, that lists and reads see what
// was stored. It also removes what probes that were killed have left. It fails as
// the store does, or, with base.ErrObjectStore and a hint, where the store does not
// keep the contract.
func Probe(ctx context.Context, s Store) error {
	key := ProbePrefix + rand.Text()
	body := []byte("a probe of Keelstate; it may be deleted\n")
	if err := s.Put(ctx, key, Bytes(body)); err != nil {
		return fmt.Errorf("probing: %w", err)
	}
	err := probe(ctx, s, key, body)
	if derr := s.Delete(ctx, key); err == nil && derr != nil {
		err = derr
	}
	if err != nil {
		return fmt.Errorf("probing: %w", err)
	}
	if _, err := s.Stat(ctx, key); !errors.Is(err, base.ErrNotFound) {
		return fmt.Errorf("probing: %w", broken("it still has what was deleted", err))
	}
	return nil
}

func broken(what string, err error) error {
	cause := fmt.Errorf("%w: %s", base.ErrObjectStore, what)
	if err != nil {
		cause = fmt.Errorf("%w: %w", cause, err)
	}
	return &base.Error{Cause: cause, Hint: "use a store that keeps to the protocol; checkpoints on this one may be lost", Ordinal: -1}
}

func probe(ctx context.Context, s Store, key string, body []byte) error {
	switch err := s.Put(ctx, key, Bytes([]byte("another"))); {
	case err == nil:
		return broken("it stored a second object under a key that was taken (it must know If-None-Match)", nil)
	case !errors.Is(err, base.ErrConflict):
		return err
	}
	r, err := s.Get(ctx, key, 0, -1)
	if err != nil {
		return err
	}
	got, err := io.ReadAll(r)
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	if !bytes.Equal(got, body) {
		return broken("it gives other bytes than were stored", nil)
	}
	return probeList(ctx, s, key)
}

// probeList looks for the object in a list, and removes old ones.
func probeList(ctx context.Context, s Store, key string) error {
	own, err := s.Stat(ctx, key)
	if err != nil {
		return err
	}
	var old []string
	found := false
	for o, err := range s.List(ctx, ProbePrefix, "") {
		if err != nil {
			return err
		}
		found = found || o.Key == key
		// By the store's own clock.
		if own.Modified.Sub(o.Modified) > probeKept {
			old = append(old, o.Key)
		}
	}
	if !found {
		return broken("its list lacks what was stored", nil)
	}
	return s.Delete(ctx, old...)
}
