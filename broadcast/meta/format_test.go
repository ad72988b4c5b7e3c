package meta

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// goldenRecords has one of every kind, with every field set.
func goldenRecords() map[string]struct {
	kind string
	rec  any
} {
	type r = struct {
		kind string
		rec  any
	}
	decl := Declaration{ID: 7, Keyspace: "origin", Name: "late", Kind: "map", KeyType: "string", UserKeyType: "int64", ValueType: "json", Function: "max", FunctionParams: "p=1", CodecVersion: 1}
	dropped := decl
	dropped.DroppedMs = 1_700_000_000_000
	return map[string]r{
		"cluster": {kindCluster, &Cluster{ID: "00ff", KeyGroups: 128, Replication: 3, Engine: "rocks", Incarnation: 2, FormatVersion: 1, CreatedMs: 1_700_000_000_000}},
		"node":    {kindNode, &Node{ID: "n1", DiskID: "d1", RaftAddr: "n1:1", GRPCAddr: "n1:2", HTTPAddr: "n1:3", Zone: "z", State: NodeMember}},
		"shard":   {kindShard, &Shard{ID: 3, Lo: 0, Hi: 64, Epoch: 1, Birth: 1<<64 - 1, Replicas: replicas(2, "n1"), PreferredLeader: "n1", MaxGeneration: 2}},
		"shard-seed": {kindShard, &Shard{ID: 3, Lo: 0, Hi: 64, Epoch: 1, Birth: 1<<64 - 1, Replicas: replicas(2, "n1"), PreferredLeader: "n1", MaxGeneration: 2,
			Seed: &ShardSeed{Index: 1 << 40, Term: 9, Nodes: []int{0}}}},
		"keyspace":    {kindKeyspace, &Keyspace{Name: "origin", KeyType: "tuple(string,int32)"}},
		"state":       {kindState, &decl},
		"dropped":     {kindDropped, &dropped},
		"session":     {kindSession, &Session{ID: 1<<64 - 2, LeaseMs: 30000, ExpiresMs: 1_700_000_030_000}},
		"ended":       {kindEnded, &EndedSession{ID: 5, EndedMs: 1_700_000_030_000, Expired: true}},
		"ended-floor": {kindEndedFloor, &endedFloor{Revision: 12}},
		"operation":   {kindOperation, &Operation{ID: 1, Kind: OperationFound, Phase: PhaseFoundAdmit, Spec: json.RawMessage(`{"nodes":[]}`), Error: "waiting", CreatedMs: 1, UpdatedMs: 2}},
		"counter":     {kindCounter, &counter{Next: 9}},
		"checkpoint": {kindCheckpoint, &Checkpoint{Number: 12, Phase: CheckpointFailed, Automatic: true, Incarnation: 2, KeyGroups: 128, Shards: 4, Participants: 2, PositionBytes: 9,
			CreatedMs: 1_700_000_000_000, UpdatedMs: 1_700_000_000_002, EndedMs: 1_700_000_000_002, TimeoutMs: 60000, Error: "shard S1 on node n2: gone",
			MetadataSHA256: sumOf("metadata"), MetadataSize: 700, Totals: CheckpointTotals{FullBytes: 1, NewBytes: 2, Files: 3, NewFiles: 4, Objects: 5, Requests: 6, SyncMs: 7, AsyncMs: 8},
			Garbage: true, MetadataPlanned: true}},
		"checkpoint-shard": {kindCheckpointShard, &CheckpointShard{Checkpoint: 12, Group: 3, Birth: 1<<64 - 1, Epoch: 4, Lo: 0, Hi: 64, Uploader: "n2", Attempt: 17,
			State: CheckpointShardUploaded, UpdatedMs: 1_700_000_000_001, Objects: 2, UseParts: 1, Report: &ShardReport{Index: 9, Term: 2, Sequence: 8, ClockMs: 7,
				ManifestKey: "00ff/" + sumOf("manifest").String() + ".17", ManifestSHA256: sumOf("manifest"), ManifestSize: 300,
				FullBytes: 1, NewBytes: 2, Files: 3, NewFiles: 4, Requests: 5, SyncMs: 6, AsyncMs: 7}}},
		"checkpoint-log": {kindCheckpoint, &Checkpoint{Number: 13, Phase: CheckpointCompleted, Changelog: true, LogOpen: true, Incarnation: 2, KeyGroups: 128, Shards: 4,
			CreatedMs: 1_700_000_000_000, UpdatedMs: 1_700_000_000_002, EndedMs: 1_700_000_000_002, TimeoutMs: 60000, MetadataSHA256: sumOf("metadata"), MetadataSize: 700}},
		"checkpoint-shard-log": {kindCheckpointShard, &CheckpointShard{Checkpoint: 13, Group: 3, Birth: 7, Epoch: 4, Lo: 0, Hi: 64, Uploader: "n2", Attempt: 21, Prior: 17, PriorObjects: 2,
			State: CheckpointShardUploaded, UpdatedMs: 1_700_000_000_001, Objects: 1, UseParts: 1, Report: &ShardReport{Index: 19, Term: 2, Sequence: 18, ClockMs: 17,
				ManifestKey: "00ff/" + sumOf("manifest").String() + ".21", ManifestSHA256: sumOf("manifest"), ManifestSize: 300,
				FullBytes: 11, NewBytes: 2, Files: 3, NewFiles: 4, Requests: 5, BaseIndex: 9, LogBytes: 10, Segments: 3}}},
		"checkpoint-uses": {kindCheckpointUses, &objectUse{Checkpoint: 12, Group: 3, Part: 1, Objects: []uint64{3 << objectPlaceBits, 17<<objectPlaceBits + 1}}},
		"object": {kindObject, &Object{Number: 17 << objectPlaceBits, Key: "00ff/" + sumOf("pack").String() + ".17", Size: 100,
			Parts: []ObjectPart{{SHA256: sumOf("a"), Length: 60}, {SHA256: sumOf("b"), Offset: 60, Length: 40}}}},
		"delete-plan": {kindDeletePlan, &DeletePlan{ID: 5, Keys: []string{"00ff/checkpoints/0000000012/_metadata", "00ff/" + sumOf("pack").String() + ".17"}, CreatedMs: 1_700_000_000_003, Why: "checkpoint 12"}},
		"rollback-shard": {kindRollbackShard, &RollbackShard{Operation: 9, Group: 3, Epoch: 5, Bytes: 700, State: RollbackShardFenced,
			Prepared: []base.ReplicaID{"n1.1", "n2.4"}, Problem: "node n3: the object store is away", UpdatedMs: 1_700_000_000_004}},
		"participant":            {kindParticipant, &Participant{ID: "flights", Number: 3, Session: 1<<64 - 2, RegisteredMs: 1_700_000_000_005, Since: 4}},
		"checkpoint-participant": {kindPosition, &Position{Checkpoint: 12, Participant: "flights", Registration: 3, Session: 1<<64 - 2, Given: true, Bytes: []byte("row 4711"), UpdatedMs: 1_700_000_000_006}},
		"restored-position":      {kindRestoredPosition, &RestoredPosition{Participant: "flights", Cluster: "00ff", Checkpoint: 12, Incarnation: 3, Bytes: []byte("row 4711")}},
	}
}

func TestRecordGolden(t *testing.T) {
	for name, r := range goldenRecords() {
		b, err := encode(r.kind, r.rec)
		if err != nil {
			t.Fatal(err)
		}
		stored := readGolden(t, "testdata/golden/v1/"+name+".json", b)
		back := reflect.New(reflect.TypeOf(r.rec).Elem()).Interface()
		if err := decode(r.kind, stored, back); err != nil || !reflect.DeepEqual(back, r.rec) {
			t.Errorf("%s: read %+v, %v, want %+v", name, back, err, r.rec)
		}
	}
}

func TestRecordOfAnotherVersionIsNotCorrupt(t *testing.T) {
	for name, r := range goldenRecords() {
		b, _ := encode(r.kind, r.rec)
		back := reflect.New(reflect.TypeOf(r.rec).Elem()).Interface()
		for _, newer := range []string{
			strings.Replace(string(b), `"v":1`, `"v":2`, 1),
			`{"v":2,"anything":["else"]}`,
		} {
			if err := decode(r.kind, []byte(newer), back); !errors.Is(err, base.ErrFormatVersion) || errors.Is(err, base.ErrCorrupt) {
				t.Errorf("%s: %v, want ErrFormatVersion", name, err)
			}
		}
	}
}

func TestDamagedRecordIsCorrupt(t *testing.T) {
	for name, r := range goldenRecords() {
		b, _ := encode(r.kind, r.rec)
		bad := []string{
			strings.Replace(string(b), `"data":{`, `"data":{"unknown":1,`, 1),
			strings.Replace(string(b), `"v":1`, `"v":1,"unknown":1`, 1),
			strings.Replace(string(b), `"v":1`, `"v":0`, 1),
			strings.Replace(string(b), `"v":1`, `"v":-1`, 1),
			strings.Replace(string(b), `"kind":"`, `"kind":"x`, 1),
			string(b) + "{}", `{"v":1}`, `null`, `{"v":1,"kind":"` + r.kind + `","data":null}`, string(make([]byte, MaxRecordBytes+1)),
		}
		for n := range b {
			bad = append(bad, string(b[:n]))
		}
		for _, x := range bad {
			back := reflect.New(reflect.TypeOf(r.rec).Elem()).Interface()
			if err := decode(r.kind, []byte(x), back); !errors.Is(err, base.ErrCorrupt) {
				t.Errorf("%s as %.80q: %v, want ErrCorrupt", name, x, err)
			}
		}
	}
}

// A view refuses what it cannot read, by name of the key, and a mirror recovers
// once the record was mended.
func TestViewRefusesUnreadableMetadata(t *testing.T) {
	good, _ := encode(kindSession, Session{ID: 1, LeaseMs: 1000, ExpiresMs: 1})
	for key, want := range map[string]*base.Sentinel{
		"meta/future/x":                          base.ErrFormatVersion,
		"meta/future/0000000000000001":           base.ErrFormatVersion,
		"meta/session/1":                         base.ErrCorrupt,
		"meta/session/0000000000000002":          base.ErrCorrupt,
		"meta/session/000000000000000G":          base.ErrCorrupt,
		"meta/node/0000000000000001":             base.ErrCorrupt,
		"meta/cluster":                           base.ErrCorrupt,
		"meta/":                                  base.ErrFormatVersion,
		"meta/checkpoint/1":                      base.ErrCorrupt,
		"meta/object/0000000000000001":           base.ErrCorrupt,
		"meta/checkpoint-shard/0000000000000001": base.ErrCorrupt,
		"meta/checkpoint-shard/0000000000000001/0000000000000001/0000000000000001": base.ErrCorrupt,
		"meta/checkpoint-shard/0000000000000001/0000000000000001":                  base.ErrCorrupt,
		"meta/checkpoint-uses/0000000000000001/0000000000000001/1":                 base.ErrCorrupt,
		"meta/delete-plan/":                                     base.ErrCorrupt,
		"meta/rollback-shard/0000000000000001":                  base.ErrCorrupt,
		"meta/rollback-shard/0000000000000001/0000000000000001": base.ErrCorrupt,
	} {
		w := founded(t)
		w.view()
		w.do(broadcast.Txn{Then: []broadcast.Op{broadcast.Put(key, good)}}, nil)
		for range 2 {
			if _, err := w.mirror.View(); !errors.Is(err, want) || !strings.Contains(err.Error(), key) {
				t.Errorf("%s: %v, want %v", key, err, want)
			}
		}
		if key == "meta/session/1" || key == "meta/session/0000000000000002" {
			w.do(broadcast.Txn{Then: []broadcast.Op{broadcast.Delete(key)}}, nil)
			w.view()
		}
	}
}

func FuzzDecodeRecord(f *testing.F) {
	kinds := map[string]any{}
	for _, r := range goldenRecords() {
		b, _ := encode(r.kind, r.rec)
		f.Add(r.kind, b)
		kinds[r.kind] = r.rec
	}
	f.Fuzz(func(t *testing.T, kind string, b []byte) {
		like, ok := kinds[kind]
		if !ok {
			return
		}
		rec := reflect.New(reflect.TypeOf(like).Elem()).Interface()
		if decode(kind, b, rec) != nil {
			return
		}
		again, err := encode(kind, rec)
		if err != nil {
			if errors.Is(err, base.ErrTooLarge) || errors.Is(err, base.ErrInvalid) {
				return
			}
			t.Fatal(err)
		}
		back := reflect.New(reflect.TypeOf(like).Elem()).Interface()
		if err := decode(kind, again, back); err != nil {
			t.Fatalf("%s read from %q, written as %q: %v", kind, b, again, err)
		}
		third, err := encode(kind, back)
		if err != nil || !bytes.Equal(again, third) {
			t.Fatalf("%q became %q, %v", again, third, err)
		}
	})
}
