package main

import (
	"context"
	"encoding/json"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// looks is a node that has one operation, which is one step further at every
// look; nil is a look that fails for want of a quorum, and the last step stays.
type looks struct {
	keelstatepb.UnimplementedAdminServer
	mu    sync.Mutex
	steps []*keelstatepb.Operation
	taken int
}

func (l *looks) ListOperations(context.Context, *keelstatepb.ListOperationsRequest) (*keelstatepb.ListOperationsResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	step := l.steps[min(l.taken, len(l.steps)-1)]
	l.taken++
	if step == nil {
		return nil, apierr.ToStatus(base.ErrNoQuorum).Err()
	}
	o := proto.CloneOf(step) // an answer may still be on its way when the next is made
	o.Id, o.Kind, o.Done = "3", "found", o.Phase == phaseDone || o.Phase == phaseFailed
	return &keelstatepb.ListOperationsResponse{Operations: []*keelstatepb.Operation{{Id: "2", Phase: phaseDone, Done: true}, o}}, nil
}

// serveAdmin serves a node of the test's own, with more services if given, and
// returns its address.
func serveAdmin(t *testing.T, node keelstatepb.AdminServer, more ...func(*grpc.Server)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	keelstatepb.RegisterAdminServer(server, node)
	for _, register := range more {
		register(server)
	}
	go func() { _ = server.Serve(l) }() // ends at Stop
	t.Cleanup(server.Stop)
	return l.Addr().String()
}

// watch ends when the operation has ended, says on the way what it waits for,
// once each, and outlives a lost quorum; a failed operation and one that is not
// done in time exit with 6.
func TestWatchEndsWithTheOperation(t *testing.T) {
	t.Parallel()
	step := func(phase, problem string) *keelstatepb.Operation {
		return &keelstatepb.Operation{Phase: phase, Error: problem}
	}
	stuck := step("place", "")
	stuck.Stuck = []*keelstatepb.StuckRestore{{Shard: 1, Node: "n2", Fault: "missing", Detail: "object c/abc.1"}}
	for name, tc := range map[string]struct {
		steps []*keelstatepb.Operation
		args  []string
		code  int
		phase string
		prose []string
	}{
		"done":   {[]*keelstatepb.Operation{step("admit", "node n3 is down"), step("admit", "node n3 is down"), nil, step("place", ""), step("done", "")}, nil, exitDone, "done", []string{"admit: node n3 is down", "place", "done"}},
		"failed": {[]*keelstatepb.Operation{step("admit", ""), step("failed", "no disk")}, nil, exitUnhealthy, "failed", []string{"admit", "failed: no disk"}},
		"stuck for a while": {[]*keelstatepb.Operation{stuck, step("done", "")}, nil, exitDone, "done",
			[]string{"place: the restore is stuck: something of the checkpoint is missing (node n2: object c/abc.1). Put the object back as it was, under the same name; the nodes go on trying", "done"}},
		"in no time": {[]*keelstatepb.Operation{step("admit", "node n3 is down")}, []string{"--wait", "5s"},
			exitUnhealthy, "admit", []string{"admit: node n3 is down"}},
		"bounded by a timeout": {[]*keelstatepb.Operation{step("admit", ""), nil}, []string{"--timeout", "5s"}, exitUnhealthy, "admit", []string{"admit"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			on := serveAdmin(t, &looks{steps: tc.steps})
			code, stdout, stderr := keelctl(on, append([]string{"operation", "watch", "3", "-o", "json"}, tc.args...)...)
			var o struct{ Kind, ID, Phase string }
			if err := json.Unmarshal([]byte(stdout), &o); err != nil {
				t.Fatalf("%v in %q, %s", err, stdout, stderr)
			}
			if code != tc.code || o.Kind != "Operation" || o.ID != "3" || o.Phase != tc.phase {
				t.Fatalf("exit %d, %+v, %s", code, o, stderr)
			}
			var said []string
			for _, line := range strings.Split(stderr, "\n") {
				if text, ok := strings.CutPrefix(line, "operation 3 (found): "); ok {
					said = append(said, text)
				}
			}
			if strings.Join(said, ";") != strings.Join(tc.prose, ";") {
				t.Errorf("it said %q, want %q", said, tc.prose)
			}
		})
	}
}

// A watch without a bound does not wait for a cluster that nobody can reach.
func TestWatchOfNothingEnds(t *testing.T) {
	a := &app{environment: environment{getenv: func(string) (string, bool) { return "", false }}, endpoints: []string{"127.0.0.1:1"}}
	ended := make(chan error, 1)
	go func() { ended <- a.watch(context.Background(), "1", 100*time.Millisecond) }()
	select {
	case err := <-ended:
		if exitCode(err) != exitUnavailable {
			t.Fatalf("got %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it does not end")
	}
	if err := a.client.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
}
