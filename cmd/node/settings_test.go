package main

import (
	"bytes"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/objectstore/s3"
)

var rewrite = flag.Bool("rewrite", false, "rewrite generated documents")

func load(t *testing.T, environ []string, args ...string) (*config, error) {
	t.Helper()
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	register(flags, nodeSettings())
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return loadConfig(flags, environ, nodeSettings())
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestPrecedence is CN1: each source wins over those below it, and the origin
// says which it was.
func TestPrecedence(t *testing.T) {
	path := writeFile(t, "zone: file\nnode-id: file\nmemory: 2GiB\njoin: [\"a:1\", \"b:2\"]\npprof: true\nadvertise-host: 5\n")
	c, err := load(t, []string{"KEELSTATE_ZONE=env", "KEELSTATE_NODE_ID=env", "KEELSTATE_CONFIG=" + path, "KEELSTATE_PORT_7401_TCP=x", "OTHER=1"}, "--zone", "flag", "--drain-timeout=5s")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][2]string{
		"zone": {"flag", "flag --zone"}, "node-id": {"env", "environment KEELSTATE_NODE_ID"}, "memory": {"2GiB", "file " + path},
		"engine": {"rocks", "default"}, "join": {"a:1,b:2", "file " + path}, "pprof": {"true", "file " + path},
	} {
		if got := [2]string{c.values[name], c.origins[name]}; got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	if c.zone != "flag" || c.nodeID != "env" || c.memory != 2<<30 || !reflect.DeepEqual(c.join, []string{"a:1", "b:2"}) || !c.pprof ||
		c.drainTimeout != 5*time.Second || c.logLevel != slog.LevelInfo || c.advertiseHost != "5" {
		t.Errorf("parsed %+v", c)
	}
	if !reflect.DeepEqual(c.ignored, []string{"KEELSTATE_PORT_7401_TCP"}) {
		t.Errorf("ignored %v", c.ignored)
	}
	// The flag for the file wins over the variable.
	other := writeFile(t, "memory: 3GiB\n")
	if c, err := load(t, []string{"KEELSTATE_CONFIG=" + path}, "--config", other); err != nil || c.memory != 3<<30 || c.zone != "" {
		t.Errorf("%+v %v", c, err)
	}
}

// TestBadConfiguration: code 2, and the text names the setting and its origin.
func TestBadConfiguration(t *testing.T) {
	ok := []string{"--node-id", "n1", "--data-dir", filepath.Join(t.TempDir(), "never")}
	for _, c := range []struct {
		name    string
		environ []string
		args    []string
		file    string
		want    []string
	}{
		{name: "nothing", want: []string{"--node-id"}},
		{name: "no directory", args: []string{"--node-id", "n1"}, want: []string{"--data-dir"}},
		{name: "node id", args: append(ok, "--node-id", "a/b"), want: []string{"node-id"}},
		{name: "unknown flag", args: append(ok, "--objectstore", "x"), want: []string{"--objectstore"}},
		{name: "flag of a later version", args: append(ok, "--tls-cert", "node.pem"), want: []string{"--tls-cert"}},
		{name: "mode of checkpoints", args: append(ok, "--checkpoint-mode", "full"), want: []string{"--checkpoint-mode", "changelog"}},
		{name: "interval without a store", args: append(ok, "--checkpoint-interval", "1s"), want: []string{"checkpoint-interval", "--object-store"}},
		{name: "short interval", args: append(ok, "--checkpoint-interval", "1ms"), want: []string{"--checkpoint-interval", "10m"}},
		{name: "nothing retained", args: append(ok, "--checkpoint-retain", "0"), want: []string{"--checkpoint-retain", "1000"}},
		{name: "no time for a checkpoint", args: append(ok, "--checkpoint-timeout", "0"), want: []string{"--checkpoint-timeout", "10m"}},
		{name: "argument", args: []string{"serve"}, want: []string{"serve"}},
		{name: "memory without unit", args: append(ok, "--memory", "512"), want: []string{"--memory", "512MiB"}},
		{name: "memory too small", args: append(ok, "--memory", "1MiB"), want: []string{"--memory", "64MiB"}},
		{name: "memory too large", args: append(ok, "--memory", "99999999TiB"), want: []string{"--memory"}},
		{name: "engine", environ: []string{"KEELSTATE_ENGINE=bolt"}, args: ok, want: []string{"engine", "KEELSTATE_ENGINE", "bolt"}},
		{name: "address", args: append(ok, "--raft-addr", "7411"), want: []string{"--raft-addr", "host:port"}},
		{name: "port", args: append(ok, "--grpc-addr", "h:70000"), want: []string{"--grpc-addr", "port"}},
		{name: "join", args: append(ok, "--join", "a:1,b"), want: []string{"--join", `"b"`}},
		{name: "join without gossip", args: append(ok, "--join", "a:1", "--gossip-addr", ""), want: []string{"join", "gossip-addr"}},
		{name: "all interfaces", args: append(ok, "--raft-addr", "0.0.0.0:7411"), want: []string{"raft-addr", "--advertise-host", "--advertise-raft-addr"}},
		{name: "all interfaces, v6", args: append(ok, "--grpc-addr", "[::]:7401"), want: []string{"grpc-addr"}},
		{name: "advertised without port", args: append(ok, "--raft-addr", "0.0.0.0:0", "--advertise-host", "h"), want: []string{"raft-addr", "port"}},
		{name: "level", args: append(ok, "--log-level", "loud"), want: []string{"--log-level", "loud"}},
		{name: "format", args: append(ok, "--log-format", "xml"), want: []string{"--log-format"}},
		{name: "drain", args: append(ok, "--drain-timeout", "-1s"), want: []string{"--drain-timeout"}},
		{name: "log size", args: append(ok, "--log-size", "1000KiB"), want: []string{"--log-size", "between 1MiB and 16GiB"}},
		{name: "log size without a unit", args: append(ok, "--log-size", "64"), want: []string{"--log-size"}},
		{name: "store without a scheme", args: append(ok, "--object-store", "/var/objects"), want: []string{"--object-store", "file:///var/objects"}},
		{name: "store of another kind", args: append(ok, "--object-store", "gs://bucket"), want: []string{"--object-store", "s3://", "file:///"}},
		{name: "store of no kind", args: append(ok, "--object-store", "bucket"), want: []string{"--object-store", "s3://", "file:///"}},
		{name: "relative file store", args: append(ok, "--object-store", "file://objects/x"), want: []string{"--object-store", "three slashes"}},
		{name: "file store at the root", args: append(ok, "--object-store", "file:///"), want: []string{"--object-store", "three slashes"}},
		{name: "store with a query", environ: []string{"KEELSTATE_OBJECT_STORE=s3://bucket/a?region=x"}, args: ok, want: []string{"object-store", "KEELSTATE_OBJECT_STORE", "'?'"}},
		{name: "bucket's name", args: append(ok, "--object-store", "s3://Bucket_1"), want: []string{"--object-store", "lower-case"}},
		{name: "no bucket", args: append(ok, "--object-store", "s3:///prefix"), want: []string{"--object-store", "lower-case"}},
		{name: "prefix", args: append(ok, "--object-store", "s3://bucket/../x"), want: []string{"--object-store", "prefix", "dot"}},
		{name: "store in the data", args: append(ok, "--object-store", "file://"+ok[3]+"/objects"), want: []string{"object-store", "data-dir"}},
		{name: "data in the store", args: append(ok, "--object-store", "file://"+filepath.Dir(ok[3])), want: []string{"object-store", "data-dir"}},
		{name: "rebuilt from elsewhere", args: append(ok, "--rebuild-from", "disk"), want: []string{"--rebuild-from", "peer or store"}},
		{name: "endpoint without a store", args: append(ok, "--object-store-endpoint", "http://h:1"), want: []string{"object-store-endpoint", "--object-store s3://"}},
		{name: "anonymous without a store", args: append(ok, "--object-store-anonymous"), want: []string{"object-store-anonymous"}},
		{name: "region of a file store", environ: []string{"KEELSTATE_OBJECT_STORE_REGION=r"}, args: append(ok, "--object-store", "file:///objects"), want: []string{"object-store-region", "KEELSTATE_OBJECT_STORE_REGION"}},
		{name: "endpoint", args: append(ok, "--object-store", "s3://bucket", "--object-store-endpoint", "ftp://h"), want: []string{"--object-store-endpoint", "https://host:port"}},
		{name: "endpoint with a path", args: append(ok, "--object-store", "s3://bucket", "--object-store-endpoint", "http://h:1/bucket"), want: []string{"--object-store-endpoint", "https://host:port"}},
		{name: "path style", args: append(ok, "--object-store", "s3://bucket", "--object-store-path-style", "maybe"), want: []string{"--object-store-path-style", "auto"}},
		{name: "CA file without TLS", args: append(ok, "--object-store", "s3://bucket", "--object-store-endpoint", "http://h:1", "--object-store-ca-file", "x"), want: []string{"object-store-ca-file", "https://"}},
		{name: "CA file that is not there", args: append(ok, "--object-store", "s3://bucket", "--object-store-ca-file", "/nonexistent/ca.pem", "--grpc-addr", "127.0.0.1:0", "--http-addr", "", "--engine", "mem"), want: []string{"object-store", "CA file", "/nonexistent/ca.pem"}},
		{name: "fault injection", args: append(ok, "--fault-injection=maybe"), want: []string{"fault-injection"}},
		{name: "failpoints", environ: []string{"KEELSTATE_FAILPOINTS=no.such=crash"}, args: ok, want: []string{"KEELSTATE_FAILPOINTS", "failpoint"}},
		{name: "pprof", environ: []string{"KEELSTATE_PPROF=maybe"}, args: ok, want: []string{"pprof", "KEELSTATE_PPROF"}},
		{name: "unknown key", args: ok, file: "nod-id: x\nzone: z\n", want: []string{"nod-id", "unknown"}},
		{name: "nested key", args: ok, file: "grpc:\n  addr: x\n", want: []string{"grpc", "unknown"}},
		{name: "nested value", args: ok, file: "zone: {a: b}\n", want: []string{"zone", "file"}},
		{name: "value in the file", args: ok, file: "memory: 12\n", want: []string{"memory", "file", "12"}},
		{name: "no YAML", args: ok, file: "a: [", want: []string{"config"}},
		{name: "no file", args: append(ok, "--config", "/nonexistent/x.yaml"), want: []string{"config", "/nonexistent/x.yaml"}},
	} {
		args := append([]string(nil), c.args...)
		if c.file != "" {
			args = append(args, "--config", writeFile(t, c.file))
		}
		code, stdout, stderr := here(c.environ, args...)
		if code != exitUsage || stdout != "" {
			t.Errorf("%s: code %d, printed %q", c.name, code, stdout)
		}
		for _, w := range c.want {
			if !strings.Contains(stderr, w) {
				t.Errorf("%s: %q does not say %q", c.name, stderr, w)
			}
		}
	}
}

// A secret that was put where none belongs is refused, and not repeated.
func TestNoSecretsInTheStoresName(t *testing.T) {
	ok := []string{"--node-id", "n1", "--data-dir", filepath.Join(t.TempDir(), "never")}
	for _, args := range [][]string{
		{"--object-store", "s3://key:verysecret@bucket/prefix"},
		{"--object-store", "s3://key:very%ZZsecret@bucket/prefix"},
		{"--object-store", "s3://bucket", "--object-store-endpoint", "https://key:verysecret@host"},
	} {
		for _, command := range [][]string{nil, {"config", "explain"}} {
			code, stdout, stderr := here(nil, append(append(command, ok...), args...)...)
			if code != exitUsage || strings.Contains(stdout+stderr, "secret@") || strings.Contains(stdout+stderr, "verysecret") || !strings.Contains(stderr, "credentials") {
				t.Errorf("%v %v: code %d: %s%s", command, args, code, stdout, stderr)
			}
		}
	}
}

func TestStores(t *testing.T) {
	for uri, want := range map[string][3]string{
		"":                         {},
		"file:///var/objects":      {"/var/objects"},
		"file:///var//objects/":    {"/var/objects"},
		"file:///var/with%20space": {"/var/with space"},
		"s3://bucket":              {"", "bucket"},
		"s3://bucket/":             {"", "bucket"},
		"s3://my.bucket-1/a/b/":    {"", "my.bucket-1", "a/b"},
	} {
		c, err := load(t, nil, "--node-id", "n1", "--data-dir", "d", "--object-store", uri, "--rebuild-from", "store")
		if err != nil {
			t.Errorf("%s: %v", uri, err)
			continue
		}
		if got := [3]string{c.objects.dir, c.objects.s3.Bucket, c.objects.s3.Prefix}; got != want || c.objects.uri != uri {
			t.Errorf("%s: %v, want %v", uri, got, want)
		}
	}
	for endpoint, want := range map[string]s3.Options{
		"":                 {},
		"h":                {Endpoint: "h"},
		"https://h:9000/":  {Endpoint: "h:9000"},
		"http://[::1]:900": {Endpoint: "[::1]:900", Insecure: true},
	} {
		c, err := load(t, []string{"KEELSTATE_OBJECT_STORE_ENDPOINT=" + endpoint}, "--node-id", "n1", "--data-dir", "d", "--object-store", "s3://bucket")
		if err != nil || c.validate() != nil {
			t.Errorf("%s: %v", endpoint, err)
			continue
		}
		if c.objects.s3.Endpoint != want.Endpoint || c.objects.s3.Insecure != want.Insecure {
			t.Errorf("%s: %+v", endpoint, c.objects.s3)
		}
	}
}

func TestAdvertised(t *testing.T) {
	c, err := load(t, nil, "--node-id", "n", "--data-dir", "d", "--grpc-addr", "0.0.0.0:1", "--raft-addr", ":2", "--gossip-addr", "[::]:3",
		"--http-addr", "", "--advertise-host", "h", "--advertise-raft-addr", "r:9")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.validate(); err != nil {
		t.Fatal(err)
	}
	if c.advertiseGRPC != "h:1" || c.advertiseRaft != "r:9" || c.advertiseGossip != "h:3" || c.advertiseHTTP != "" {
		t.Errorf("%q %q %q %q", c.advertiseGRPC, c.advertiseRaft, c.advertiseGossip, c.advertiseHTTP)
	}
}

func TestParseBytes(t *testing.T) {
	for in, want := range map[string]int64{"1B": 1, "2KiB": 2 << 10, "3 MiB": 3 << 20, "4GiB": 4 << 30, "5TiB": 5 << 40, "0B": 0,
		"1": -1, "": -1, "GiB": -1, "-1GiB": -1, "1GB": -1, "1.5GiB": -1, "8388608TiB": -1, "9223372036854775807B": 1<<63 - 1} {
		got, err := parseBytes(in)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("%q: %d, want %d", in, got, want)
		}
	}
}

func TestExplain(t *testing.T) {
	code, out, stderr := here([]string{"KEELSTATE_ZONE=z1", "KEELSTATE_TYPO=1"}, "config", "explain", "--engine", "mem")
	if code != 0 {
		t.Fatalf("%d %s", code, stderr)
	}
	for _, s := range nodeSettings() {
		if !strings.Contains(out, "\n"+s.name+" ") {
			t.Errorf("%s is missing:\n%s", s.name, out)
		}
	}
	for _, want := range []string{"environment KEELSTATE_ZONE", "flag --engine", "KEELSTATE_TYPO"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing:\n%s", want, out)
		}
	}
}

const docsHead = `# Configuration of a node

` + "`keelstate-node`" + ` takes each setting from one place: a flag, else an environment
variable, else a key of the YAML file named by ` + "`--config`" + ` or ` + "`KEELSTATE_CONFIG`" + `, else
the default. ` + "`keelstate-node config explain`" + `, with the same flags, prints every value and
where it comes from. An unknown key of the file is refused. An unknown variable that
starts with ` + "`KEELSTATE_`" + ` is not, because container platforms add some; ` + "`config explain`" + `
lists it as ignored.

Keys of the file are the names below, on one level; ` + "`join`" + ` may be a list. Sizes have a unit
(` + "`512MiB`, `1GiB`" + `), durations too (` + "`30s`" + `).

| setting | environment | default | meaning |
|---|---|---|---|
`

const docsTail = `
**Addresses.** A node that listens on all interfaces must say how others reach it, by
` + "`advertise-host`" + ` or one ` + "`advertise-...`" + ` per address. Nothing is encrypted yet: keep the
listening addresses on a private network.

**Object store.** Checkpoints need one; without it they are refused, and nothing else changes. All nodes must have the same one:
a ` + "`file://`" + ` store on each node's own disk is none, for no node finds what another stored. A node starts and serves
its state whether the store is there or not; it tries the store at its start (an object below ` + "`keelstate-probe/`" + `) and
logs a warning, with what to do, until it works. Credentials are never settings: object-store.md says where they come from.

**Memory.** With engine rocks, half of ` + "`memory`" + ` is RocksDB's (block cache and write buffers) and
the other half is the soft limit of the Go heap; with engine mem, all of it is the soft limit.
The limit makes the collector work harder; it does not refuse writes.

**Stopping.** SIGTERM or SIGINT: readiness turns false, leadership is handed over, calls end,
everything is closed; at most ` + "`drain-timeout`" + ` is waited for the first three. A second signal ends
the process at once, which loses nothing that was acknowledged.

**Exit codes.** 0 stopped by a signal; 1 failed; 2 usage; 70 the disk failed a read, a write
or an fsync, at the start too, and the last line has the cause: do not start the node again before the disk is looked at.

**HTTP.** ` + "`/livez`" + `: the process and its disk answer. ` + "`/readyz`" + `: this node serves what it hosts: every replica is a member
of its shard, has caught up since the node was started, and is not far behind since. A node that is ready
stays so whatever becomes of others. A restarted one waits for the leaders of its shards; a shard without a leader
for 20 election timeouts (10 s) keeps it no longer, unless the node hears of no leader at all: then it may be cut off.
So a rolling restart waits for ` + "`/readyz`" + `, and a lost shard, which ` + "`keelctl cluster status`" + ` names, stops none.
` + "`/metrics`" + `: Prometheus. ` + "`/debug/pprof/`" + `: only with ` + "`pprof`" + `.
` + "`/debug/failpoints`" + `: only with ` + "`fault-injection`" + `, in a build with failpoints (failpoints.md).
` + "`/debug/fault/clock`" + `: only with ` + "`fault-injection`" + `, for tests: PUT ` + "`{\"offsetMs\": 5000, \"driftPPM\": -200}`" + ` moves
the wall clock that the node sees, from then on, by an offset and by a drift in parts per million
(within 100 years and a million); zeros are the truth, and a restart brings it back. GET says what is set.
The gRPC health service says the same as ` + "`/readyz`" + `.

This file is generated: ` + "`go test ./cmd/node -run TestConfigPage -rewrite`" + `.
`

// TestConfigPage keeps docs/config.md current.
func TestConfigPage(t *testing.T) {
	var b bytes.Buffer
	b.WriteString(docsHead)
	for _, s := range nodeSettings() {
		def := "`" + s.def + "`"
		if s.def == "" {
			def = ""
		}
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s |\n", s.name, s.env(), def, s.usage)
	}
	b.WriteString(docsTail)
	name := filepath.Join("..", "..", "docs", "config.md")
	if *rewrite {
		if err := os.WriteFile(name, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b.Bytes()) {
		t.Errorf("%s is out of date; run this test with -rewrite", name)
	}
}

// The bounds of a log keep the proportions of the defaults, and the default
// leaves them to the cluster.
func TestLogSize(t *testing.T) {
	for text, want := range map[string][3]uint64{"64MiB": {}, "": {}, "2MiB": {512 << 10, 2 << 20, 8 << 20}} {
		args := []string{"--node-id", "n1", "--data-dir", "d"}
		if text != "" {
			args = append(args, "--log-size", text)
		}
		c, err := load(t, nil, args...)
		if err != nil {
			t.Fatal(err)
		}
		var o cluster.Options
		c.boundLog(&o)
		if got := [3]uint64{o.LogKeepBytes, o.LogMaxBytes, o.LogHardBytes}; got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}
