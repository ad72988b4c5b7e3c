package ci

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const root = "../.."

// machine is a directory of stub commands: what a script finds on its PATH.
type machine struct {
	t   *testing.T
	bin string
	log string // one line per call of apt-get or sudo
}

// newMachine has the basic tools and Go, and nothing of a package manager.
func newMachine(t *testing.T) *machine {
	m := &machine{t: t, bin: t.TempDir(), log: filepath.Join(t.TempDir(), "log")}
	for _, tool := range []string{"sh", "env", "grep", "cat", "dirname", "sed", "awk"} {
		path, err := exec.LookPath(tool)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(m.bin, tool)); err != nil {
			t.Fatal(err)
		}
	}
	m.stub("go", "exit 0")
	m.stub("id", "echo 0")
	return m
}

func (m *machine) stub(name, body string) {
	m.t.Helper()
	text := "#!/bin/sh\n" + body + "\n"
	if err := os.WriteFile(filepath.Join(m.bin, name), []byte(text), 0o755); err != nil {
		m.t.Fatal(err)
	}
}

// debian adds a package manager that logs its calls. missing are the packages
// that dpkg-query does not know; failures is how many installs fail first.
func (m *machine) debian(missing string, failures int) {
	m.stub("dpkg-query", `for p; do :; done; case " `+missing+` " in *" $p "*) exit 1;; esac; echo installed`)
	m.stub("apt-cache", "echo '  Candidate: 7.8.3-2'")
	m.stub("apt-get", `echo "apt-get $*" >>`+m.log+`
case "$1" in install) n=$(grep -c install `+m.log+`); [ "$n" -gt `+string(rune('0'+failures))+` ];; esac`)
}

func (m *machine) run(script string, args ...string) (output string, code int) {
	m.t.Helper()
	path, err := filepath.Abs(filepath.Join(root, script))
	if err != nil {
		m.t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Env = []string{"PATH=" + m.bin}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		m.t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

func (m *machine) calls() string {
	b, err := os.ReadFile(m.log)
	if err != nil && !os.IsNotExist(err) {
		m.t.Fatal(err)
	}
	return string(b)
}

func TestDepsIsSilentWhenNothingIsMissing(t *testing.T) {
	m := newMachine(t)
	m.debian("", 0)
	if out, code := m.run("build/deps.sh"); code != 0 || out != "" || m.calls() != "" {
		t.Errorf("exit %d, output %q, calls %q", code, out, m.calls())
	}
}

func TestDepsInstallsOnlyWhatIsMissing(t *testing.T) {
	m := newMachine(t)
	m.debian("librocksdb-dev protobuf-compiler", 0)
	out, code := m.run("build/deps.sh", "protobuf-compiler")
	if code != 0 || !strings.Contains(out, "installing with apt-get: librocksdb-dev protobuf-compiler") {
		t.Errorf("exit %d, output %q", code, out)
	}
	if got, want := m.calls(), "apt-get install -y --no-install-recommends librocksdb-dev protobuf-compiler\n"; got != want {
		t.Errorf("calls %q, want %q", got, want)
	}
}

func TestDepsRefreshesListsAfterAFailure(t *testing.T) {
	m := newMachine(t)
	m.debian("g++", 1)
	out, code := m.run("build/deps.sh")
	if code != 0 || strings.Count(m.calls(), "apt-get install") != 2 || !strings.Contains(m.calls(), "apt-get update") {
		t.Errorf("exit %d, output %q, calls %q", code, out, m.calls())
	}
}

func TestDepsRefreshesListsOfAFreshImage(t *testing.T) {
	m := newMachine(t)
	m.debian("g++", 0)
	m.stub("apt-cache", "echo '  Candidate: (none)'")
	if out, code := m.run("build/deps.sh"); code != 0 || !strings.HasPrefix(m.calls(), "apt-get update\n") {
		t.Errorf("exit %d, output %q, calls %q", code, out, m.calls())
	}
}

func TestDepsUsesSudoWhenNotRoot(t *testing.T) {
	m := newMachine(t)
	m.debian("g++", 0)
	m.stub("id", "echo 1000")
	m.stub("sudo", `echo "sudo $*" >>`+m.log+`; [ "$1" = -n ] && shift; exec "$@"`)
	out, code := m.run("build/deps.sh")
	// Standard input is no terminal here, so sudo must not ask.
	if code != 0 || !strings.HasPrefix(m.calls(), "sudo -n env DEBIAN_FRONTEND=noninteractive apt-get install") {
		t.Errorf("exit %d, output %q, calls %q", code, out, m.calls())
	}
}

func TestDepsNamesThePackagesWhereItCannotInstall(t *testing.T) {
	for name, prepare := range map[string]func(*machine){
		"no root and no sudo": func(m *machine) { m.debian("g++ librocksdb-dev", 0); m.stub("id", "echo 1000") },
		"installs fail":       func(m *machine) { m.debian("g++ librocksdb-dev", 9) },
		"not Debian":          func(m *machine) { m.stub("c++", "exit 1") },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			prepare(m)
			out, code := m.run("build/deps.sh")
			if code == 0 || !strings.Contains(out, "please install these packages") || !strings.Contains(out, "g++ librocksdb-dev") {
				t.Errorf("exit %d, output %q", code, out)
			}
		})
	}
}

func TestDepsNeedsGo(t *testing.T) {
	m := newMachine(t)
	m.debian("", 0)
	if err := os.Remove(filepath.Join(m.bin, "go")); err != nil {
		t.Fatal(err)
	}
	if out, code := m.run("build/deps.sh"); code != 1 || !strings.Contains(out, "Go is missing") {
		t.Errorf("exit %d, output %q", code, out)
	}
}

func TestContinuousIntegrationRunsMakeTest(t *testing.T) {
	m := newMachine(t)
	m.stub("make", `echo "make $*"; cat; exit 7`) // cat ends at once: no stdin
	if out, code := m.run(".ci/run"); code != 7 || out != "make test\n" {
		t.Errorf("exit %d, output %q", code, out)
	}
}

// Every target must say what it is for, and must exist for those who type it.
func TestMakefileTargetsAreDocumented(t *testing.T) {
	cmd := exec.Command("make", "-s", "-C", root, "help")
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")} // not the MAKEFLAGS of the make that runs this
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("make help: %v\n%s", err, out)
	}
	for _, target := range strings.Fields("deps build rocksdb-release test test-long race stress meta crash fuzz bench demo up down status lint proto proto-check fmt vet clean help") {
		if !strings.Contains(string(out), "\n  "+target+" ") && !strings.HasPrefix(string(out), "  "+target+" ") {
			t.Errorf("make help does not list %s", target)
		}
	}
}
