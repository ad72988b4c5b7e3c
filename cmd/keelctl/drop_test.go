package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/client/keeltest/cluster"
)

// A drop says first what it takes away; --dry-run says it and drops nothing.
func TestDropHasAPlan(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1, Shards: 2})
	on := c.Endpoints()[0]
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	client := c.Client()
	space := client.Keyspace("k", keel.String.Type())
	for name, keys := range map[string]int{"empty": 0, "one": 1, "many": planKeys + 1} {
		v, err := keel.DeclareValue(ctx, space, name, keel.String)
		if err != nil {
			t.Fatal(err)
		}
		b := client.Batch()
		for i := range keys {
			b.Add(v.SetOp(fmt.Sprint(i), "x"))
		}
		if keys > 0 {
			if _, err := b.Commit(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, tc := range []struct {
		name string
		keys int
		more bool
		text string
	}{{"empty", 0, false, "holds 0 keys"}, {"one", 1, false, "holds 1 key in"}, {"many", planKeys, true, "holds more than 1000 keys"}} {
		code, stdout, stderr := keelctl(on, "state", "drop", "k", tc.name, "--dry-run", "-o", "json")
		var plan struct {
			Kind, Name, StateKind string
			Shards, Keys          int
			More                  bool
		}
		if err := json.Unmarshal([]byte(stdout), &plan); err != nil || code != exitDone {
			t.Fatalf("exit %d, %v, %q, %s", code, err, stdout, stderr)
		}
		if plan.Kind != "DropPlan" || plan.Name != tc.name || plan.StateKind != "value" || plan.Shards != 2 || plan.Keys != tc.keys || plan.More != tc.more {
			t.Errorf("the plan for %s is %+v", tc.name, plan)
		}
		// Without a terminal and without --yes the plan is shown, and that is all.
		code, _, stderr = keelctl(on, "state", "drop", "k", tc.name)
		if code != exitUsage || !strings.Contains(stderr, tc.text) || !strings.Contains(stderr, "--yes") {
			t.Errorf("without --yes: exit %d, %s", code, stderr)
		}
		if code, _, stderr = keelctl(on, "keys", "k", tc.name); code != exitDone {
			t.Errorf("%s is gone: %s", tc.name, stderr)
		}
		code, stdout, stderr = keelctl(on, "state", "drop", "k", tc.name, "--yes")
		if code != exitDone || !strings.Contains(stderr, tc.text) || strings.Contains(stdout, "plan") {
			t.Errorf("with --yes: exit %d, %q, %s", code, stdout, stderr)
		}
		if code, _, _ = keelctl(on, "keys", "k", tc.name); code != exitNotFound {
			t.Errorf("%s is still there: exit %d", tc.name, code)
		}
	}
}

// A state whose keys could not be counted is not called empty.
func TestPlanWithoutACountSaysSo(t *testing.T) {
	p := &dropPlan{decl: keel.Declaration{Keyspace: "k", Name: "v", Kind: keel.KindValue}, shards: 2, keys: 7}
	if !strings.Contains(p.String(), "unknown number") || strings.Contains(p.String(), "7") {
		t.Error(p)
	}
	b, err := json.Marshal(p.record())
	if err != nil || !strings.Contains(string(b), `"keys":null,"more":null`) {
		t.Errorf("%s, %v", b, err)
	}
}
