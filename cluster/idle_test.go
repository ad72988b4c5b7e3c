package cluster

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestIdlePace: what a node does when nothing happens follows its timeouts, within
// bounds, and with the default options it is what it always was.
func TestIdlePace(t *testing.T) {
	var o Options
	o.EnsureDefaults()
	if o.CommitTimeout != 50*time.Millisecond || pingInterval(o.ElectionTimeout) != time.Second {
		t.Errorf("by default: commits after %v, pings every %v", o.CommitTimeout, pingInterval(o.ElectionTimeout))
	}
	o = Options{ElectionTimeout: 2 * time.Second, CommitTimeout: time.Second}
	o.EnsureDefaults()
	if o.CommitTimeout != time.Second {
		t.Errorf("a commit timeout that was given became %v", o.CommitTimeout)
	}
	for election, want := range map[time.Duration]time.Duration{
		20 * time.Millisecond: time.Second, time.Second: time.Second, 3 * time.Second: 3 * time.Second, time.Minute: 5 * time.Second,
	} {
		if got := pingInterval(election); got != want {
			t.Errorf("pings every %v with an election timeout of %v, want %v", got, election, want)
		}
	}
	for check, want := range map[time.Duration]time.Duration{time.Second: 2 * time.Second, 5 * time.Second: 5 * time.Second, time.Hour: liveLimit / 4} {
		if got := pulsePace(check); got != want {
			t.Errorf("pulses every %v with looks every %v, want %v", got, check, want)
		}
	}
}

// TestReplacedFilesAreLookedForUntilGone: a look that finds no older files, or
// removes all of them, is the last; one that fails is not.
func TestReplacedFilesAreLookedForUntilGone(t *testing.T) {
	parent := t.TempDir()
	r := &replica{generation: 3, dir: filepath.Join(parent, "3")}
	r.logger = slog.New(slog.DiscardHandler)
	r.node = &Node{remover: newTestRemover(t, t.TempDir(), false)}
	for _, d := range []string{"1" + replacedSuffix, "2", "3", "4", "other"} {
		if err := os.MkdirAll(filepath.Join(parent, d, "store-1"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if !r.removeReplaced() {
		t.Error("all were removed, and it looks on")
	}
	names, err := dirNames(parent)
	if err != nil || len(names) != 3 || names[0] != "3" || names[1] != "4" || names[2] != "other" {
		t.Errorf("left: %v, %v", names, err)
	}
	r.dir = filepath.Join(parent, "missing", "3")
	if r.removeReplaced() {
		t.Error("a look that failed is taken for one that found nothing")
	}
}
