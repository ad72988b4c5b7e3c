package cluster

import (
	"fmt"
	"testing"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/snapshot"
)

// A plan says of each source how it is taken over: files where the engine has them.
func TestPlanSaysHowSourcesAreTakenOver(t *testing.T) {
	quarter := func(i int) keygroup.Range {
		return keygroup.Range{Lo: keygroup.Group(4 * i), Hi: keygroup.Group(4*i + 4)}
	}
	for _, c := range []struct {
		engine string
		lo, hi int
		want   string
	}{
		{"rocks", 0, 16, "linked linked linked linked "},
		{"rocks", 2, 14, "linked linked clipped clipped "},
		{"rocks", 1, 3, "clipped "},
		{"mem", 0, 16, "linked copied copied copied "},
		{"mem", 3, 6, "clipped copied "},
	} {
		from := &snapshot.Checkpoint{Engine: c.engine}
		for i := range 4 {
			from.Shards = append(from.Shards, snapshot.Shard{Range: quarter(i)})
		}
		got := ""
		for _, s := range plannedShard(&meta.Shard{Lo: c.lo, Hi: c.hi}, from).Sources {
			got += fmt.Sprint(s.How, " ")
		}
		if got != c.want {
			t.Errorf("%s, [%d,%d): %q, want %q", c.engine, c.lo, c.hi, got, c.want)
		}
	}
}
