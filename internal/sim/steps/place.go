package steps

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// placement is a set of nodes that grows and shrinks, and shards to be placed.
type placement struct {
	loop   *Loop
	nodes  []keygroup.PlaceNode
	next   int
	placed int
}

func (p *placement) live() {
	p.loop.Every(time.Second, func() bool { p.change(); p.place(); return true })
}

func (p *placement) change() {
	if len(p.nodes) < 3 || len(p.nodes) < 12 && p.loop.chance(0.55) {
		p.next++
		p.nodes = append(p.nodes, keygroup.PlaceNode{ID: base.NodeID(fmt.Sprintf("n%d", p.next)), Load: float64(p.loop.IntN(3))})
		return
	}
	i := p.loop.IntN(len(p.nodes))
	p.nodes = slices.Delete(p.nodes, i, i+1)
}

// place demands SS5.
func (p *placement) place() {
	r := 1 + p.loop.IntN(min(3, len(p.nodes)))
	var shards []base.GroupID
	for i := range 1 + p.loop.IntN(20) {
		shards = append(shards, base.GroupID(i+1))
	}
	got, err := keygroup.Place(p.nodes, shards, r)
	if err != nil {
		p.loop.Problem("placing %d shards %d times on %d nodes: %v", len(shards), r, len(p.nodes), err)
		return
	}
	nodes, turned := slices.Clone(p.nodes), slices.Clone(shards)
	p.loop.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	slices.Reverse(turned)
	again, err := keygroup.Place(nodes, turned, r)
	if err != nil || !maps.EqualFunc(got, again, slices.Equal[[]base.NodeID]) {
		p.loop.Problem("the placement depends on the order of its inputs: %v, %v, %v", got, again, err)
	}
	held, led := map[base.NodeID]int{}, map[base.NodeID]int{}
	for _, n := range p.nodes {
		held[n.ID], led[n.ID] = 0, 0
	}
	for _, s := range shards {
		on := got[s]
		if len(on) != r || len(slices.Compact(slices.Sorted(slices.Values(on)))) != r {
			p.loop.Problem("%s is placed on %v, not on %d nodes", s, on, r)
		}
		for _, n := range on {
			held[n]++
		}
		led[on[0]]++
	}
	for what, count := range map[string]map[base.NodeID]int{"replicas": held, "leaders": led} {
		all := slices.Sorted(maps.Values(count))
		if all[len(all)-1]-all[0] > 1 {
			p.loop.Problem("%s are not balanced: %v", what, count)
		}
	}
	p.placed++
	p.loop.Note("placed %d shards %d times on %d nodes: %v", len(shards), r, len(p.nodes), got[1])
}
