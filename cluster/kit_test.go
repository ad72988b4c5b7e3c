package cluster_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// kit drives one shard of a test cluster as a client of package cluster.
type kit struct {
	*testcluster.Cluster
	t       *testing.T
	rev     base.Revision
	session base.SessionID
	seq     uint64
	values  engine.FamilyID // Value string
	sums    engine.FamilyID // Reducing int64 sum
	lists   engine.FamilyID // List string
	maps    engine.FamilyID // Map string -> string
}

func newKit(t *testing.T, o testcluster.Options) *kit {
	t.Helper()
	k := &kit{Cluster: testcluster.New(t, o), t: t}
	if !o.Unfounded {
		k.declare()
	}
	return k
}

func (k *kit) declare() {
	k.t.Helper()
	ctx := k.ctx()
	for _, d := range []struct {
		id *engine.FamilyID
		state.Declaration
	}{
		{&k.values, state.Declaration{Name: "values", Kind: state.KindValue, ValueType: keygroup.String}},
		{&k.sums, state.Declaration{Name: "sums", Kind: state.KindReducing, ValueType: keygroup.Int64, Function: "sum"}},
		{&k.lists, state.Declaration{Name: "lists", Kind: state.KindList, ValueType: keygroup.String}},
		{&k.maps, state.Declaration{Name: "maps", Kind: state.KindMap, UserKeyType: keygroup.String, ValueType: keygroup.String}},
	} {
		d.Keyspace, d.KeyType = "kit", keygroup.String
		k.Eventually("state "+d.Name+" is declared", func() error { // again is the same
			got, _, rev, err := k.Node(k.Running()[0]).Declare(ctx, d.Declaration)
			if err == nil {
				*d.id, k.rev = got.ID, rev
			}
			return err
		})
	}
	k.Eventually("a session is open", func() error { // one that may be open as well harms nobody
		id, rev, _, err := k.Node(k.Running()[0]).OpenSession(ctx, time.Minute)
		if err == nil {
			k.session, k.rev = id, max(k.rev, rev)
		}
		return err
	})
}

func (k *kit) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testcluster.Wait)
	k.t.Cleanup(cancel)
	return ctx
}

func (k *kit) route() cluster.Route {
	return cluster.Route{Group: 1, Epoch: 1, MetadataRevision: k.rev}
}

// submit sends one request to one node and waits for its result.
func (k *kit) submit(node int, req *raftfsm.Request) raftfsm.Result {
	done := make(chan raftfsm.Result, 1)
	k.Node(node).Submit(k.ctx(), k.route(), req, func(r raftfsm.Result) { done <- r })
	return <-done
}

// write sends a request in the kit's session until it is answered, at whichever
// node leads: under the same number, so that it is applied exactly once.
func (k *kit) write(ms ...state.Mutation) raftfsm.Result {
	k.t.Helper()
	k.seq++
	seq := k.seq
	var res raftfsm.Result
	k.Eventually(fmt.Sprintf("request %d is answered", seq), func() error {
		for _, i := range k.Running() {
			if k.Node(i).Leads(1) {
				res = k.submit(i, k.request(seq, ms...))
				if res.Err == nil {
					return nil
				}
				if s := base.SentinelOf(res.Err); s.Retryable || s.Outcome == base.OutcomeUnknown {
					return res.Err
				}
				return nil
			}
		}
		return errors.New("nobody leads")
	})
	return res
}

func (k *kit) request(seq uint64, ms ...state.Mutation) *raftfsm.Request {
	r := &raftfsm.Request{Session: k.session, Seq: seq, Prev: seq - 1, Floor: seq}
	for i, m := range ms {
		r.Mutations = append(r.Mutations, raftfsm.Mutation{Ordinal: uint32(i), Mutation: m})
	}
	return r
}

func (k *kit) mustWrite(ms ...state.Mutation) raftfsm.Result {
	k.t.Helper()
	res := k.write(ms...)
	if res.Err != nil {
		k.t.Fatalf("writing: %v", res.Err)
	}
	return res
}

func (k *kit) put(key, value string) state.Mutation {
	return state.Mutation{State: k.values, Op: state.OpValuePut, Key: []byte(key), Value: []byte(value)}
}

func (k *kit) add(key string, n int64) state.Mutation {
	return state.Mutation{State: k.sums, Op: state.OpAdd, Key: []byte(key), Elements: [][]byte{int64Bytes(k.t, n)}}
}

func (k *kit) appendTo(key string, elements ...string) state.Mutation {
	m := state.Mutation{State: k.lists, Op: state.OpListAdd, Key: []byte(key)}
	for _, e := range elements {
		m.Elements = append(m.Elements, []byte(e))
	}
	return m
}

func (k *kit) mapPut(key, user, value string) state.Mutation {
	return state.Mutation{State: k.maps, Op: state.OpMapPut, Key: []byte(key), Entries: []state.Entry{{UserKey: []byte(user), Value: []byte(value)}}}
}

func int64Bytes(t *testing.T, n int64) []byte {
	t.Helper()
	b, err := keygroup.Encode(keygroup.Int64, n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// readAt reads at one node only.
func (k *kit) readAt(node int, timeout time.Duration, q state.Query) (state.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	reply, err := k.Node(node).Read(ctx, &cluster.ReadRequest{Route: k.route(), Queries: []state.Query{q}})
	if err != nil {
		return state.Answer{}, err
	}
	return reply.Answers[0], reply.Errs[0]
}

// read reads linearizably at whichever node leads.
func (k *kit) read(q state.Query) state.Answer {
	k.t.Helper()
	var a state.Answer
	k.Eventually("the read is served", func() error {
		var err error
		for _, i := range k.Running() {
			if k.Node(i).Leads(1) {
				a, err = k.readAt(i, 5*time.Second, q)
				return err
			}
		}
		return errors.New("nobody leads")
	})
	return a
}

func (k *kit) value(key string) string {
	k.t.Helper()
	return string(k.read(state.Query{State: k.values, Kind: state.QueryGet, Key: []byte(key)}).Value)
}

func (k *kit) sum(key string) int64 {
	k.t.Helper()
	a := k.read(state.Query{State: k.sums, Kind: state.QueryGet, Key: []byte(key)})
	if !a.Found {
		return 0
	}
	return int64(binary.BigEndian.Uint64(a.Value) ^ 1<<63)
}

func (k *kit) list(key string) []string {
	k.t.Helper()
	var out []string
	q := state.Query{State: k.lists, Kind: state.QueryPage, Key: []byte(key)}
	for {
		a := k.read(q)
		for _, e := range a.Elements {
			out = append(out, string(e))
		}
		if a.Next == nil {
			return out
		}
		q.Cursor = a.Next
	}
}

// checkHashes demands that every replica of the shard has the same hashes.
func (k *kit) checkHashes() {
	k.t.Helper()
	k.Eventually("all replicas hash equal", func() error {
		hashes, err := k.Node(k.Running()[0]).HashShard(k.ctx(), 1)
		if err != nil {
			return err
		}
		for _, h := range hashes {
			if h.Error != "" {
				return fmt.Errorf("node %s: %s", h.Node, h.Error)
			}
		}
		for _, h := range hashes[1:] {
			if h.Index != hashes[0].Index || !bytes.Equal(h.Content, hashes[0].Content) || !bytes.Equal(h.Ops, hashes[0].Ops) {
				k.t.Fatalf("replicas differ: %+v", hashes)
			}
		}
		return nil
	})
}

// follower is a running node that does not lead the shard.
func (k *kit) follower() int {
	k.t.Helper()
	leader := k.Leader(1)
	for _, i := range k.Running() {
		if i != leader {
			return i
		}
	}
	k.t.Fatal("no follower")
	return -1
}

// generation is the generation of the replica on a node, as the metadata of a
// running node says.
func (k *kit) generation(node int) uint64 {
	k.t.Helper()
	top, err := k.Node(k.Running()[0]).Topology(k.ctx(), 0)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, s := range top.Shards {
		for _, r := range s.Replicas {
			if r.Node == testcluster.ID(node) {
				_, gen, _ := r.Replica.Split()
				return gen
			}
		}
	}
	return 0
}

// engines are those that eachEngine runs on; under the race detector only mem.
var engines = []string{"mem", "rocks"}

// eachEngine runs a test on each engine, on all at once: it mostly waits. Nothing
// may follow it in the test.
func eachEngine(t *testing.T, f func(t *testing.T, engine string)) {
	for _, e := range engines {
		t.Run(e, func(t *testing.T) {
			t.Parallel()
			f(t, e)
		})
	}
}
