package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/client/keeltest/cluster"
	"github.com/keelstate/keelstate/internal/cliout"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"keelctl": main})
}

// keelctl runs one command line in this process.
func keelctl(endpoint string, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(context.Background(), args, environment{stdin: strings.NewReader(""), stdout: &out, stderr: &errs, patience: time.Minute,
		getenv: func(name string) (string, bool) {
			if name == "KEELSTATE_ENDPOINTS" {
				return endpoint, true
			}
			return "", false
		}})
	return code, out.String(), errs.String()
}

// leaves walks the command tree.
func leaves(c *cobra.Command) []*cobra.Command {
	if !c.HasSubCommands() {
		return []*cobra.Command{c}
	}
	var out []*cobra.Command
	for _, sub := range c.Commands() {
		if sub.Name() != "completion" && sub.Name() != "help" { // scripts for shells, and prose
			out = append(out, leaves(sub)...)
		}
	}
	return out
}

// lines gives every leaf command one line that works on the test's cluster, in
// the order in which they have to run.
var lines = [][]string{
	{"version"}, {"config", "explain"}, {"cluster", "status"}, {"node", "list"}, {"shard", "list"}, {"operation", "list"},
	{"operation", "show", "1"}, {"operation", "watch", "1"},
	{"state", "declare", "k", "v", "--kind", "value", "--value-type", "int64"},
	{"state", "declare", "k", "l", "--kind", "list"},
	{"state", "declare", "k", "m", "--kind", "map", "--value-type", "int64"},
	{"state", "declare", "k", "r", "--kind", "reducing", "--function", "sum", "--value-type", "int64"},
	{"state", "declare", "k", "a", "--kind", "aggregating", "--function", "mean", "--value-type", "int64"},
	{"state", "declare", "k", "gone", "--kind", "value"},
	{"state", "list"},
	{"state", "drop", "k", "gone", "--dry-run"}, {"state", "drop", "k", "gone", "--yes"},
	{"value", "set", "k", "v", "7", "--key", "x"}, {"value", "get", "k", "v", "--key", "x"},
	{"value", "cas", "k", "v", "8", "--key", "x", "--if-equal", "7"},
	{"list", "add", "k", "l", "one", "--key", "x"}, {"list", "add-all", "k", "l", "two", "", "--key", "x"}, {"list", "get", "k", "l", "--key", "x"},
	{"map", "put", "k", "m", "1", "--key", "x", "--user-key", "u"}, {"map", "put-all", "k", "m", "v", "2", "w", "3", "--key", "x"},
	{"map", "get", "k", "m", "--key", "x", "--user-key", "u"}, {"map", "contains", "k", "m", "--key", "x", "--user-key", "u"},
	{"map", "entries", "k", "m", "--key", "x"}, {"map", "keys", "k", "m", "--key", "x"}, {"map", "values", "k", "m", "--key", "x"},
	{"map", "is-empty", "k", "m", "--key", "x"}, {"map", "remove", "k", "m", "--key", "x", "--user-key", "u"},
	{"reducing", "add", "k", "r", "1", "2", "--key", "x"}, {"reducing", "get", "k", "r", "--key", "x"},
	{"aggregating", "add", "k", "a", "1", "2", "--key", "x"}, {"aggregating", "get", "k", "a", "--key", "x"},
	{"reducing", "add", "k", "r", "5", "--key", "x", "--namespace", "w1"},
	{"merge-namespaces", "k", "r", "--key", "x", "--namespace", "w", "--source", "w1", "--source-void"},
	{"keys", "k", "v"}, {"scan", "k", "m"},
	{"shard", "hash"}, {"shard", "snapshot", "1"}, {"shard", "compact", "1"}, {"shard", "scrub", "1"}, {"shard", "transfer", "1", "--to", "n1"},
	{"checkpoint", "create"}, {"checkpoint", "list"}, {"checkpoint", "show", "1"}, {"checkpoint", "verify", "1"},
	{"cluster", "init", "--nodes", "m1=m1:7000,m2=m2:7000", "--restore", "CLUSTER/latest", "--dry-run"},
	{"checkpoint", "rollback", "1", "--dry-run"}, {"checkpoint", "restore", "1", "--dry-run"}, {"checkpoint", "rollback", "1", "--yes"},
	{"participant", "list"}, {"participant", "remove", "job", "--yes"},
	{"checkpoint", "delete", "1", "--yes"},
	{"checkpoint", "create", "--savepoint"}, {"savepoint", "create"},
	{"list", "update", "k", "l", "z", "--key", "x"},
	{"value", "clear", "k", "v", "--key", "x"}, {"list", "clear", "k", "l", "--key", "x"}, {"map", "clear", "k", "m", "--key", "x"},
	{"reducing", "clear", "k", "r", "--key", "x"}, {"aggregating", "clear", "k", "a", "--key", "x"},
	{"cluster", "init", "--nodes", "n1=n1:7000", "--shards", "1", "--key-groups", "128"},
}

// KX2: every command obeys every output format, and every leaf has examples.
func TestEveryCommand(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1})
	participate(t, c)
	root := (&app{}).command()
	covered := make(map[string]bool)
	printed := make(map[string]map[string]bool) // the keys that each leaf printed
	formats := []string{"json", "yaml", "jsonl", "wide", "table"}
	for i, line := range lines {
		line = slices.Clone(line)
		for j := range line {
			if of, found := strings.CutPrefix(line[j], "CLUSTER/"); found {
				line[j] = clusterID(t, c.Endpoints()[0]) + "/" + of
			}
		}
		leaf, _, err := root.Find(line)
		if err != nil {
			t.Fatal(err)
		}
		covered[leaf.CommandPath()] = true
		// Each line runs once; the formats take turns, json first for each leaf.
		format := "json"
		if i%2 == 1 && slices.Contains([]string{"declare", "add"}, leaf.Name()) {
			format = formats[i%len(formats)]
		}
		code, stdout, stderr := keelctl(c.Endpoints()[0], append(slices.Clone(line), "-o", format)...)
		if code != exitDone {
			t.Fatalf("%q: exit %d, %s", line, code, stderr)
		}
		checkFormat(t, line, format, stdout)
		if format == "json" {
			noteKeys(t, printed, leaf.CommandPath(), stdout)
		}
		if readsOnly(line) { // the others must not run twice
			for _, format := range formats {
				if code, stdout, stderr := keelctl(c.Endpoints()[0], append(slices.Clone(line), "-o", format)...); code != exitDone {
					t.Fatalf("%q -o %s: exit %d, %s", line, format, code, stderr)
				} else {
					checkFormat(t, line, format, stdout)
				}
			}
		}
	}
	for _, leaf := range leaves(root) {
		path := strings.TrimPrefix(leaf.CommandPath(), "keelctl ")
		if known, seen := sorted(strings.Fields(columns[path])), sorted(slices.Collect(maps.Keys(printed[leaf.CommandPath()]))); len(seen) > 0 || len(known) == 0 {
			if !slices.Equal(known, seen) {
				t.Errorf("%s: columns has %v, it prints %v", path, known, seen)
			}
		}
		if !covered[leaf.CommandPath()] {
			t.Errorf("%s: no line of the test runs it", leaf.CommandPath())
		}
		if !strings.Contains(leaf.Example, leaf.CommandPath()) {
			t.Errorf("%s: no example", leaf.CommandPath())
		}
		if leaf.Short == "" {
			t.Errorf("%s: no description", leaf.CommandPath())
		}
	}
}

// participate registers the participant "job", whose session the rollback ends.
func participate(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	p, err := c.Client(keel.WithOneSession()).Participate(t.Context(), "job")
	if err != nil {
		t.Fatal(err)
	}
	go func() { // until the rollback
		for number, err := p.Next(t.Context()); err == nil; number, err = p.Next(t.Context()) {
			_ = p.Ack(t.Context(), number, []byte("here"))
		}
	}()
}

// clusterID asks for the id of the test's cluster.
func clusterID(t *testing.T, endpoint string) string {
	t.Helper()
	code, stdout, stderr := keelctl(endpoint, "cluster", "status", "-o", "json")
	var status struct{ Cluster string }
	if err := json.Unmarshal([]byte(stdout), &status); err != nil || status.Cluster == "" {
		t.Fatalf("exit %d, %s: %v", code, stderr, err)
	}
	return status.Cluster
}

func sorted(s []string) []string { slices.Sort(s); return s }

// noteKeys keeps the keys of the items that a leaf printed as JSON.
func noteKeys(t *testing.T, printed map[string]map[string]bool, leaf, stdout string) {
	t.Helper()
	var object map[string]any
	if err := json.Unmarshal([]byte(stdout), &object); err != nil {
		t.Fatal(err)
	}
	items := []any{object}
	if list, ok := object["items"].([]any); ok {
		items = list
	}
	for _, item := range items {
		if printed[leaf] == nil {
			printed[leaf] = make(map[string]bool)
		}
		for k := range item.(map[string]any) {
			if k != "apiVersion" && k != "kind" {
				printed[leaf][k] = true
			}
		}
	}
}

func readsOnly(line []string) bool {
	for _, word := range line[:min(2, len(line))] {
		switch word {
		case "get", "list", "show", "watch", "status", "version", "explain", "entries", "keys", "values", "contains", "is-empty", "scan":
			return !slices.Contains([]string{"add", "add-all", "update", "clear"}, line[min(1, len(line)-1)])
		}
	}
	return false
}

func checkFormat(t *testing.T, line []string, format, stdout string) {
	t.Helper()
	var docs []string
	switch format {
	case "json", "yaml":
		docs = []string{stdout}
	case "jsonl":
		docs = strings.Split(strings.TrimSuffix(stdout, "\n"), "\n")
	default:
		if strings.TrimSpace(stdout) == "" {
			t.Errorf("%q -o %s printed nothing", line, format)
		}
		return
	}
	for _, d := range docs {
		var v struct {
			APIVersion string `json:"apiVersion" yaml:"apiVersion"`
			Kind       string `json:"kind" yaml:"kind"`
		}
		var err error
		if format == "yaml" {
			err = yaml.Unmarshal([]byte(d), &v)
		} else {
			err = json.Unmarshal([]byte(d), &v)
		}
		if err != nil || v.APIVersion != cliout.APIVersion || v.Kind == "" {
			t.Errorf("%q -o %s: %v in %q", line, format, err, d)
		}
	}
}

// KX2, KX3: with no node to answer, every command that needs one fails with the
// same code in text and in JSON, and the JSON is one object on stderr.
func TestErrorsObeyTheFormat(t *testing.T) {
	for _, line := range lines {
		if line[0] == "version" || line[0] == "config" {
			continue
		}
		args := append(slices.Clone(line), "--timeout", "20ms")
		text, out, _ := keelctl("127.0.0.1:1", args...)
		code, stdout, stderr := keelctl("127.0.0.1:1", append(args, "-o", "json")...)
		if code != text || out+stdout != "" {
			t.Errorf("%q: exit %d in text and %d in JSON, stdout %q", line, text, code, out+stdout)
		}
		var f failure
		if err := json.Unmarshal([]byte(stderr), &f); err != nil {
			t.Fatalf("%q: %v in %q", line, err, stderr)
		}
		if f.Kind != "Error" || f.ExitCode != code || f.Code == "" || f.Message == "" || code != exitUnavailable && code != exitUnknown {
			t.Errorf("%q: exit %d, %+v", line, code, f)
		}
	}
}

func TestExitCodes(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1})
	on := c.Endpoints()[0]
	for _, line := range [][]string{
		{"state", "declare", "k", "v", "--kind", "value", "--value-type", "int64"},
		{"state", "declare", "k", "r", "--kind", "reducing", "--function", "sum", "--value-type", "int64"},
		{"reducing", "add", "k", "r", "9223372036854775807", "1", "--key", "x"},
	} {
		if code, _, stderr := keelctl(on, line...); code != exitDone {
			t.Fatalf("%q: %s", line, stderr)
		}
	}
	for _, tc := range []struct {
		code int
		line string
	}{
		{exitUsage, "nonsense"}, {exitUsage, "state nonsense"}, {exitUsage, "value get k"}, {exitUsage, "value get k v"},
		{exitUsage, "state list -o xml"}, {exitUsage, "state list --nonsense"}, {exitUsage, "state list --timeout soon"},
		{exitUsage, "value set k v seven --key x"}, {exitUsage, "value set k v zz --key x --hex"},
		{exitUsage, "state drop k v"}, {exitUsage, "state drop k v --yes --dry-run"}, {exitDone, "state drop k v --dry-run --no-input"}, {exitUsage, "cluster init"}, {exitUsage, "cluster init --nodes n1"},
		{exitUsage, "shard hash none"}, {exitUsage, "state list --columns nonsense"}, {exitUsage, "value cas k v 1 --key x"},
		{exitUsage, "state declare k ttl --kind value --ttl 10s"}, {exitUsage, "state declare k x --kind heap"},
		{exitNotFound, "value get k v --key absent"}, {exitNotFound, "value get k none --key x"}, {exitNotFound, "state drop k none --yes"}, {exitNotFound, "state drop k none --dry-run"},
		{exitNotFound, "shard hash 99"}, {exitNotFound, "operation show 99"}, {exitNotFound, "operation watch 99"},
		{exitUsage, "operation show one"}, {exitUsage, "operation watch 0"}, {exitUsage, "operation watch"}, {exitDone, "operation watch 01"},
		{exitNotFound, "checkpoint show 99"}, {exitNotFound, "checkpoint verify 99"}, {exitNotFound, "checkpoint delete 99 --yes"}, {exitUsage, "checkpoint delete 99"}, {exitNotFound, "checkpoint delete 99 --savepoint --yes"},
		{exitUsage, "checkpoint show one"}, {exitUsage, "checkpoint verify 0"}, {exitUsage, "checkpoint create now"}, {exitDone, "checkpoint create --start-only"},
		{exitUsage, "checkpoint rollback"}, {exitUsage, "checkpoint rollback 1"}, {exitUsage, "checkpoint rollback 1 --abort"}, {exitUsage, "checkpoint rollback 1 --yes --dry-run"},
		{exitNotFound, "checkpoint rollback 99 --yes"}, {exitNotFound, "checkpoint rollback 99 --dry-run"}, {exitNotFound, "checkpoint rollback --abort"},
		{exitRefused, "value cas k v 1 --key x --if-equal 5"}, {exitRefused, "list get k v --key x"},
		{exitRefused, "state declare k v --kind list"},
		{exitFailed, "reducing get k r --key x"},
		{exitDone, "value cas k v 1 --key x --if-absent"}, {exitDone, "cluster status"}, {exitDone, "cluster status --exit-when-healthy"},
	} {
		if code, _, stderr := keelctl(on, strings.Fields(tc.line)...); code != tc.code {
			t.Errorf("keelctl %s: exit %d, want %d: %s", tc.line, code, tc.code, stderr)
		}
	}
}

// KX4: a status names the member that does not answer, and exits with 6.
func TestStatusNamesTheUnreachable(t *testing.T) {
	c := cluster.New(t, cluster.Options{})
	if code, _, stderr := keelctl(c.Endpoints()[0], "cluster", "status", "--wait", "20s"); code != exitDone {
		t.Fatalf("all nodes run: exit %d, %s", code, stderr)
	}
	c.Stop(2)
	type said struct {
		Healthy     bool
		Problems    []string
		Unreachable []struct{ Node string }
	}
	var code int
	var status said
	var stderr string
	// A node that runs is asked for two seconds only, which a busy machine may need.
	c.Nodes().Eventually("the others answer", func() error {
		var stdout string
		code, stdout, stderr = keelctl(c.Endpoints()[0], "cluster", "status", "-o", "json", "--timeout", "20s")
		if status = (said{}); json.Unmarshal([]byte(stdout), &status) != nil || len(status.Unreachable) > 1 {
			return fmt.Errorf("%q, %s", stdout, stderr)
		}
		return nil
	})
	if code != exitUnhealthy || status.Healthy || len(status.Unreachable) != 1 || status.Unreachable[0].Node != "n3" {
		t.Fatalf("exit %d, %+v, %s", code, status, stderr)
	}
	if !strings.Contains(stderr, "n3") {
		t.Fatalf("stderr does not name the node: %s", stderr)
	}
	named := 0
	for _, p := range status.Problems {
		if strings.HasPrefix(p, "node n3 ") {
			named++
		}
	}
	if named != 1 {
		t.Errorf("the node is named %d times: %q", named, status.Problems)
	}
}

// KX4: whatever a node says of its problems, each unreachable member is named,
// and once.
func TestProblemsNameEachUnreachableOnce(t *testing.T) {
	gone := func(ids ...string) (out []*keelstatepb.UnreachableNode) {
		for _, id := range ids {
			out = append(out, &keelstatepb.UnreachableNode{Id: id, Error: "refused"})
		}
		return out
	}
	for name, tc := range map[string]struct {
		status *keelstatepb.StatusResponse
		want   []string
	}{
		"healthy":             {&keelstatepb.StatusResponse{Healthy: true}, nil},
		"named by the status": {&keelstatepb.StatusResponse{Unreachable: gone("n1"), Problems: []string{"node n1 cannot be reached: x"}}, []string{"node n1 cannot be reached: x"}},
		"named by nobody":     {&keelstatepb.StatusResponse{Healthy: true, Unreachable: gone("n1")}, []string{"node n1 is unreachable: refused"}},
		"another is named": {&keelstatepb.StatusResponse{Unreachable: gone("n1", "n10"), Problems: []string{"node n10 cannot be reached: x"}},
			[]string{"node n10 cannot be reached: x", "node n1 is unreachable: refused"}},
		"no reason": {&keelstatepb.StatusResponse{}, []string{"a node reports it"}},
	} {
		if got := problems(tc.status); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var errs bytes.Buffer
	code := run(ctx, []string{"state", "list"}, environment{stdin: strings.NewReader(""), stdout: &errs, stderr: &errs})
	if code != exitInterrupted {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
}

func TestScripts(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1})
	testscript.Run(t, testscript.Params{Dir: "testdata", UpdateScripts: os.Getenv("KEELSTATE_REWRITE") != "",
		Setup: func(e *testscript.Env) error {
			e.Setenv("KEELSTATE_ENDPOINTS", c.Endpoints()[0])
			return nil
		}})
}
