package sim

import (
	"context"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// looks are what was seen of Raft so far: what no client sees at once, but what
// goes before what clients see (SM5).
type looks struct {
	last  time.Time
	terms map[seat]uint64   // the highest term of each replica
	heads map[office]string // who led
	told  map[string]bool   // kinds of findings: one of each is enough
}

// seat is one replica of one group; the replicas of a node may bear the same id in
// each of its groups.
type seat struct {
	group   base.GroupID
	replica base.ReplicaID
}

// office is a group's leadership in one term.
type office struct {
	group base.GroupID
	term  uint64
}

// look looks at the terms and leaders of all replicas, if it is time.
func (w *world) look() {
	if w.cfg.Look == 0 || time.Since(w.looks.last) < w.cfg.Look {
		return
	}
	w.looks.last = time.Now()
	for i := range w.hosts {
		if w.up(i) {
			w.lookAt(i)
		}
	}
}

// lookAt looks at the replicas of one node.
func (w *world) lookAt(i int) {
	n := w.c.Get(i)
	if n == nil {
		return
	}
	before, err := n.NodeStatus(context.Background())
	if err != nil {
		return
	}
	after, err := n.NodeStatus(context.Background())
	if err != nil {
		return
	}
	terms := map[seat]uint64{}
	for _, g := range after.Groups {
		terms[seat{g.Group, g.Replica}] = g.Term
	}
	for _, g := range before.Groups {
		// The term is of the same instant as the state if it did not change.
		if g.State == "stopped" || g.State == "damaged" || terms[seat{g.Group, g.Replica}] != g.Term {
			continue
		}
		w.looks.saw(w, i, g.Group, g.Replica, g.Term, g.State == "leader")
	}
}

func (l *looks) saw(w *world, host int, group base.GroupID, replica base.ReplicaID, term uint64, leads bool) {
	if l.terms == nil {
		l.terms, l.heads, l.told = map[seat]uint64{}, map[office]string{}, map[string]bool{}
	}
	at := seat{group, replica}
	if high := l.terms[at]; term < high {
		l.tell(w, "term", fmt.Sprintf("the term of %s at %s fell from %d to %d", group, name(host), high, term))
	}
	l.terms[at] = max(l.terms[at], term)
	if !leads {
		return
	}
	o := office{group, term}
	if head, ok := l.heads[o]; ok && head != name(host) {
		l.tell(w, "leaders", fmt.Sprintf("%s has two leaders in term %d: %s and %s", group, term, head, name(host)))
	}
	l.heads[o] = name(host)
}

func (l *looks) tell(w *world, kind, text string) {
	if !l.told[kind] {
		l.told[kind] = true
		w.finding("%s", text)
	}
}
