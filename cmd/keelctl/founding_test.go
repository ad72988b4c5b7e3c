package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/client/keeltest/cluster"
	"github.com/keelstate/keelstate/internal/base"
)

// halfFounded is a cluster whose founding waits for the node n3, which is down.
func halfFounded(t *testing.T) *cluster.Cluster {
	t.Helper()
	c := cluster.New(t, cluster.Options{Unfounded: true})
	c.Stop(2)
	c.Nodes().Eventually("the founding is recorded", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_, err := c.Nodes().Node(0).Init(ctx, c.Nodes().Spec())
		return err
	})
	return c
}

// A cluster that is being founded is not ready: no usage error, and the error
// says how far the founding is and what it waits for.
func TestWhileFoundingTheClusterIsNotReady(t *testing.T) {
	t.Parallel()
	on := halfFounded(t).Endpoints()[0]
	if code, _, stderr := keelctl(on, "state", "declare", "k", "v", "--kind", "value"); code != exitDone {
		t.Fatalf("state declare: exit %d, %s", code, stderr)
	}
	for _, line := range []string{"value set k v x --key y", "value get k v --key y", "scan k v"} {
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			f := failing(t, on, io.Discard, append(strings.Fields(line), "--timeout", "6s", "-o", "json")...)
			if f.ExitCode != exitUnavailable || f.Code != "not_ready" || f.Outcome != "not applied" || !f.Retryable ||
				!strings.Contains(f.Hint, "being founded") || !strings.Contains(f.Hint, "phase admit") || !strings.Contains(f.Hint, "n3") {
				t.Errorf("%+v", f)
			}
		})
	}
}

// An init that waits for a node that is down says which, ends with 6 in time,
// and goes on when it is asked again.
func TestInitNamesTheMissingNode(t *testing.T) {
	t.Parallel()
	c := cluster.New(t, cluster.Options{Unfounded: true})
	c.Stop(2)
	var nodes []string
	for _, n := range c.Nodes().Spec().Nodes {
		nodes = append(nodes, string(n.ID)+"="+n.RaftAddr)
	}
	spec := c.Nodes().Spec()
	line := []string{"cluster", "init", "--nodes", strings.Join(nodes, ","), "--shards", fmt.Sprint(spec.Shards),
		"--key-groups", fmt.Sprint(spec.KeyGroups), "--replication", fmt.Sprint(spec.Replication), "-o", "json"}
	type founded struct {
		Cluster, Operation, Phase, Problem string
	}
	initial := func(on string, wait string) (code int, f founded, stderr string) {
		t.Helper()
		code, stdout, stderr := keelctl(on, append(slices.Clone(line), "--wait", wait)...)
		if err := json.Unmarshal([]byte(stdout), &f); err != nil {
			t.Fatalf("exit %d, %v in %q, %s", code, err, stdout, stderr)
		}
		return code, f, stderr
	}
	for _, i := range []int{0, 1} { // the founder, and a node that passes it on
		code, f, stderr := initial(c.Endpoints()[i], "8s")
		if code != exitUnhealthy || f.Phase != "admit" || f.Cluster == "" || f.Operation == "" || !strings.Contains(f.Problem, "n3") {
			t.Errorf("init at node %d: exit %d, %+v, %s", i, code, f, stderr)
		}
		if !strings.Contains(stderr, "founding "+f.Operation+": phase admit: node n3") {
			t.Errorf("init at node %d does not name the node on the way: %s", i, stderr)
		}
	}
	c.Start(2)
	if code, f, stderr := initial(c.Endpoints()[1], "1m"); code != exitDone || f.Phase != "done" || f.Problem != "" {
		t.Errorf("the same init again: exit %d, %+v, %s", code, f, stderr)
	}
	// Another list is refused, and at once, whatever the wait.
	line[3] = nodes[0]
	code, _, stderr := keelctl(c.Endpoints()[0], append(slices.Clone(line), "--wait", "1m")...)
	if code != exitRefused {
		t.Errorf("another list: exit %d, %s", code, stderr)
	}
}

// An init of which nothing is known ends with what the attempts said: unknown
// where one may have begun to found, and the newest hint.
func TestInitWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	on := serveAdmin(t, &mute{})
	f := failing(t, on, io.Discard, "cluster", "init", "--nodes", "n1=n1:1", "--wait", "5s", "-o", "json")
	if f.ExitCode != exitUnknown || f.Outcome != "unknown" {
		t.Errorf("a node that never answers: %+v", f)
	}
	on = serveAdmin(t, &mute{err: &base.Error{Cause: base.ErrUnavailable, Ordinal: -1, Hint: "start node n1"}})
	f = failing(t, on, io.Discard, "cluster", "init", "--nodes", "n1=n1:1", "--wait", "5s", "-o", "json")
	if f.ExitCode != exitUnavailable && f.ExitCode != exitUnknown || !strings.Contains(f.Hint, "start node n1") {
		t.Errorf("a founder that is down: %+v", f)
	}
}

// mute answers an init with an error, or never.
type mute struct {
	keelstatepb.UnimplementedAdminServer
	err error
}

func (m *mute) InitCluster(ctx context.Context, _ *keelstatepb.InitClusterRequest) (*keelstatepb.InitClusterResponse, error) {
	if m.err != nil {
		return nil, apierr.ToStatus(m.err).Err()
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// The phase and the problem are those of the node's answer; where an attempt has
// none, those of the operation, which never says that this init is done.
func TestInitTakesWhatIsKnown(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		answer *keelstatepb.InitClusterResponse // nil is none
		op     *keelstatepb.Operation
		code   int
		text   string
	}{
		"answered":        {&keelstatepb.InitClusterResponse{Phase: "admit", Problem: "node n3 is down"}, nil, exitUnhealthy, "node n3 is down"},
		"answered, done":  {&keelstatepb.InitClusterResponse{Phase: "done"}, nil, exitDone, "done"},
		"failed":          {&keelstatepb.InitClusterResponse{Phase: "failed", Problem: "no disk"}, nil, exitUnhealthy, "no disk"},
		"looked at":       {nil, &keelstatepb.Operation{Id: "1", Kind: "found", Phase: "admit", Error: "node n3 is down"}, exitUnhealthy, "node n3 is down"},
		"another is done": {nil, &keelstatepb.Operation{Id: "1", Kind: "found", Phase: "done", Done: true}, exitUnknown, "unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := &half{answer: tc.answer, op: tc.op}
			on := serveAdmin(t, node, func(s *grpc.Server) { keelstatepb.RegisterClusterServer(s, node) })
			code, stdout, stderr := keelctl(on, "cluster", "init", "--nodes", "n1=n1:1", "--wait", "5s", "-o", "json")
			if code != tc.code || !strings.Contains(stdout+stderr, tc.text) {
				t.Errorf("exit %d, want %d: %s%s", code, tc.code, stdout, stderr)
			}
		})
	}
}

// half is a node that answers an init as told, or never, and knows an operation.
type half struct {
	keelstatepb.UnimplementedAdminServer
	keelstatepb.UnimplementedClusterServer
	answer *keelstatepb.InitClusterResponse
	op     *keelstatepb.Operation
}

func (h *half) InitCluster(ctx context.Context, _ *keelstatepb.InitClusterRequest) (*keelstatepb.InitClusterResponse, error) {
	if h.answer != nil {
		return h.answer, nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (h *half) ListOperations(context.Context, *keelstatepb.ListOperationsRequest) (*keelstatepb.ListOperationsResponse, error) {
	return &keelstatepb.ListOperationsResponse{Operations: []*keelstatepb.Operation{h.op}}, nil
}

func (h *half) GetTopology(context.Context, *keelstatepb.GetTopologyRequest) (*keelstatepb.Topology, error) {
	return &keelstatepb.Topology{ClusterId: "c"}, nil
}

// stuckInit is a node whose restore is stuck, for as long as some calls take.
type stuckInit struct {
	keelstatepb.UnimplementedAdminServer
	age uint64
}

func (s *stuckInit) InitCluster(context.Context, *keelstatepb.InitClusterRequest) (*keelstatepb.InitClusterResponse, error) {
	return &keelstatepb.InitClusterResponse{ClusterId: "c", OperationId: "1", Phase: "place", Problem: "shard S1 on node n2: gone",
		Stuck: []*keelstatepb.StuckRestore{{Shard: 1, Node: "n2", Fault: "missing", Detail: "object c/abc.1", AgeMs: s.age}}}, nil
}

// A restore that is stuck ends the init with 6, what is wrong and what to do; not by
// what was found before the command began.
func TestInitEndsWithARestoreThatIsStuck(t *testing.T) {
	t.Parallel()
	line := []string{"cluster", "init", "--nodes", "n1=h:1", "--restore", "c/1", "--wait", "6s", "-o", "json"}
	type founded struct {
		Phase string
		Stuck []struct {
			Shard               int
			Node, Fault, Detail string
		}
	}
	run := func(age uint64) (code int, f founded, stderr string) {
		t.Helper()
		code, stdout, stderr := keelctl(serveAdmin(t, &stuckInit{age: age}), line...)
		if err := json.Unmarshal([]byte(stdout), &f); err != nil {
			t.Fatalf("exit %d, %v in %q, %s", code, err, stdout, stderr)
		}
		return code, f, stderr
	}
	code, f, stderr := run(0)
	if code != exitUnhealthy || f.Phase != "place" || len(f.Stuck) != 1 || f.Stuck[0].Fault != "missing" || f.Stuck[0].Node != "n2" ||
		!strings.Contains(stderr, "object c/abc.1") || !strings.Contains(stderr, "Put the object back") {
		t.Errorf("exit %d, %+v, %s", code, f, stderr)
	}
	if code, f, stderr := run(60_000); code != exitUnhealthy || len(f.Stuck) != 0 || !strings.Contains(stderr, "goes on") {
		t.Errorf("of old: exit %d, %+v, %s", code, f, stderr)
	}
}
