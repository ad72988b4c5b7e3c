package main

import (
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// composeFile is what the test knows of deploy/compose.yaml.
type composeFile struct {
	Services map[string]composeService
	Volumes  map[string]any
}

type composeService struct {
	Image       string
	Build       struct{ Context, Dockerfile string }
	Entrypoint  []string
	Command     []string
	Environment map[string]string
	Ports       []string
	Volumes     []string
	DependsOn   map[string]struct{ Condition string } `yaml:"depends_on"`
	Healthcheck struct{ Test []string }
	Profiles    []string
}

var composeVariable = regexp.MustCompile(`\$\{([A-Z_]+)(:-([^}]*)|:\?[^}]+)\}`)

func readCompose(t *testing.T) composeFile {
	t.Helper()
	raw, err := os.ReadFile("../../deploy/compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var c composeFile
	if err := yaml.Unmarshal(raw, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

// composeNode reads a node's settings from its flags and variables as the node
// itself would: an unknown flag, a bad value or settings that do not fit fail.
func composeNode(t *testing.T, name string, s composeService) *config {
	t.Helper()
	flags := pflag.NewFlagSet(name, pflag.ContinueOnError)
	register(flags, nodeSettings())
	if err := flags.Parse(s.Command); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if flags.NArg() > 0 {
		t.Errorf("%s: arguments %v", name, flags.Args())
	}
	var environ []string
	for k, v := range s.Environment {
		environ = append(environ, k+"="+composeVariable.ReplaceAllString(v, "$3"))
	}
	c, err := loadConfig(flags, environ, nodeSettings())
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if len(c.ignored) > 0 {
		t.Errorf("%s: variables that are no settings: %v", name, c.ignored)
	}
	if err := c.validate(); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	return c
}

// TestCompose holds deploy/compose.yaml to what the node knows, and to itself.
func TestCompose(t *testing.T) {
	file := readCompose(t)
	names := slices.Sorted(maps.Keys(file.Services))
	if want := []string{"bucket", "init", "keelctl", "minio", "n1", "n2", "n3"}; !slices.Equal(names, want) {
		t.Fatalf("services %v, want %v", names, want)
	}
	mounted, published := map[string]string{}, map[string]string{}
	for name, s := range file.Services {
		checkImage(t, name, s)
		for _, v := range s.Volumes {
			volume, _, _ := strings.Cut(v, ":")
			if _, ok := file.Volumes[volume]; !ok {
				t.Errorf("%s: volume %s is not declared", name, volume)
			}
			if other, taken := mounted[volume]; taken {
				t.Errorf("%s and %s share volume %s", name, other, volume)
			}
			mounted[volume] = name
		}
		for _, p := range s.Ports {
			parts := strings.Split(p, ":")
			if len(parts) != 3 || parts[0] != "127.0.0.1" {
				t.Errorf("%s: port %s is not published on the loopback only", name, p)
				continue
			}
			if other, taken := published[parts[1]]; taken {
				t.Errorf("%s and %s publish port %s", name, other, parts[1])
			}
			published[parts[1]] = name
		}
		for other, d := range s.DependsOn {
			if _, ok := file.Services[other]; !ok || len(file.Services[other].Profiles) > 0 {
				t.Errorf("%s depends on %s, which does not start", name, other)
			}
			if d.Condition == "service_healthy" && len(file.Services[other].Healthcheck.Test) == 0 {
				t.Errorf("%s waits for the health of %s, which has no check", name, other)
			}
		}
		for k, v := range s.Environment {
			secret := strings.Contains(k, "PASSWORD") || strings.Contains(k, "SECRET") || strings.Contains(k, "ACCESS_KEY") || strings.Contains(k, "_USER")
			if secret && !regexp.MustCompile(`^\$\{[A-Z_]+:\?[^}]+\}$`).MatchString(v) {
				t.Errorf("%s: %s has a value in the file: %q", name, k, v)
			}
		}
	}
	if len(mounted) != len(file.Volumes) {
		t.Errorf("volumes %v, mounted %v", slices.Sorted(maps.Keys(file.Volumes)), mounted)
	}
	checkComposeNodes(t, file)
}

func checkImage(t *testing.T, name string, s composeService) {
	t.Helper()
	image, tag, ok := strings.Cut(s.Image, ":")
	if !ok || tag == "" || tag == "latest" {
		t.Errorf("%s: image %q is not pinned", name, s.Image)
	}
	if host, _, slash := strings.Cut(image, "/"); slash && strings.Contains(host, ".") {
		t.Errorf("%s: image %q names a host", name, s.Image)
	}
	if s.Build.Dockerfile != "" {
		if _, err := os.Stat(filepath.Join("../../deploy", s.Build.Context, s.Build.Dockerfile)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func checkComposeNodes(t *testing.T, file composeFile) {
	t.Helper()
	var members, endpoints, seeds []string
	port := func(addr string) string {
		_, p, err := net.SplitHostPort(addr)
		if err != nil {
			t.Errorf("%q: %v", addr, err)
		}
		return p
	}
	for _, name := range []string{"n1", "n2", "n3"} {
		s := file.Services[name]
		c := composeNode(t, name, s)
		if c.nodeID != name || c.advertiseHost != name {
			t.Errorf("%s is node %q at host %q", name, c.nodeID, c.advertiseHost)
		}
		members = append(members, name+"="+c.advertiseRaft)
		endpoints = append(endpoints, c.advertiseGRPC)
		seeds = append(seeds, c.advertiseGossip)
		if len(s.Volumes) != 1 || !within(c.dataDir, strings.SplitN(s.Volumes[0], ":", 2)[1]) {
			t.Errorf("%s: data in %s, volumes %v", name, c.dataDir, s.Volumes)
		}
		for i, want := range []string{port(c.grpcAddr), port(c.httpAddr)} {
			if len(s.Ports) != 2 || !strings.HasSuffix(s.Ports[i], ":"+want) {
				t.Errorf("%s: publishes %v, listens on %s", name, s.Ports, want)
			}
		}
		if want := "http://127.0.0.1:" + port(c.httpAddr) + "/livez"; !slices.Contains(s.Healthcheck.Test, want) {
			t.Errorf("%s: the check %v does not ask %s", name, s.Healthcheck.Test, want)
		}
		endpoint := c.objects.s3.Endpoint
		host, p, _ := strings.Cut(endpoint, ":")
		if minio, ok := file.Services[host]; !ok || !slices.ContainsFunc(minio.Ports, func(v string) bool { return strings.HasSuffix(v, ":"+p) }) {
			t.Errorf("%s: nobody serves objects at %s", name, endpoint)
		}
		if made := "store/" + c.objects.s3.Bucket + "\n"; !strings.Contains(strings.Join(file.Services["bucket"].Command, "\n"), made) {
			t.Errorf("%s: nobody makes bucket %q", name, c.objects.s3.Bucket)
		}
		if got := strings.Join(c.join, ","); got != file.Services["n1"].Environment["KEELSTATE_JOIN"] {
			t.Errorf("%s joins %s", name, got)
		}
	}
	if got := file.Services["n1"].Environment["KEELSTATE_JOIN"]; got != strings.Join(seeds, ",") {
		t.Errorf("seeds %s, want %v", got, seeds)
	}
	init := file.Services["init"]
	if !slices.Contains(init.Command, strings.Join(members, ",")) {
		t.Errorf("init founds %v, want %v", init.Command, members)
	}
	for _, name := range []string{"init", "keelctl"} {
		s := file.Services[name]
		if s.Image != file.Services["n1"].Image || s.Environment["KEELSTATE_ENDPOINTS"] != strings.Join(endpoints, ",") {
			t.Errorf("%s: image %s, endpoints %s, want %v", name, s.Image, s.Environment["KEELSTATE_ENDPOINTS"], endpoints)
		}
	}
}

// The image is built with the Go that go.mod asks for, on the Debian whose RocksDB
// the build knows.
func TestDockerfile(t *testing.T) {
	raw, err := os.ReadFile("../../deploy/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`(?m)^go (\S+)$`).FindSubmatch(mod)
	bases := regexp.MustCompile(`(?m)^FROM (\S+)`).FindAllStringSubmatch(string(raw), -1)
	if version == nil || len(bases) != 2 {
		t.Fatalf("go %q, bases %v", version, bases)
	}
	if want := "golang:" + string(version[1]) + "-bookworm"; bases[0][1] != want || bases[1][1] != "debian:bookworm-slim" {
		t.Errorf("bases %v, want %s and debian:bookworm-slim", bases, want)
	}
	for _, want := range []string{"librocksdb7.8", "USER keelstate", `ENTRYPOINT ["keelstate-node"]`, "/src/bin/keelstate-node /src/bin/keelctl"} {
		if !strings.Contains(string(raw), want) {
			t.Errorf("it lacks %q", want)
		}
	}
}
