package main

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// A bar moves on one line of a terminal, below what was said last, and leaves nothing
// behind; elsewhere there is a line now and then, without control characters.
func TestBarsOnATerminalAndElsewhere(t *testing.T) {
	const mib = 1 << 20
	steps := []meter{{}, bytesMeter(0, 3*mib), bytesMeter(mib, 3*mib), bytesMeter(mib, 3*mib), bytesMeter(4*mib, 3*mib)}
	draw := func(quiet, terminal bool, every time.Duration) string {
		var out bytes.Buffer
		b := bar{app: &app{environment: environment{stderr: &out}, quiet: quiet}, terminal: terminal, every: every}
		b.say("rollback: prepare")
		for _, m := range steps {
			b.draw(m)
			b.say("rollback: prepare")
		}
		b.say("rollback: fence")
		b.draw(meter{done: 1, of: 4, unit: "shards"})
		b.end()
		return out.String()
	}
	const clear = "\r\x1b[K"
	none, third, all := strings.Repeat(".", 30), strings.Repeat("#", 10)+strings.Repeat(".", 20), strings.Repeat("#", 30)
	quarter := strings.Repeat("#", 7) + strings.Repeat(".", 23)
	want := "rollback: prepare\n[" + none + "] 0%, 0 B of 3.0 MiB" + clear + "[" + third + "] 33%, 1.0 MiB of 3.0 MiB" + clear +
		"[" + all + "] 100%, 3.0 MiB of 3.0 MiB" + clear + "rollback: fence\n[" + quarter + "] 25%, 1 of 4 shards" + clear
	if got := draw(false, true, 0); got != want {
		t.Errorf("a terminal shows %q, want %q", got, want)
	}
	want = "rollback: prepare\nrollback: prepare: 0%, 0 B of 3.0 MiB\nrollback: prepare: 33%, 1.0 MiB of 3.0 MiB\nrollback: prepare: 100%, 3.0 MiB of 3.0 MiB\n" +
		"rollback: fence\nrollback: fence: 25%, 1 of 4 shards\n"
	if got := draw(false, false, 0); got != want {
		t.Errorf("a file shows %q, want %q", got, want)
	}
	if got := draw(false, false, time.Hour); !strings.HasPrefix(got, "rollback: prepare\n") || strings.Contains(got, "100%") {
		t.Errorf("in an hour a file shows %q", got)
	}
	if got := draw(true, true, 0); got != "" {
		t.Errorf("quiet, it shows %q", got)
	}
}

func TestSizesForTheEye(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 1<<20 - 1: "1023.9 KiB", 5 << 30: "5.0 GiB", 1 << 60: "1073741824.0 GiB"} {
		if got := sizeText(n); got != want {
			t.Errorf("%d bytes are %q, want %q", n, got, want)
		}
	}
}

// fetching is a node with an operation, a founding and a rollback that have bytes
// fetched, and end with the second look.
type fetching struct {
	looks
	keelstatepb.UnimplementedCheckpointsServer
}

func shardFetches() []*keelstatepb.ShardFetch {
	return []*keelstatepb.ShardFetch{{Shard: 1, DueBytes: 100, HereBytes: 30}, {Shard: 2, DueBytes: 100, HereBytes: 10}}
}

func (f *fetching) InitCluster(context.Context, *keelstatepb.InitClusterRequest) (*keelstatepb.InitClusterResponse, error) {
	return &keelstatepb.InitClusterResponse{ClusterId: "c", OperationId: "1", Phase: "place", Fetches: shardFetches()}, nil
}

func (f *fetching) rollback() *keelstatepb.Rollback {
	return &keelstatepb.Rollback{Operation: 3, Number: 2, Phase: "prepare", Shards: []*keelstatepb.RollbackShard{
		{Shard: 1, Bytes: 50, State: "serving", DueBytes: 100, HereBytes: 30}, {Shard: 2, Bytes: 50, State: "serving", DueBytes: 100, HereBytes: 10}}}
}

func (f *fetching) RollBack(_ *keelstatepb.RollBackRequest, s grpc.ServerStreamingServer[keelstatepb.Rollback]) error {
	return s.Send(f.rollback())
}

func (f *fetching) GetRollback(context.Context, *keelstatepb.GetRollbackRequest) (*keelstatepb.Rollback, error) {
	return f.rollback(), nil
}

// Whatever follows or shows a restore or a rollback says how many bytes have come.
func TestFetchedBytesAreShown(t *testing.T) {
	t.Parallel()
	node := &fetching{looks: looks{steps: []*keelstatepb.Operation{{Phase: "place", Fetches: shardFetches()}}}}
	on := serveAdmin(t, node, func(s *grpc.Server) { keelstatepb.RegisterCheckpointsServer(s, node) })
	type shown struct {
		FetchBytes, FetchedBytes *uint64
		Fetches, Shards          []struct{ Shard, FetchBytes, FetchedBytes uint64 }
	}
	// Whatever follows is still at it when its time is over.
	for name, line := range map[string]string{
		"show": "operation show 3", "watch": "operation watch 3 --wait 5s", "init": "cluster init --nodes n1=h:1 --wait 5s", "rollback": "checkpoint rollback 2 --yes --wait 5s",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, stdout, stderr := keelctl(on, append(strings.Fields(line), "-o", "json")...)
			var s shown
			if err := json.Unmarshal([]byte(stdout), &s); err != nil {
				t.Fatalf("%v in %q, %s", err, stdout, stderr)
			}
			shards := append(s.Fetches, s.Shards...)
			if s.FetchBytes == nil || *s.FetchBytes != 200 || *s.FetchedBytes != 40 || len(shards) != 2 || shards[1].FetchBytes != 100 || shards[1].FetchedBytes != 10 {
				t.Error(stdout)
			}
		})
	}
	_, stdout, _ := keelctl(on, "operation", "list", "-o", "json")
	var list struct{ Items []shown }
	if err := json.Unmarshal([]byte(stdout), &list); err != nil || len(list.Items) != 2 || list.Items[0].FetchBytes != nil || *list.Items[1].FetchedBytes != 40 {
		t.Errorf("list: %v in %s", err, stdout)
	}
}
