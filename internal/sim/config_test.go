package sim

import (
	"reflect"
	"testing"
	"time"
)

// TestDraw: a seed draws the same run each time, within what a cluster can be.
func TestDraw(t *testing.T) {
	for _, kind := range []Kind{Storms, Days, Mixed, Weeks, Squalls, Rollbacks} {
		for seed := range uint64(200) {
			c, err := Draw(kind, seed, 2*time.Hour)
			again, _ := Draw(kind, seed, 2*time.Hour)
			if err != nil || !reflect.DeepEqual(c, again) {
				t.Fatalf("%s %d: %+v, %+v, %v", kind, seed, c, again, err)
			}
			if c.Replication > c.Nodes || c.Shards < 1 || c.Round > c.Time || c.Rate <= 0 || c.AtOnce < 1 {
				t.Fatalf("%s %d: %+v", kind, seed, c)
			}
			// Two elections fit into the limit of healing, or a split vote fails a run.
			if 2*2*c.ElectionTimeout > 30*time.Second {
				t.Fatalf("%s %d: nobody heals in time with an election timeout of %v", kind, seed, c.ElectionTimeout)
			}
		}
	}
	storm, _ := Draw(Storms, 1, time.Hour)
	day, _ := Draw(Days, 1, time.Hour)
	if mixed, _ := Draw(Mixed, 1, time.Hour); !reflect.DeepEqual(mixed, storm) && !reflect.DeepEqual(mixed, day) {
		t.Fatalf("a mixed run is neither a storm nor a day: %+v", mixed)
	}
	if _, err := Draw("hurricanes", 1, time.Hour); err == nil {
		t.Fatal("a kind that there is not was drawn")
	}
}
