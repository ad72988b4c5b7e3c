//go:build linux

package nemesis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/keelstate/keelstate/jepsen/s3fault"
)

// The kinds of faults of the object store.
const (
	KindStoreDown       Kind = "object-store-down"
	KindStoreHang       Kind = "object-store-hang"
	KindStoreSlow       Kind = "object-store-slow"
	KindStoreThrottle   Kind = "object-store-throttle"
	KindStoreErrors     Kind = "object-store-errors"
	KindStoreLostAnswer Kind = "object-store-lost-answer"
	KindStoreCutBody    Kind = "object-store-cut-body"
	KindStoreWrongBytes Kind = "object-store-wrong-bytes"
)

// OfStore says whether a kind hurts the object store, and no node.
func OfStore(k Kind) bool {
	return strings.HasPrefix(string(k), storeTarget+"-")
}

// harms are the faults of the object store, with what is drawn of each.
var harms = []struct {
	kind Kind
	draw func(rnd *rand.Rand, f *s3fault.Fault) (what string)
}{
	{KindStoreDown, whole(s3fault.Down, "resets every connection")},
	{KindStoreHang, whole(s3fault.Hang, "does not answer")},
	{KindStoreSlow, func(rnd *rand.Rand, f *s3fault.Fault) string {
		f.Kind, f.Share = s3fault.Slow, 1
		f.Delay = []time.Duration{50, 500, 2000}[rnd.IntN(3)] * time.Millisecond
		f.BytesPerSecond = []int64{8 << 10, 64 << 10, 1 << 20}[rnd.IntN(3)]
		return fmt.Sprintf("needs %s for each request, at %d KiB a second", f.Delay, f.BytesPerSecond>>10)
	}},
	{KindStoreThrottle, share(s3fault.Throttle, "answers 503 SlowDown to")},
	{KindStoreErrors, share(s3fault.Errors, "answers 500 to")},
	{KindStoreLostAnswer, share(s3fault.LostAnswer, "does what it is asked and does not say so to")},
	{KindStoreCutBody, share(s3fault.CutBody, "cuts the bodies of")},
	{KindStoreWrongBytes, share(s3fault.WrongBytes, "changes a byte of the objects of")},
}

func whole(kind s3fault.Kind, what string) func(*rand.Rand, *s3fault.Fault) string {
	return func(_ *rand.Rand, f *s3fault.Fault) string {
		f.Kind, f.Share = kind, 1
		return what
	}
}

func share(kind s3fault.Kind, what string) func(*rand.Rand, *s3fault.Fault) string {
	return func(rnd *rand.Rand, f *s3fault.Fault) string {
		f.Kind, f.Share = kind, []float64{0.1, 0.5, 1}[rnd.IntN(3)]
		return fmt.Sprintf("%s %g %% of the requests", what, 100*f.Share)
	}
}

func storeFaults(e *Env) []*fault {
	var lacks error
	if e.Fleet == nil || e.Fleet.Store == nil {
		lacks = e.StoreLacks
		if lacks == nil {
			lacks = errors.New("the nodes have no object store")
		}
	}
	var all []*fault
	for _, h := range harms {
		all = append(all, &fault{name: string(h.kind), kind: h.kind, inject: e.harm(h.draw), lacks: lacks})
	}
	return all
}

// harm has the store hurt all nodes or, one time of three and where they have
// addresses of their own, one.
func (e *Env) harm(draw func(*rand.Rand, *s3fault.Fault) string) func(context.Context, *rand.Rand) (*Injection, error) {
	return func(_ context.Context, rnd *rand.Rand) (*Injection, error) {
		f := s3fault.Fault{Seed: rnd.Uint64()}
		node, where := e.one(rnd)[0].ID, ""
		if rnd.IntN(3) == 0 && e.Fleet.Net != nil {
			f.From, where = []string{e.Fleet.Net.Address(node)}, ", of "+node+" alone"
		}
		what := draw(rnd, &f)
		if err := e.Fleet.Store.Err(); err != nil {
			return nil, err
		}
		a, err := e.Fleet.Store.Proxy.Inject(f)
		if err != nil {
			return nil, err
		}
		in := newInjection([]string{storeTarget}, "the object store "+what+where, nil)
		in.Heal = func(context.Context) error {
			met := a.Remove()
			in.Outcome, in.Idle = fmt.Sprintf("it met %d requests", met), met == 0
			return nil
		}
		return in, nil
	}
}

// storeTarget is whom these faults hit on the timeline.
const storeTarget = "object-store"
