package cluster_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/objectstore/fault"
)

// A restore that cannot end before somebody has mended the checkpoint ends the init,
// with the name of the object; the nodes go on, and the same init follows them.
func TestStuckRestoreEndsTheInit(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"damaged", "missing", "without-metadata"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			k, keys, want, c := checkpointed(t)
			metadata, _, object := k.parts(c)
			next := k.sharing(testcluster.Options{Nodes: 3, Shards: 2, KeyGroups: 12})
			back, name, wrong := func() {}, object, "missing"
			switch what {
			case "damaged":
				back, wrong = k.replace(object, func(b []byte) []byte { b[len(b)/2] ^= 1; return b }), "damaged"
			case "without-metadata":
				name = metadata
			}
			if wrong == "missing" {
				next.faults(func(op fault.Op, key string) fault.Fault {
					if op == fault.OpGet && key == name && next.Node(0).Identity().Cluster != "" { // it was there when the founder looked
						return fault.Fault{Err: fmt.Errorf("object %s: %w", key, base.ErrNotFound)}
					}
					return fault.Fault{}
				})
			}
			start := time.Now()
			var reply *cluster.FoundReply
			next.Eventually("the init ends", func() (err error) {
				reply, err = next.Node(1).Init(initCtx(t, time.Minute), next.restoreSpec(c.URI)) // n1 founds
				return err
			})
			if reply.Phase != meta.PhaseFoundPlace || len(reply.Stuck) == 0 || time.Since(start) > 40*time.Second {
				t.Fatalf("after %s: %+v", time.Since(start), reply)
			}
			for _, s := range reply.Stuck {
				if string(s.Fault) != wrong || !strings.Contains(s.Detail, name) || s.Node == "" || (s.Group == base.SystemGroup) != (name == metadata) {
					t.Errorf("%+v", s)
				}
			}
			next.saysStuck(reply.Stuck[0])
			again := make(chan error, 1)
			go func() {
				reply, err := next.Node(0).Init(initCtx(t, 30*time.Second), next.restoreSpec(c.URI))
				if err == nil && reply.Phase != meta.PhaseDone {
					err = fmt.Errorf("%+v", reply)
				}
				again <- err
			}()
			back()
			next.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
			if err := <-again; err != nil {
				t.Errorf("the same init, once it is mended: %v", err)
			}
			if got := next.restored(c.URI).contents(keys); !slices.Equal(got, want) {
				t.Errorf("restored\n%q\nwant\n%q", got, want)
			}
		})
	}
}

// saysStuck waits until the founding's operation says what the init said.
func (k *checkpointKit) saysStuck(want cluster.StuckRestore) {
	k.t.Helper()
	k.Eventually("the operation says what it is stuck for", func() error {
		all, err := k.Node(1).Operations(k.t.Context())
		if err != nil {
			return err
		}
		if len(all) != 1 || !slices.ContainsFunc(all[0].Stuck, func(s cluster.StuckRestore) bool {
			return s.Group == want.Group && s.Fault == want.Fault && s.Detail == want.Detail
		}) {
			return fmt.Errorf("want %+v in %+v", want, all)
		}
		return nil
	})
}

// What may be better by itself is no reason to give an init up.
func TestRestoreIsNotStuckWhileTheStoreIsAway(t *testing.T) {
	t.Parallel()
	k, _, _, c := checkpointed(t)
	_, _, object := k.parts(c)
	next := k.sharing(testcluster.Options{Nodes: 1, Shards: 2, KeyGroups: 12})
	next.faults(func(op fault.Op, key string) fault.Fault {
		if op == fault.OpGet && key == object {
			return fault.Fault{Err: fault.Trouble("down")}
		}
		return fault.Fault{}
	})
	ctx, cancel := context.WithTimeout(next.ctx(), 12*time.Second)
	defer cancel()
	reply, err := next.Node(0).Init(ctx, next.restoreSpec(c.URI))
	if err != nil || len(reply.Stuck) > 0 || !strings.Contains(reply.Problem, "down") || ctx.Err() != nil {
		t.Errorf("%v, %+v, %v", err, reply, ctx.Err())
	}
}
