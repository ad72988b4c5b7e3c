package keygroup

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/keelstate/keelstate/internal/base"
)

// PlaceNode is a node that can take replicas.
type PlaceNode struct {
	ID base.NodeID
	// Zone groups nodes that may fail together; empty means a zone of its own.
	Zone string
	// Load breaks ties: of two nodes with equally many replicas the one with
	// the lower load gets the next. Any unit, the same for all nodes.
	Load float64
}

// Place decides which nodes hold each shard: for every shard exactly
// `replication` different nodes, the preferred leader first. It is
// deterministic (KG7).
//
// A shard's replicas lie in as many zones as possible, and no zone holds more
// of them than it must: losing a zone should not cost a quorum. Within that,
// replicas are balanced; without zones, or with equally many nodes in every
// zone, two nodes differ by at most one replica and by at most one leader.
// Leaders are balanced as well as the replicas permit, always.
//
// Errors are base.ErrInvalid: no node, a node or shard listed twice,
// replication below 1 or above the number of nodes.
func Place(nodes []PlaceNode, shards []base.GroupID, replication int) (map[base.GroupID][]base.NodeID, error) {
	if err := checkPlace(nodes, shards, replication); err != nil {
		return nil, err
	}
	p := newPlacement(nodes, replication)
	sorted := slices.Sorted(slices.Values(shards))
	replicas := make([][]int, len(sorted))
	for i := range sorted {
		replicas[i] = p.pickReplicas()
	}
	leaders := p.pickLeaders(replicas)

	plan := make(map[base.GroupID][]base.NodeID, len(sorted))
	for i, shard := range sorted {
		ids := []base.NodeID{p.nodes[leaders[i]].ID}
		for _, n := range replicas[i] {
			if n != leaders[i] {
				ids = append(ids, p.nodes[n].ID)
			}
		}
		plan[shard] = ids
	}
	return plan, nil
}

func checkPlace(nodes []PlaceNode, shards []base.GroupID, replication int) error {
	seen := make(map[base.NodeID]bool, len(nodes))
	for _, n := range nodes {
		if n.ID == "" || seen[n.ID] {
			return fmt.Errorf("%w: node %q is empty or listed twice", base.ErrInvalid, n.ID)
		}
		if n.Load != n.Load {
			return fmt.Errorf("%w: the load of node %q is not a number", base.ErrInvalid, n.ID)
		}
		seen[n.ID] = true
	}
	if replication < 1 || replication > len(nodes) {
		return fmt.Errorf("%w: %d replicas cannot be placed on %d nodes", base.ErrInvalid, replication, len(nodes))
	}
	listed := make(map[base.GroupID]bool, len(shards))
	for _, s := range shards {
		if listed[s] {
			return fmt.Errorf("%w: shard %s is listed twice", base.ErrInvalid, s)
		}
		listed[s] = true
	}
	return nil
}

// placement is the state of one call of Place. Nodes are indices into nodes,
// which is sorted by (load, id), so that the lower index wins a tie.
type placement struct {
	nodes       []PlaceNode
	replication int
	zone        []int // zone of each node
	zoneSize    []int // nodes in each zone
	zoneTotal   []int // replicas placed in each zone
	count       []int // replicas placed on each node
}

func newPlacement(nodes []PlaceNode, replication int) *placement {
	p := &placement{
		nodes:       slices.Clone(nodes),
		replication: replication,
		zone:        make([]int, len(nodes)),
		count:       make([]int, len(nodes)),
	}
	slices.SortFunc(p.nodes, func(a, b PlaceNode) int {
		return cmp.Or(cmp.Compare(a.Load, b.Load), cmp.Compare(a.ID, b.ID))
	})
	byName := make(map[string]int)
	for i, n := range p.nodes {
		z, known := byName[n.Zone]
		if !known || n.Zone == "" {
			z = len(p.zoneSize)
			byName[n.Zone] = z
			p.zoneSize = append(p.zoneSize, 0)
		}
		p.zone[i] = z
		p.zoneSize[z]++
	}
	p.zoneTotal = make([]int, len(p.zoneSize))
	return p
}

// pickReplicas chooses the nodes of the next shard. Zones are balanced before
// nodes: choosing the emptiest node first could leave, for the last replica,
// only full nodes of the zones not yet used.
func (p *placement) pickReplicas() []int {
	picked := make([]int, 0, p.replication)
	inZone := make([]int, len(p.zoneSize))
	for len(picked) < p.replication {
		best := -1
		for n := range p.nodes {
			if slices.Contains(picked, n) {
				continue
			}
			if best < 0 || p.better(n, best, inZone) {
				best = n
			}
		}
		picked = append(picked, best)
		inZone[p.zone[best]]++
		p.zoneTotal[p.zone[best]]++
		p.count[best]++
	}
	return picked
}

func (p *placement) better(a, b int, inZone []int) bool {
	za, zb := p.zone[a], p.zone[b]
	return cmp.Or(
		cmp.Compare(inZone[za], inZone[zb]),
		cmp.Compare(p.zoneTotal[za]*p.zoneSize[zb], p.zoneTotal[zb]*p.zoneSize[za]),
		cmp.Compare(p.count[a], p.count[b]),
		cmp.Compare(a, b),
	) < 0
}

// pickLeaders gives each shard one of its replicas as leader: first greedily,
// then by moving leaderships along chains of shards from the most to the least
// burdened node until no chain helps. That is the best balance there is.
func (p *placement) pickLeaders(replicas [][]int) []int {
	leaders := make([]int, len(replicas))
	load := make([]int, len(p.nodes))
	for s, nodes := range replicas {
		best := nodes[0]
		for _, n := range nodes[1:] {
			if load[n] < load[best] || load[n] == load[best] && n < best {
				best = n
			}
		}
		leaders[s] = best
		load[best]++
	}
	for p.improveLeaders(replicas, leaders, load) {
	}
	return leaders
}

// improveLeaders finds a node from which a chain of hand-overs ends at a node
// with at least two leaders less, and carries it out. It is false if none is.
func (p *placement) improveLeaders(replicas [][]int, leaders, load []int) bool {
	order := make([]int, len(p.nodes))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(load[b], load[a]) })
	for _, from := range order {
		via := make([]int, len(p.nodes)) // shard by whose hand-over a node is reached
		for i := range via {
			via[i] = -1
		}
		queue := []int{from}
		for len(queue) > 0 {
			n := queue[0]
			queue = queue[1:]
			if load[n]+2 <= load[from] {
				load[n]++
				load[from]--
				for n != from {
					s := via[n]
					leaders[s], n = n, leaders[s]
				}
				return true
			}
			for s, leader := range leaders {
				if leader != n {
					continue
				}
				for _, next := range replicas[s] {
					if next != from && via[next] < 0 {
						via[next] = s
						queue = append(queue, next)
					}
				}
			}
		}
	}
	return false
}
