package fault

import (
	"fmt"
	"strings"
	"sync"
	"time"
)

// Op is an operation of a driver, a store, a view or an iterator.
type Op string

// The operations. Next is a step of an iterator; reads of a view count as those
// of its store.
const (
	OpOpen         Op = "open"
	OpVerify       Op = "verify"
	OpGet          Op = "get"
	OpMultiGet     Op = "multi-get"
	OpScan         Op = "scan"
	OpNext         Op = "next"
	OpEnsureFamily Op = "ensure-family"
	OpDropFamily   Op = "drop-family"
	OpWrite        Op = "write"
	OpNewView      Op = "new-view"
	OpFlush        Op = "flush"
	OpDurableGet   Op = "durable-get"
	OpCheckpoint   Op = "checkpoint"
	OpCompact      Op = "compact"
	OpClip         Op = "clip"
	OpAbsorb       Op = "absorb"
	OpClose        Op = "close"
)

// Rule makes operations fail or wait.
type Rule struct {
	// Ops are the operations it applies to; none means every operation.
	Ops []Op
	// Dir restricts it to stores whose directory contains this; empty means all.
	Dir string
	// Skip is how many matching operations pass before it fires; Times is how
	// often it fires, 0 meaning for ever.
	Skip, Times int
	// Delay is how long the operation waits first.
	Delay time.Duration
	// Gate, if set, holds the operation until it is closed.
	Gate <-chan struct{}
	// Error is returned in place of doing the operation; nil lets it go on.
	Error error
	// After is returned after the operation was done below, as if the answer
	// had been lost; it is ignored where Error is set.
	After error
}

// Plan is a set of rules. The zero value has none. The first rule that fires
// decides.
type Plan struct {
	mu     sync.Mutex
	rules  []*active
	counts map[Op]int
}

type active struct {
	Rule
	seen, fired int
}

// Add adds a rule and returns a function that removes it and one that tells how
// often it has fired.
func (p *Plan) Add(r Rule) (remove func(), fired func() int) {
	a := &active{Rule: r}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, a)
	remove = func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for i, o := range p.rules {
			if o == a {
				p.rules = append(p.rules[:i:i], p.rules[i+1:]...)
				return
			}
		}
	}
	fired = func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return a.fired
	}
	return remove, fired
}

// Count is how often op was called on all stores, failed calls included.
func (p *Plan) Count(op Op) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.counts[op]
}

func (a *active) matches(op Op, dir string) bool {
	if !strings.Contains(dir, a.Dir) {
		return false
	}
	for _, o := range a.Ops {
		if o == op {
			return true
		}
	}
	return len(a.Ops) == 0
}

// choose counts the operation and returns the rule that fires, if any.
func (p *Plan) choose(op Op, dir string) (Rule, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.counts == nil {
		p.counts = make(map[Op]int)
	}
	p.counts[op]++
	var chosen *active
	for _, a := range p.rules {
		if !a.matches(op, dir) {
			continue
		}
		a.seen++
		if chosen == nil && a.seen > a.Skip && (a.Times == 0 || a.fired < a.Times) {
			a.fired++
			chosen = a
		}
	}
	if chosen == nil {
		return Rule{}, false
	}
	return chosen.Rule, true
}

// run does the operation under the plan.
func (p *Plan) run(op Op, dir string, do func() error) error {
	r, ok := p.choose(op, dir)
	if !ok {
		return do()
	}
	if r.Delay > 0 {
		time.Sleep(r.Delay)
	}
	if r.Gate != nil {
		<-r.Gate
	}
	if r.Error != nil {
		return fmt.Errorf("injected into %s of %s: %w", op, dir, r.Error)
	}
	if err := do(); err != nil || r.After == nil {
		return err
	}
	return fmt.Errorf("injected after %s of %s: %w", op, dir, r.After)
}
