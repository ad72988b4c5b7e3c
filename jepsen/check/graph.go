package check

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/jepsen/history"
)

// edgeKind says why one operation comes before another.
type edgeKind uint8

const (
	edgeWW   edgeKind = iota // its write is overwritten or followed by the other's
	edgeWR                   // the other saw its write
	edgeRW                   // it did not see the other's write
	edgeTime                 // it ended before the other began
	edgeLink                 // to or from a helper node, which says nothing
)

func (k edgeKind) String() string {
	return [...]string{"is followed by the write of", "is seen by", "did not see", "ended before", ""}[k]
}

type edge struct {
	from, to int32
	kind     edgeKind
}

// graph holds what must come before what. Nodes below len(ops) are operations,
// the others helpers that stand for many edges. A cycle is a contradiction.
type graph struct {
	ops   []*history.Op
	nodes int32
	edges []edge
	first []int32 // of each node in edges, once sorted; one longer than nodes
}

func newGraph(ops []*history.Op) *graph {
	g := &graph{ops: ops, nodes: int32(len(ops)), edges: make([]edge, 0, 5*len(ops))}
	g.realTime()
	return g
}

func (g *graph) node() int32 {
	g.nodes++
	return g.nodes - 1
}

func (g *graph) add(from, to int32, kind edgeKind) {
	if from != to {
		g.edges = append(g.edges, edge{from, to, kind})
	}
}

// realTime links what ended to all that began later, through a chain of
// helpers, one for each end.
func (g *graph) realTime() {
	begin := make([]int32, len(g.ops))
	for i := range begin {
		begin[i] = int32(i)
	}
	end := slices.DeleteFunc(slices.Clone(begin), func(i int32) bool { return g.ops[i].Return == history.Never })
	slices.SortFunc(begin, func(a, b int32) int { return cmp.Compare(g.ops[a].Invoke, g.ops[b].Invoke) })
	slices.SortFunc(end, func(a, b int32) int { return cmp.Compare(g.ops[a].Return, g.ops[b].Return) })
	last, next := int32(-1), 0
	for _, i := range begin {
		for ; next < len(end) && g.ops[end[next]].Return < g.ops[i].Invoke; next++ {
			h := g.node()
			g.add(end[next], h, edgeTime)
			if last >= 0 {
				g.add(last, h, edgeLink)
			}
			last = h
		}
		if last >= 0 {
			g.add(last, i, edgeLink)
		}
	}
}

// index sorts the edges by their start, in the order in which they were added.
func (g *graph) index() {
	g.first = make([]int32, g.nodes+1)
	for _, e := range g.edges {
		g.first[e.from+1]++
	}
	for i := range g.nodes {
		g.first[i+1] += g.first[i]
	}
	at := slices.Clone(g.first)
	sorted := make([]edge, len(g.edges))
	for _, e := range g.edges {
		sorted[at[e.from]] = e
		at[e.from]++
	}
	g.edges = sorted
}

func (g *graph) out(n int32) []edge { return g.edges[g.first[n]:g.first[n+1]] }

// cycles returns a short cycle of each of at most most strongly connected
// components that have one.
func (g *graph) cycles(most int) [][]edge {
	g.index()
	component, count := g.components()
	size := make([]int32, count)
	member := make([]int32, count) // an operation of each, or a helper
	for n := g.nodes - 1; n >= 0; n-- {
		size[component[n]]++
		member[component[n]] = n // operations come first, so they win
	}
	var found [][]edge
	for c := range size {
		if size[c] > 1 && len(found) < most {
			found = append(found, g.shortest(member[c], component))
		}
	}
	return found
}

// components is Tarjan's algorithm with a stack of its own.
func (g *graph) components() (component []int32, count int32) {
	const unseen = math.MaxInt32
	component = make([]int32, g.nodes)
	low := make([]int32, g.nodes)
	at := make([]int32, g.nodes) // next edge
	for i := range low {
		low[i], component[i], at[i] = unseen, -1, g.first[i]
	}
	var calls, stack []int32
	order := make([]int32, g.nodes)
	var counter int32
	for root := range g.nodes {
		if low[root] != unseen {
			continue
		}
		calls = append(calls, root)
		for len(calls) > 0 {
			n := calls[len(calls)-1]
			if low[n] == unseen {
				low[n], order[n] = counter, counter
				counter++
				stack = append(stack, n)
			}
			if at[n] < g.first[n+1] {
				to := g.edges[at[n]].to
				switch {
				case low[to] == unseen:
					calls = append(calls, to) // and look at this edge again
					continue
				case component[to] < 0:
					low[n] = min(low[n], low[to])
				}
				at[n]++
				continue
			}
			calls = calls[:len(calls)-1]
			if low[n] != order[n] {
				continue
			}
			for {
				m := stack[len(stack)-1]
				stack = stack[:len(stack)-1]
				component[m] = count
				if m == n {
					break
				}
			}
			count++
		}
	}
	return component, count
}

// bounds narrows the times within which each operation takes effect by those of
// all that must come before and after it. The graph has no cycles: they have
// been looked for. Then no time is left empty, for what ends before another
// begins is in the graph.
func (g *graph) bounds() (from, to []int64) {
	component, count := g.components()
	order := make([]int32, count) // last first
	from, to = make([]int64, g.nodes), make([]int64, g.nodes)
	for n := range g.nodes {
		order[component[n]] = n
		from[n], to[n] = math.MinInt64, history.Never
		if int(n) < len(g.ops) {
			from[n], to[n] = g.ops[n].Invoke, g.ops[n].Return
		}
	}
	for _, n := range order {
		for _, e := range g.out(n) {
			to[n] = min(to[n], to[e.to])
		}
	}
	slices.Reverse(order)
	for _, n := range order {
		for _, e := range g.out(n) {
			from[e.to] = max(from[e.to], from[n])
		}
	}
	return from, to
}

// shortest is a shortest cycle through a node within its component.
func (g *graph) shortest(start int32, component []int32) []edge {
	from := map[int32]edge{}
	queue := []int32{start}
	for len(queue) > 0 {
		n := queue[0]
		queue = queue[1:]
		for _, e := range g.out(n) {
			if component[e.to] != component[start] {
				continue
			}
			if _, ok := from[e.to]; ok {
				continue
			}
			from[e.to] = e
			if e.to == start {
				var cycle []edge
				for at := start; ; {
					cycle = append(cycle, from[at])
					if at = from[at].from; at == start {
						slices.Reverse(cycle)
						return cycle
					}
				}
			}
			queue = append(queue, e.to)
		}
	}
	return nil
}

// anomaly names a cycle as Adya and Elle do: by how many of its steps are a
// write that was not seen, or else a write that was; and whether it needs the
// real-time order.
func anomaly(cycle []edge) string {
	var count [edgeLink + 1]int
	for _, e := range cycle {
		count[e.kind]++
	}
	name := "G0"
	switch {
	case count[edgeRW] > 1:
		name = "G2"
	case count[edgeRW] == 1:
		name = "G-single"
	case count[edgeWR] > 0:
		name = "G1c"
	}
	if count[edgeTime] > 0 {
		name += "-realtime"
	}
	return name
}

// describe tells a cycle by its operations.
func (g *graph) describe(cycle []edge) ([]int64, string) {
	var ids []int64
	var b strings.Builder
	b.WriteString(" " + anomaly(cycle))
	kind := edgeLink
	for _, e := range cycle {
		if int(e.from) < len(g.ops) {
			ids = append(ids, g.ops[e.from].ID)
			fmt.Fprintf(&b, "\n  %v", g.ops[e.from])
		}
		if e.kind != edgeLink {
			kind = e.kind
		}
		if int(e.to) < len(g.ops) {
			fmt.Fprintf(&b, "\n    %v #%d", kind, g.ops[e.to].ID)
			kind = edgeLink
		}
	}
	return ids, b.String()
}
