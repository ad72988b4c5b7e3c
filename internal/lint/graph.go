package lint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path"
	"strings"
)

// pkg is the part of `go list -json` that the rules need.
type pkg struct {
	ImportPath                                   string
	Dir, Name, Doc                               string
	Standard                                     bool
	DepOnly                                      bool
	ForTest                                      string
	GoFiles, CgoFiles, TestGoFiles, XTestGoFiles []string
	Imports, TestImports, XTestImports           []string
	Module                                       *struct {
		Path, Version, Dir string
		Main               bool
	}
}

// rel is the package's path below the module, "" for the root.
func (p pkg) rel(module string) string {
	return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
}

// goList runs go list -json in dir and decodes what it prints.
func goList(dir string, args ...string) ([]pkg, error) {
	cmd := exec.Command("go", append([]string{"list", "-e", "-json"}, args...)...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return nil, fmt.Errorf("go list: %w\n%s", err, exit.Stderr)
		}
		return nil, fmt.Errorf("go list: %w", err)
	}
	var pkgs []pkg
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p pkg
		switch err := dec.Decode(&p); {
		case err == io.EOF:
			return pkgs, nil
		case err != nil:
			return nil, fmt.Errorf("reading go list: %w", err)
		}
		pkgs = append(pkgs, p)
	}
}

// under says whether a path is dir or below it.
func under(p, dir string) bool { return p == dir || strings.HasPrefix(p, dir+"/") }

func underAny(p string, dirs []string) bool {
	for _, d := range dirs {
		if under(p, d) {
			return true
		}
	}
	return false
}

// importRule says who may import what. Paths of the product are relative to the
// module; a target with a dot in its first element is an external library.
type importRule struct {
	why     string
	targets []string // importing these, or what is below them, ...
	allowed []string // ... is allowed to these packages, and what is below them
	// files, where set, also allows single files, relative to the module.
	files []string
}

// compositionRoots construct the adapters (LI1).
var compositionRoots = []string{"cmd/node", "client/keeltest/cluster", "bench", "internal/testcluster", "internal/sim"}

func restricted() []importRule {
	roots := func(own string) []string { return append([]string{own}, compositionRoots...) }
	return []importRule{
		// LI1
		{why: "engine/rocks is an adapter", targets: []string{"engine/rocks"}, allowed: roots("engine/rocks")},
		{why: "objectstore/s3 is an adapter", targets: []string{"objectstore/s3"}, allowed: roots("objectstore/s3")},
		{why: "cluster/gossip is an adapter", targets: []string{"cluster/gossip"}, allowed: roots("cluster/gossip")},
		// LI2
		{
			why:     "hashicorp/raft stays under cluster and in one file of raftfsm",
			targets: []string{"github.com/hashicorp/raft", "github.com/hashicorp/raft-wal", "github.com/hashicorp/raft-boltdb"},
			allowed: []string{"cluster"}, files: []string{"raftfsm/raftadapter.go"},
		},
		{
			why: "gRPC and protobuf stay at the edges",
			targets: []string{"google.golang.org/grpc", "google.golang.org/protobuf", "google.golang.org/genproto",
				"github.com/golang/protobuf"},
			allowed: []string{"api", "client", "cluster/transport", "cmd", "examples", "bench", "internal/crashtest", "jepsen/wire"},
		},
		{why: "only engine/rocks knows RocksDB", targets: []string{"github.com/linxGnu/grocksdb"}, allowed: []string{"engine/rocks"}},
		{why: "the S3 service is for tests of what stores objects", targets: []string{"internal/s3server"}, allowed: []string{"objectstore/s3", "cmd/node", "snapshot", "cluster", "internal/testcluster", "bench", "jepsen"}},
		{why: "only objectstore/s3 knows minio-go", targets: []string{"github.com/minio/minio-go"}, allowed: []string{"objectstore/s3"}},
		{why: "only cluster/gossip knows memberlist", targets: []string{"github.com/hashicorp/memberlist"}, allowed: []string{"cluster/gossip"}},
		{why: "only commands have a command line", targets: []string{"github.com/spf13/cobra", "github.com/spf13/pflag"}, allowed: []string{"cmd", "examples", "bench"}},
		// LI3
		{
			why:     "the client API is known to the edges only",
			targets: []string{"api"}, allowed: []string{"api", "client", "cmd", "examples", "jepsen", "bench", "internal/testcluster", "internal/crashtest"},
		},
		{
			why:     "the client is for those outside the cluster",
			targets: []string{"client"}, allowed: []string{"client", "cmd", "examples", "jepsen", "bench", "internal/testcluster", "internal/crashtest", "internal/sim"},
		},
		{
			why:     "the cluster is started by composition roots and served by api/server",
			targets: []string{"cluster"}, allowed: append([]string{"cluster", "api/server"}, compositionRoots...),
		},
		{
			why: "harnesses are imported only by tests and by each other",
			targets: []string{"internal/testcluster", "internal/metamorphic", "internal/lint", "internal/ci",
				"internal/memnet"},
			allowed: []string{"internal/testcluster", "internal/metamorphic", "internal/ci", "internal/sim", "client/keeltest"},
		},
	}
}

// mayImport lists, for packages with a closed set of dependencies, which product
// packages they and what is below them may import (LI3).
// api/server may import engine/state for the words of a request (operations,
// declarations), not engine itself.
func mayImport() map[string][]string {
	return map[string][]string{
		"internal/base":        {},
		"internal/vfs":         {"internal/base"},
		"internal/failpoint":   {},
		"internal/logbridge":   {},
		"keygroup":             {"internal/base"},
		"engine":               {"internal/base", "internal/binfmt", "internal/failpoint", "internal/invariants", "internal/vfs", "engine", "keygroup"},
		"objectstore":          {"internal/base", "internal/binfmt", "internal/vfs", "objectstore"},
		"broadcast":            {"internal/base", "internal/binfmt", "internal/invariants", "broadcast", "keygroup"},
		"snapshot":             {"internal", "snapshot", "engine", "objectstore", "keygroup"},
		"raftfsm":              {"internal", "raftfsm", "engine", "keygroup", "broadcast", "snapshot"},
		"cluster":              {"internal", "cluster", "raftfsm", "engine", "keygroup", "broadcast", "snapshot", "objectstore"},
		"api/keelstatepb":      {},
		"api/apierr":           {"internal/base", "api"},
		"api/server":           {"internal", "api", "cluster", "keygroup", "broadcast", "raftfsm", "engine/state"},
		"client":               {"internal", "client", "api", "keygroup"},
		"cmd/keelctl":          {"internal", "cmd/keelctl", "client", "api", "keygroup"},
		"examples":             {"internal/base", "examples", "client", "api", "keygroup"},
		"jepsen":               {"internal/base", "jepsen", "client", "api/apierr", "keygroup"},
		"jepsen/wire":          {"internal/base", "api", "keygroup"},
		"cmd/keelstate-jepsen": {"internal/base", "internal/cliout", "jepsen", "client", "cmd/keelstate-jepsen"},
		"internal/cliout":      {},
		"internal/ci":          {"internal/ci"},
		"internal/crashtest":   {"client", "api"},
		"internal/lint":        {},
		"client/keeltest":      {"internal", "client", "api", "keygroup", "raftfsm", "engine", "broadcast", "cluster", "objectstore", "snapshot"},
		"cluster/raftlog":      {"internal", "cluster/raftlog"},
		"cluster/transport":    {"internal", "cluster/transport"},
		"cluster/gossip":       {"internal", "cluster/gossip", "cluster"},
		"engine/internal":      {"internal/base", "internal/binfmt", "engine/internal"},
		"objectstore/s3":       {"internal/base", "internal/s3server", "objectstore"},
		"internal/s3server":    {},
		"internal/metamorphic": {"internal", "raftfsm", "engine", "keygroup", "broadcast", "snapshot", "client", "api"},
		"internal/memnet":      {"internal/base", "cluster/transport"},
		"internal/invariants":  {},
		"internal/binfmt":      {"internal/base"},
	}
}

// closedSet finds the most specific entry of mayImport for a package.
func closedSet(rel string, sets map[string][]string) (string, bool) {
	for p := rel; p != "." && p != ""; p = path.Dir(p) {
		if _, ok := sets[p]; ok {
			return p, true
		}
	}
	return "", false
}

// edge is one import: a file of a package imports target.
type edge struct {
	file   string // relative to the module
	from   string // package, relative to the module
	target string // import path; relative to the module if it is in it
	inside bool   // target is in the module
}

// checkEdges applies LI1 to LI3.
func checkEdges(edges []edge) []string {
	var bad []string
	sets := mayImport()
	for _, e := range edges {
		for _, r := range restricted() {
			if !r.hits(e) || underAny(e.from, r.allowed) || underAny(e.file, r.files) {
				continue
			}
			bad = append(bad, fmt.Sprintf("%s imports %s: %s", e.file, e.target, r.why))
		}
		if set, ok := closedSet(e.from, sets); ok && e.inside && !underAny(e.target, sets[set]) && e.target != e.from {
			bad = append(bad, fmt.Sprintf("%s imports %s: %s may import only %v", e.file, e.target, set, sets[set]))
		}
	}
	return bad
}

func (r importRule) hits(e edge) bool {
	for _, t := range r.targets {
		external := strings.Contains(strings.SplitN(t, "/", 2)[0], ".")
		if external != e.inside && under(e.target, t) {
			return true
		}
	}
	return false
}
