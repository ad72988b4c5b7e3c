package rocks

import "sync/atomic"

// gate counts who is inside and can be shut for good. The zero value is not
// usable; call newGate.
type gate struct {
	inside atomic.Int64 // minus shutBias once shut
	out    chan struct{}
}

const shutBias = int64(1) << 40

func newGate() *gate { return &gate{out: make(chan struct{}, 1)} }

// enter returns false if the gate is shut; after true, call leave.
func (g *gate) enter() bool {
	if g.inside.Add(1) > 0 {
		return true
	}
	g.leave()
	return false
}

func (g *gate) leave() {
	if g.inside.Add(-1) == -shutBias {
		select {
		case g.out <- struct{}{}:
		default:
		}
	}
}

// shut lets nobody in any more and waits until all are out. It is called once.
func (g *gate) shut() {
	if g.inside.Add(-shutBias) != -shutBias {
		<-g.out
	}
}
