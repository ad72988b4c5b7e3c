package lint

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Each rule must be able to fail: what it is there to catch is shown to it here.

func parse(t *testing.T, rel, text string) sourceFile {
	t.Helper()
	s, err := parseSource(rel, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestRuleEdges(t *testing.T) {
	in := func(file, target string) edge {
		return edge{file: file, from: filepath.Dir(file), target: target, inside: true}
	}
	out := func(file, target string) edge { return edge{file: file, from: filepath.Dir(file), target: target} }
	for _, tc := range []struct {
		e   edge
		bad bool
	}{
		{in("cmd/node/main.go", "engine/rocks"), false},
		{in("bench/apply/x.go", "engine/rocks"), false},
		{in("raftfsm/x.go", "engine/rocks"), true},
		{in("cluster/x.go", "engine/rocks"), true},
		{in("engine/rocks/a.go", "engine/internal/durable"), false},
		{in("engine/state/a.go", "engine"), false},
		{in("engine/a.go", "raftfsm"), true},
		{in("cluster/x.go", "cluster/gossip"), true},
		{in("cluster/x.go", "raftfsm"), false},
		{in("cluster/x.go", "api/keelstatepb"), true},
		{in("cluster/x.go", "client"), true},
		{in("client/x.go", "cluster"), true},
		{in("client/x.go", "raftfsm"), true},
		{in("client/keeltest/x.go", "raftfsm"), false},
		{in("api/server/x.go", "cluster"), false},
		{in("api/server/x.go", "engine"), true},
		{in("api/server/x.go", "engine/state"), false},
		{in("broadcast/x.go", "raftfsm"), true},
		{in("broadcast/meta/x.go", "broadcast"), false},
		{in("keygroup/x.go", "engine"), true},
		{in("internal/base/x.go", "keygroup"), true},
		{in("snapshot/x.go", "raftfsm"), true},
		{in("cmd/keelctl/x.go", "cluster"), true},
		{in("examples/flights/x.go", "engine/mem"), true},
		{in("raftfsm/x.go", "internal/testcluster"), true},
		{out("cluster/x.go", "github.com/hashicorp/raft"), false},
		{out("cluster/raftlog/x.go", "github.com/hashicorp/raft"), false},
		{out("raftfsm/raftadapter.go", "github.com/hashicorp/raft"), false},
		{out("raftfsm/apply.go", "github.com/hashicorp/raft"), true},
		{out("api/server/x.go", "github.com/hashicorp/raft"), true},
		{out("cluster/x.go", "google.golang.org/grpc/codes"), true},
		{out("cluster/transport/x.go", "google.golang.org/grpc"), false},
		{out("bench/ksbench/x.go", "google.golang.org/grpc"), false},
		{out("raftfsm/x.go", "google.golang.org/protobuf/proto"), true},
		{out("engine/mem/x.go", "github.com/linxGnu/grocksdb"), true},
		{out("engine/rocks/x.go", "github.com/linxGnu/grocksdb"), false},
		{out("cluster/x.go", "github.com/hashicorp/memberlist"), true},
		{out("snapshot/x.go", "github.com/minio/minio-go/v7"), true},
		{out("client/x.go", "github.com/spf13/cobra"), true},
	} {
		if bad := checkEdges([]edge{tc.e}); (len(bad) > 0) != tc.bad {
			t.Errorf("%s imports %s: %v; want bad = %v", tc.e.file, tc.e.target, bad, tc.bad)
		}
	}
}

func TestRulePure(t *testing.T) {
	for text, bad := range map[string]int{
		"package p\nimport \"time\"\nvar d time.Duration = time.Second\n":                   0,
		"package p\nimport \"time\"\nvar d = time.Now()\n":                                  1,
		"package p\nimport clock \"time\"\nvar d = clock.Since\n":                           1,
		"package p\nimport . \"time\"\n":                                                    1,
		"package p\nimport \"math/rand/v2\"\nvar _ = rand.Int\n":                            1,
		"package p\nimport (\"os\"; \"net/netip\")\n":                                       2,
		"package p\nfunc f() { go f() }\n":                                                  1,
		"package p\nimport \"sync\"\nvar mu sync.Mutex\nfunc f() { func() { go f() }() }\n": 1,
	} {
		if got := checkPure(parse(t, "p/x.go", text)); len(got) != bad {
			t.Errorf("%q: %v; want %d", text, got, bad)
		}
	}
}

func TestRuleSleeps(t *testing.T) {
	head := "package p\nimport (\"testing\"; \"testing/synctest\"; \"time\")\n"
	for text, bad := range map[string]int{
		head + "func TestX(t *testing.T) { time.Sleep(time.Second) }\n":                                    1,
		head + "func TestX(t *testing.T) { synctest.Test(t, func(t *testing.T) { time.Sleep(1) }) }\n":     0,
		head + "func TestX(t *testing.T) { t.Run(\"a\", func(t *testing.T) { f := time.Sleep; f(1) }) }\n": 1,
		"package p\nimport w \"time\"\nfunc f() { w.Sleep(1) }\n":                                          1,
		"package p\nimport \"example.test/time2\"\nfunc f() { time2.Sleep(1) }\n":                          0,
		head + "func TestX(t *testing.T) { synctest.Test(t, func(t *testing.T) {}); time.Sleep(1) }\n":     1,
	} {
		if got := findSleeps(parse(t, "p/x_test.go", text)); len(got) != bad {
			t.Errorf("%q: %v; want %d", text, got, bad)
		}
	}
}

func TestRuleWallClock(t *testing.T) {
	head := "package p\nimport \"time\"\n"
	for text, bad := range map[string]int{
		head + "func f() int64 { return time.Now().UnixNano() }\n":                                1,
		head + "func f(t time.Time) (int64, time.Time) { return t.UnixMilli(), time.Unix(0, 1) }": 2,
		head + "func f(t time.Time) time.Time { return t.Round(0) }\n":                            1,
		head + "func f(d time.Duration) time.Duration { return d.Round(time.Second) }\n":          0,
		head + "func f(t time.Time) time.Duration { return time.Since(t) }\n":                     0,
	} {
		if got := findWallClock(parse(t, "cluster/gossip/x.go", text)); len(got) != bad {
			t.Errorf("%q: %v; want %d", text, got, bad)
		}
		for _, other := range []string{"cluster/x_test.go", "jepsen/x.go"} {
			if got := findWallClock(parse(t, other, text)); len(got) != 0 {
				t.Errorf("%s is under the rule: %v", other, got)
			}
		}
	}
}

func TestRuleSkips(t *testing.T) {
	s := parse(t, "p/x_test.go", `package p
import ("testing"; "pgregory.net/rapid")
func TestA(t *testing.T) { t.Skip("no") }
func TestB(t *testing.T) { t.Run("x", func(s *testing.T) { s.SkipNow() }) }
func TestC(t *testing.T) { rapid.Check(t, func(t *rapid.T) { t.Skip() }) }
func TestD(t *testing.T) { rapid.Check(t, func(r *rapid.T) { t.Skipf("%d", 1) }) }
func helper(tb testing.TB) { tb.Skip() }
func other(p *parser) { p.Skip() }
type h struct{ t *testing.T }
func (h h) hop() { h.t.Skip() }
`)
	calls := findSkips(s)
	var got []string
	for _, c := range calls {
		got = append(got, c.function)
	}
	if want := "TestA TestB TestD helper hop"; strings.Join(got, " ") != want {
		t.Errorf("skips found in %v, want %s", got, want)
	}
	allowed := map[string]string{"p/x_test.go TestA": "r", "p/x_test.go TestB": "r", "p/x_test.go helper": "r", "p/x_test.go Gone": "r"}
	bad := strings.Join(checkAllowed("skips", "the list", calls, allowed), "\n")
	for _, want := range []string{"TestD", "hop", "Gone"} {
		if !strings.Contains(bad, want) {
			t.Errorf("%s is not reported in\n%s", want, bad)
		}
	}
	if strings.Count(bad, "\n") != 2 {
		t.Errorf("too much is reported:\n%s", bad)
	}
}

func TestAllowedSkipsNeedReasons(t *testing.T) {
	path := filepath.Join(t.TempDir(), "allowed.txt")
	for text, ok := range map[string]bool{
		"# comment\n\na_test.go TestX: because\n": true,
		"a_test.go TestX\n":                       false,
		"a_test.go TestX:  \n":                    false,
		"a_test.go: because\n":                    false,
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got, err := readAllowed(path); (err == nil) != ok {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

func TestRuleHosts(t *testing.T) {
	for text, bad := range map[string]int{
		"GOPROXY=https://proxy" + ".golang.org,direct\n":                                   1,
		"a\ndeb http://deb" + ".debian.org/debian x\nFROM docker" + ".io/library/debian\n": 2,
		"see https://registry" + ".npmjs.org/x":                                            1,
		"import \"google.golang.org/grpc\" // pkg.go.dev":                                  0,
		"github.com/keelstate/keelstate":                                                   0,
	} {
		if got := checkHosts("f", []byte(text)); len(got) != bad {
			t.Errorf("%q: %v; want %d", text, got, bad)
		}
	}
}

func TestRuleDependencies(t *testing.T) {
	rows, err := readDependencies("# D\n| module | licence | reason |\n|---|---|---|\n| `a.b/c` | MIT | for x |\n| `a.b/d` | AGPL-3.0 |  |\n| `a.b/d` | MIT | x |\n| `gone.x/y` | MIT | x |\n")
	if err != nil || len(rows) != 4 {
		t.Fatalf("%v, %v", rows, err)
	}
	bad := strings.Join(checkDependencies(map[string]bool{"a.b/c": true, "new.x/y": true}, map[string]bool{"a.b/c": true, "a.b/d": true}, rows), "\n")
	for _, want := range []string{"a.b/d has the licence", "a.b/d is listed without", "a.b/d is listed twice", "gone.x/y", "new.x/y"} {
		if !strings.Contains(bad, want) {
			t.Errorf("%q is not reported in\n%s", want, bad)
		}
	}
	if strings.Count(bad, "\n") != 4 {
		t.Errorf("too much is reported:\n%s", bad)
	}
	if _, err := readDependencies("| `a.b/c` | MIT |\n"); err == nil {
		t.Error("a row without a reason cell is read")
	}
}

func TestRuleLicenceFiles(t *testing.T) {
	dir := t.TempDir()
	if bad, err := checkLicenceFiles("m", dir); err != nil || len(bad) != 1 {
		t.Errorf("no licence file: %v, %v", bad, err)
	}
	write := func(text string) {
		if err := os.WriteFile(filepath.Join(dir, "LICENSE.txt"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("                    GNU Affero General Public License\n Version 3")
	if bad, err := checkLicenceFiles("m", dir); err != nil || len(bad) != 1 {
		t.Errorf("AGPL: %v, %v", bad, err)
	}
	write("MIT License")
	if bad, err := checkLicenceFiles("m", dir); err != nil || len(bad) != 0 {
		t.Errorf("MIT: %v, %v", bad, err)
	}
}
