package steps

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// valueID is the other state of a group, beside its list.
const valueID engine.FamilyID = 2

// group is the Raft group of a shard in the world of checkpoints, if that rolls
// back: a log, a machine at each node that is a member, and a leader. What is in the
// log is committed.
type group struct {
	w     *checkpoints
	id    base.GroupID
	kg    keygroup.Group
	key   string
	log   []raftfsm.Entry
	seats [replicas]*seat
	// leader is the place of the node that leads, or -1.
	leader int
	// cut is how many entries are not in the log any more: who has applied less gets
	// the leader's store.
	cut   int
	stamp uint64
	// now is what the group holds, saved what it held at each barrier.
	now   content
	saved map[uint64]content
	// files has the directory of what the store held at each barrier.
	files map[uint64]string
	dirs  int
	// rolled is the newest operation that rolled the group back, rolls their number.
	rolled uint64
	rolls  int
	// clock and sequence are the newest that were given.
	clock, sequence uint64
}

// content is what a group holds.
type content struct {
	list  []int64
	value int64
}

func (c content) clone() content { return content{slices.Clone(c.list), c.value} }

func (c content) equal(o content) bool { return slices.Equal(c.list, o.list) && c.value == o.value }

func (c content) String() string {
	return fmt.Sprintf("%d in the list, %v the last, value %d", len(c.list), c.list[max(0, len(c.list)-3):], c.value)
}

// seat is a group's replica at a node.
type seat struct {
	g    *group
	node *checkpointNode
	// replica is its id, empty if the node is no member.
	replica base.ReplicaID
	dir     string
	driver  engine.Driver
	m       *raftfsm.Machine // nil while the process is down
	store   engine.Store
	applied int
	// damaged: it was not prepared for a rollback.
	damaged bool
	// prepared are the directories of what was prepared, by operation.
	prepared map[uint64]string
	// preparing is the operation for which it prepares or was prepared in this life;
	// leading says that a step of the leader's is under way.
	preparing uint64
	leading   bool
	// struck says that the process dies in the rollback that it applies next.
	struck rollbackPlace
}

// rollbackPlace is where within a rollback a process dies.
type rollbackPlace int

const (
	nowhere rollbackPlace = iota
	beforeOpened
	beforeSealed
	beforeCurrent
	afterCurrent
	rollbackPlaces
)

var errStruck = errors.New("the process dies")

func (w *checkpoints) newGroup(s *shardFiles, lo, hi int) (*group, error) {
	g := &group{w: w, id: s.id, leader: -1, stamp: 1000, saved: map[uint64]content{}, files: map[uint64]string{}}
	for n := 0; g.key == ""; n++ {
		key := fmt.Sprintf("k%d", n)
		kg, err := keygroup.GroupOfKey(keygroup.String, []byte(key), checkpointGroups)
		if err != nil {
			return nil, err
		}
		if int(kg) >= lo && int(kg) < hi {
			g.key, g.kg = key, kg
		}
	}
	list := state.Declaration{ID: listID, Keyspace: "k", Name: "l", Kind: state.KindList, KeyType: keygroup.String, ValueType: keygroup.Int64, CodecVersion: 1}
	value := state.Declaration{ID: valueID, Keyspace: "k", Name: "v", Kind: state.KindValue, KeyType: keygroup.String, ValueType: keygroup.Int64, CodecVersion: 1}
	g.append(raftfsm.AppendInit(nil, raftfsm.Init{Group: g.id, Range: keygroup.Range{Lo: keygroup.Group(lo), Hi: keygroup.Group(hi)}, M: checkpointGroups, Epoch: 1, Birth: base.Birth(g.id), ClockMs: 1000}))
	g.append(raftfsm.AppendDeclare(nil, []state.Declaration{list, value}))
	for i, n := range w.nodes {
		g.seats[i] = &seat{g: g, node: n, replica: base.MakeReplicaID(n.id, 1), driver: mem.NewDriver(), dir: g.newDir("store"), prepared: map[uint64]string{}}
		if err := g.seats[i].open(); err != nil {
			return nil, err
		}
	}
	return g, nil
}

func (g *group) newDir(what string) string {
	g.dirs++
	return filepath.Join(g.w.dir, fmt.Sprintf("%d-%s-%d", g.id, what, g.dirs))
}

func (s *seat) open() error {
	store, err := s.driver.Open(s.dir)
	if err != nil {
		return err
	}
	s.store = store
	s.m, err = raftfsm.Open(store, raftfsm.Options{OnFatal: func(error) {}, OnBarrier: s.save, OnRollback: s.rollBack})
	if err != nil {
		return err
	}
	index, _ := s.m.Applied()
	s.applied = int(index)
	return nil
}

func (s *seat) close() {
	if s.m == nil {
		return
	}
	if err := s.m.Close(); err != nil {
		s.g.w.loop.Problem("closing shard %s at %s: %v", s.g.id, s.node.id, err)
	}
	s.m, s.preparing, s.leading, s.struck = nil, 0, false, nowhere
}

// serves says whether the replica applies what is in the log.
func (s *seat) serves() bool { return s.m != nil && !s.damaged }

// save keeps what the store holds at a barrier: that is what is uploaded.
func (s *seat) save(b raftfsm.Barrier) {
	if s.g.files[b.Number] != "" || s.g.w.view(0).Checkpoint(b.Number) == nil {
		return
	}
	dir := s.g.newDir("files")
	if err := s.store.Checkpoint(dir); err != nil {
		s.g.w.loop.Problem("checkpoint %d of shard %s: %v", b.Number, s.g.id, err)
	}
	s.g.files[b.Number] = dir
}

// rollBack does for the machine what the owner of a replica does: it makes a store of
// what was prepared the one that a restart opens.
func (s *seat) rollBack(rb raftfsm.Rollback, seal func(engine.Store) error) (engine.Store, func(engine.Store), error) {
	from := s.prepared[rb.Operation]
	if from == "" {
		return nil, nil, fmt.Errorf("nothing is prepared: %w", base.ErrDamaged)
	}
	if s.struck == beforeOpened {
		return nil, nil, errStruck
	}
	dir := s.g.newDir("store")
	if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
		return nil, nil, err
	}
	store, err := s.driver.Open(dir)
	if err != nil {
		return nil, nil, err
	}
	if s.struck != beforeSealed {
		err = seal(store)
	}
	if s.struck == beforeSealed || s.struck == beforeCurrent {
		err = errStruck
	}
	if err != nil {
		return nil, nil, errors.Join(err, store.Close(), os.RemoveAll(dir))
	}
	old := s.dir
	s.dir = dir
	if s.struck == afterCurrent {
		return nil, nil, errors.Join(errStruck, store.Close())
	}
	s.store = store
	return store, func(o engine.Store) {
		if err := errors.Join(o.Close(), os.RemoveAll(old)); err != nil {
			s.g.w.loop.Problem("removing the store of before a rollback: %v", err)
		}
	}, nil
}

func (g *group) append(cmd []byte) {
	g.log = append(g.log, raftfsm.Entry{Index: uint64(len(g.log)) + 1, Term: 1, Command: cmd})
}

// advance applies entries at a seat, up to a length of the log; ok says that it has
// them then. What comes out is that of the last one.
func (g *group) advance(i, to int) (last raftfsm.Outcome, ok bool) {
	s := g.seats[i]
	if !s.serves() || s.replica == "" || s.applied < g.cut && !g.install(s) {
		return last, false
	}
	if s.applied >= to {
		return last, true
	}
	if s.struck = nowhere; !g.w.quiet && g.w.loop.chance(0.2) {
		s.struck = rollbackPlace(g.w.loop.IntN(int(rollbackPlaces)))
	}
	out := s.m.ApplyBatch(g.log[s.applied:to])
	switch err := s.m.Err(); {
	case err == nil:
		s.applied = to
		return out[len(out)-1], true
	case errors.Is(err, errStruck):
		g.w.loop.Note("%s dies in the rollback of shard %s, at place %d", s.node.id, g.id, s.struck)
		g.w.crash(s.node)
	case errors.Is(err, base.ErrDamaged):
		g.w.loop.Note("shard %s at %s is not prepared and damaged", g.id, s.node.id)
		s.damaged = true
		g.w.rep.Damaged++
	default:
		g.w.loop.Problem("shard %s at %s stops: %v", g.id, s.node.id, err)
		s.damaged = true
	}
	return last, false
}

// install gives a seat the leader's store.
func (g *group) install(s *seat) bool {
	if g.leader < 0 || g.seats[g.leader] == s || !g.seats[g.leader].serves() {
		return false
	}
	dir := g.newDir("store")
	if err := g.seats[g.leader].store.Checkpoint(dir); err != nil {
		g.w.loop.Problem("snapshot of shard %s: %v", g.id, err)
		return false
	}
	s.close()
	if err := os.RemoveAll(s.dir); err != nil {
		g.w.loop.Problem("%v", err)
	}
	s.dir = dir
	if err := s.open(); err != nil {
		g.w.loop.Problem("opening a snapshot of shard %s: %v", g.id, err)
		return false
	}
	g.w.loop.Note("shard %s at %s has a snapshot at %d", g.id, s.node.id, s.applied)
	return true
}

// propose puts a command into the log and applies it at the leader; ok says that it
// did.
func (g *group) propose(cmd []byte) (out raftfsm.Outcome, ok bool) {
	if g.leader < 0 || !g.seats[g.leader].serves() {
		return out, false
	}
	g.append(cmd)
	if out, ok = g.advance(g.leader, len(g.log)); !ok {
		g.leader = -1
		return out, false
	}
	g.observe()
	if out.Err == nil {
		if out.ClockMs < g.clock || out.Sequence < g.sequence {
			g.w.problem("shard %s went back from clock %d and sequence %d to %d and %d", g.id, g.clock, g.sequence, out.ClockMs, out.Sequence)
		}
		g.clock, g.sequence = out.ClockMs, out.Sequence
	}
	return out, true
}

// members are the seats of the group's members.
func (g *group) members() (all []*seat) {
	for _, s := range g.seats {
		if s.replica != "" {
			all = append(all, s)
		}
	}
	return all
}

// elect lets somebody lead who has the whole log, if a majority is there; now and
// then the leader hands over. SS13: a majority is never damaged.
func (g *group) elect() {
	var well, up []int
	for i, s := range g.seats {
		if s.replica == "" || s.damaged {
			continue
		}
		well = append(well, i)
		if s.m != nil {
			up = append(up, i)
		}
	}
	quorum := len(g.members())/2 + 1
	if len(well) < quorum {
		g.w.problem("shard %s has %d replicas of %d that are not damaged", g.id, len(well), len(g.members()))
	}
	if slices.Contains(up, g.leader) && (g.w.quiet || g.w.loop.chance(0.9)) {
		return
	}
	if len(up) < quorum {
		g.leader = -1
		return
	}
	i := up[g.w.loop.IntN(len(up))]
	if g.seats[i].applied < g.cut && (g.leader < 0 || !g.seats[g.leader].serves()) {
		g.leader = -1 // it lacks entries that another has
		return
	}
	if _, ok := g.advance(i, len(g.log)); !ok {
		if g.leader >= 0 && !g.seats[g.leader].serves() {
			g.leader = -1
		}
		return
	}
	g.leader = i
	g.w.loop.Note("%s leads shard %s", g.w.nodes[i].id, g.id)
	g.observe()
}

// change takes a member from the group, gives it one back, or replaces a damaged
// one, unless a fence is up.
func (g *group) change() {
	rec := g.w.view(0).Shard(g.id)
	if g.leader < 0 || !g.recorded(rec) || g.fenced() {
		return
	}
	l := g.w.loop
	i := l.IntN(replicas)
	for k, s := range g.seats {
		if s.damaged {
			i = k
		}
	}
	s := g.seats[i]
	switch {
	case i == g.leader || s.node.up == false:
	case s.damaged || s.replica == "":
		s.close()
		s.damaged, s.replica, s.applied = false, base.MakeReplicaID(s.node.id, rec.MaxGeneration+1), 0
		s.dropPrepared()
		g.install(s)
	case !g.w.quiet && l.chance(0.3) && len(g.members()) == replicas && !slices.ContainsFunc(g.seats[:], func(s *seat) bool { return !s.serves() }):
		s.close()
		s.replica = ""
		s.dropPrepared()
	}
}

func (g *group) fenced() bool {
	return g.leader >= 0 && g.seats[g.leader].serves() && g.seats[g.leader].m.Header().Fence != 0
}

// recorded says whether the record of the shard has the group's members.
func (g *group) recorded(rec *meta.Shard) bool {
	return slices.EqualFunc(rec.Replicas, g.members(), func(r meta.Replica, s *seat) bool { return r.ReplicaID == s.replica })
}

func (s *seat) dropPrepared() {
	for op, dir := range s.prepared {
		if err := os.RemoveAll(dir); err != nil {
			s.g.w.loop.Problem("%v", err)
		}
		delete(s.prepared, op)
	}
}
