package crashtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestCrashLostDirectories takes from a node that is down all or a part of its
// directory. Another disk under its id is refused, and says so (B08); a part is
// rebuilt from the others.
func TestCrashLostDirectories(t *testing.T) {
	r := seeded(t)
	engines := []string{"rocks", "mem"}
	if !*long { // both take a minute
		engines = engines[r.IntN(2):][:1]
	}
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			c := newNodes(t, engine)
			c.found(4)
			s := declare(t, c.client())
			count(t, s, 200)
			want := int64(200)
			for _, part := range []string{"raftlog", "groups", "raftlog groups"} {
				i := r.IntN(len(c.n))
				t.Logf("%s loses %s", c.n[i].id, part)
				c.kill(i)
				for _, p := range strings.Fields(part) {
					gone := filepath.Join(c.n[i].dir, p)
					if _, err := os.Stat(gone); err != nil {
						t.Fatal(err)
					}
					if err := os.RemoveAll(gone); err != nil {
						t.Fatal(err)
					}
				}
				c.start(i)
				count(t, s, 100)
				want += 100
				c.healthy()
				c.agree()
				if got := total(t, s); got != want {
					t.Fatalf("sum %d, want %d", got, want)
				}
			}
			c.wipe(r.IntN(len(c.n)), s)
			want += 100
			if got := total(t, s); got != want {
				t.Fatalf("sum %d, want %d", got, want)
			}
		})
	}
}

// wipe gives a node an empty disk, and later its own one again.
func (c *nodes) wipe(i int, s *states) {
	c.t.Helper()
	n := c.n[i]
	c.kill(i)
	if err := os.Rename(n.dir, n.dir+".kept"); err != nil {
		c.t.Fatal(err)
	}
	c.start(i)
	count(c.t, s, 100)
	eventually(c.t, "the refusal is in the log of the node or of another", func() error {
		for j := range c.n {
			if c.logHas(j, "bound to another") {
				return nil
			}
		}
		return errors.New("nobody said it")
	})
	// The others name it as a problem; it is no member that answers.
	out, err := c.ctl("cluster", "status", "-o", "json")
	if err == nil {
		c.t.Errorf("the status is healthy beside a wiped node: %s", out)
	}
	// The same empty node cannot be founded anew under the others' eyes either.
	if _, err := c.ctl(c.initArgs(7)...); err == nil {
		c.t.Error("a second, different init was accepted")
	}
	c.kill(i)
	if err := os.RemoveAll(n.dir); err != nil {
		c.t.Fatal(err)
	}
	if err := os.Rename(n.dir+".kept", n.dir); err != nil {
		c.t.Fatal(err)
	}
	c.start(i)
	c.healthy()
	c.agree()
}

// TestCrashDuringFounding kills nodes while init runs, several inits at once,
// and repeats it until it is done.
func TestCrashDuringFounding(t *testing.T) {
	rounds := 2
	if *long {
		rounds = 15
	}
	for round := range rounds {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			r := seeded(t)
			c := newNodes(t, []string{"rocks", "mem"}[round%2])
			var wg sync.WaitGroup
			for range 4 { // all at the same node: each shows or resumes the one founding
				wg.Add(1)
				go func() {
					defer wg.Done()
					_, err := c.ctl(append(c.initArgs(4), "--timeout", "5s")...)
					t.Logf("init: %v", err)
				}()
			}
			for range 3 {
				pause(t.Context(), time.Duration(r.IntN(700))*time.Millisecond)
				i := r.IntN(len(c.n))
				c.kill(i)
				c.start(i)
			}
			wg.Wait()
			c.found(4)
			s := declare(t, c.client())
			count(t, s, 60)
			if got := total(t, s); got != 60 {
				t.Errorf("sum %d, want 60", got)
			}
			c.agree()
		})
	}
}
