package check

import (
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/history"
)

func TestHashes(t *testing.T) {
	h := func(shard uint64, node string, applied uint64, hash string) ReplicaHash {
		return ReplicaHash{shard, node, applied, hash}
	}
	cases := map[string]struct {
		shards []uint64
		seen   []ReplicaHash
		want   Verdict
	}{
		"agree":              {[]uint64{1}, []ReplicaHash{h(1, "a", 5, "x"), h(1, "b", 5, "x"), h(1, "c", 5, "x")}, Pass},
		"differ":             {[]uint64{1}, []ReplicaHash{h(1, "a", 5, "x"), h(1, "b", 5, "x"), h(1, "c", 5, "y")}, Fail},
		"different indexes":  {[]uint64{1}, []ReplicaHash{h(1, "a", 5, "x"), h(1, "b", 6, "y"), h(1, "c", 5, "x")}, Unknown},
		"caught up later":    {[]uint64{1}, []ReplicaHash{h(1, "a", 5, "x"), h(1, "b", 6, "y"), h(1, "c", 6, "y"), h(1, "a", 6, "y")}, Pass},
		"one node thrice":    {[]uint64{1}, []ReplicaHash{h(1, "a", 5, "x"), h(1, "a", 5, "x"), h(1, "a", 5, "x")}, Unknown},
		"a shard is missing": {[]uint64{1, 2}, []ReplicaHash{h(1, "a", 5, "x"), h(1, "b", 5, "x"), h(1, "c", 5, "x")}, Unknown},
		"changes with time":  {[]uint64{1}, []ReplicaHash{h(1, "a", 5, "x"), h(1, "a", 5, "y")}, Fail},
		"nothing":            {nil, nil, Unknown},
	}
	for name, c := range cases {
		if res := Hashes(c.shards, 3, c.seen); res.Verdict != c.want {
			t.Errorf("%s: %v, want %v: %s", name, res.Verdict, c.want, res.Text)
		}
	}
}

func TestLiveness(t *testing.T) {
	good := Healed{Shard: 1, Led: time.Second, Wrote: 2 * time.Second, Read: 0, Replicas: 29 * time.Second}
	late, never := good, good
	late.Replicas, never.Wrote = 31*time.Second, -1
	if res := Liveness([]Healed{good}, 0); res.Verdict != Pass {
		t.Error(res.Text)
	}
	if res := Liveness([]Healed{good, late}, 0); res.Verdict != Fail || !strings.Contains(res.Text, "replicas") {
		t.Error(res.Text)
	}
	if res := Liveness([]Healed{never}, 0); res.Verdict != Fail || !strings.Contains(res.Text, "takes no write") {
		t.Error(res.Text)
	}
	if res := Liveness([]Healed{late}, time.Minute); res.Verdict != Pass {
		t.Error(res.Text)
	}
	if res := Liveness(nil, 0); res.Verdict != Unknown {
		t.Error(res.Text)
	}
}

// CK3.
func TestCombine(t *testing.T) {
	for _, c := range []struct {
		in   []Verdict
		want Verdict
	}{
		{nil, Unknown}, {[]Verdict{Pass}, Pass}, {[]Verdict{Pass, Unknown}, Unknown}, {[]Verdict{Unknown, Fail, Pass}, Fail},
		{[]Verdict{Unknown, Pass}, Unknown}, {[]Verdict{"strange", Pass}, Unknown},
	} {
		if got := Combine(c.in...); got != c.want {
			t.Errorf("%v: %v, want %v", c.in, got, c.want)
		}
	}
}

// Judge parts a history by workload and knows all of them.
func TestJudge(t *testing.T) {
	h := &history.History{}
	for _, w := range worlds {
		ops := w.generate(rng(7), 3, 60, 12)
		if w.checker.Name() == "map" && len(h.Ops) > 0 && h.Ops[len(h.Ops)-1].Workload == "map" {
			continue
		}
		for _, op := range ops {
			op.Workload, op.Process, op.ID = w.checker.Name(), op.Process+int64(len(h.Workloads()))<<42, int64(len(h.Ops)+1)
			h.Ops = append(h.Ops, *op)
		}
	}
	h.Ops = append(h.Ops, history.Op{Workload: "other", Outcome: history.OK, Process: -99})
	var got []string
	for _, res := range Judge(h, Options{}) {
		got = append(got, res.Name+" "+string(res.Verdict))
	}
	if want := "bank pass,counter pass,list pass,map pass,other unknown,register pass,session pass"; strings.Join(got, ",") != want {
		t.Errorf("%s, want %s", strings.Join(got, ","), want)
	}
}

// CK3: a workload that was wanted and is not in the history has not passed.
func TestJudgeMissesWhatIsWanted(t *testing.T) {
	h := &history.History{Ops: []history.Op{{ID: 1, Process: 1, Workload: "register", F: "read", Key: "k", Invoke: 1, Return: 2, Outcome: history.OK}}}
	got := Judge(h, Options{}, "register", "bank")
	if len(got) != 2 || got[0].Name != "bank" || got[0].Verdict != Unknown || got[1].Verdict != Pass {
		t.Errorf("%+v", got)
	}
}

// CK3: acknowledged writes that nobody ever looks at prove nothing, whatever the
// workload.
func TestUnseenWritesProveNothing(t *testing.T) {
	for _, w := range worlds {
		var writes, all []*history.Op
		for _, op := range w.generate(rng(3), 3, 60, 0) {
			all = append(all, op)
			if !looks(op) {
				writes = append(writes, op)
			}
		}
		if res := w.checker.Check(all, Options{}); res.Verdict != Pass {
			t.Errorf("%s with reads: %s: %s", res.Name, res.Verdict, res.Text)
		}
		if res := w.checker.Check(writes, Options{}); len(writes) == 0 || res.Verdict != Unknown {
			t.Errorf("%s without reads: %s: %s", res.Name, res.Verdict, res.Text)
		}
	}
}

// A failure is kept whatever else there is to say.
func TestDetailsAreBounded(t *testing.T) {
	j := &judge{}
	for range 100 {
		j.undecided("k", nil, "not known")
	}
	j.fail("k", nil, "wrong")
	j.finish()
	if len(j.Details) != maxDetails || j.Verdict != Fail || !strings.Contains(j.Text, "wrong") {
		t.Errorf("%d details, %v, %s", len(j.Details), j.Verdict, j.Text)
	}
}
