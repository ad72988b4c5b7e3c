package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/client/keeltest/cluster"
)

// A participant is shown with what is kept for it, alive and gone, and forgotten only
// once it is gone, or by force; then its checkpoint is kept no longer than others.
func TestParticipantsAreShownAndForgotten(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1})
	ctl := func(want int, args ...string) (stdout, stderr string) {
		t.Helper()
		code, stdout, stderr := keelctl(c.Endpoints()[0], args...)
		if code != want {
			t.Fatalf("%q: exit %d, %s", args, code, stderr)
		}
		return stdout, stderr
	}
	type shown struct {
		Participant, Registered, RestoredCluster string
		Alive                                    bool
		Checkpoint, Bytes, Restored              *int
		Session, RegisteredMs                    any
	}
	list := func() (out []shown) {
		t.Helper()
		text, _ := ctl(exitDone, "participant", "list", "-o", "jsonl")
		for d := json.NewDecoder(strings.NewReader(text)); d.More(); {
			var s shown
			if err := d.Decode(&s); err != nil {
				t.Fatalf("%q: %v", text, err)
			}
			out = append(out, s)
		}
		return out
	}
	if got := list(); len(got) != 0 {
		t.Fatalf("%+v before anybody is registered", got)
	}
	_, stderr := ctl(exitNotFound, "participant", "remove", "job", "--yes")
	if !strings.Contains(stderr, `no participant "job"`) {
		t.Errorf("removing nobody says %s", stderr)
	}

	k, err := keel.Open(t.Context(), c.Endpoints())
	if err != nil {
		t.Fatal(err)
	}
	p, err := k.Participate(t.Context(), "job")
	if err != nil {
		t.Fatal(err)
	}
	if got := list(); len(got) != 1 || got[0].Participant != "job" || !got[0].Alive || got[0].Checkpoint != nil || got[0].Restored != nil {
		t.Fatalf("registered: %+v", got)
	}
	given := make(chan error, 1)
	go func() {
		number, err := p.Next(t.Context())
		if err == nil {
			err = p.Ack(t.Context(), number, []byte("place"))
		}
		given <- err
	}()
	ctl(exitDone, "checkpoint", "create")
	if err := <-given; err != nil {
		t.Fatal(err)
	}
	if got := list(); len(got) != 1 || got[0].Checkpoint == nil || *got[0].Checkpoint != 1 || *got[0].Bytes != 5 {
		t.Fatalf("after a checkpoint: %+v", got)
	}
	ctl(exitUsage, "participant", "remove", "job")
	if _, stderr := ctl(exitRefused, "participant", "remove", "job", "--yes"); !strings.Contains(stderr, `"job" lives`) {
		t.Errorf("removing a living one says %s", stderr)
	}
	if err := k.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := list(); len(got) != 1 || got[0].Alive || *got[0].Checkpoint != 1 {
		t.Fatalf("after its session: %+v", got)
	}
	ctl(exitDone, "participant", "remove", "job", "--yes")
	if got := list(); len(got) != 0 {
		t.Fatalf("removed: %+v", got)
	}

	if _, err := c.Client().Participate(t.Context(), "other"); err != nil {
		t.Fatal(err)
	}
	words := bytes.Buffer{}
	run(context.Background(), []string{"__complete", "participant", "remove", "o"}, environment{stdin: strings.NewReader(""), stdout: &words, stderr: os.Stderr, patience: time.Minute,
		getenv: func(name string) (string, bool) { return c.Endpoints()[0], name == "KEELSTATE_ENDPOINTS" }})
	if !strings.HasPrefix(words.String(), "other\talive\n") {
		t.Errorf("completed with %q", words.String())
	}
	ctl(exitDone, "participant", "remove", "other", "--yes", "--force")
}
