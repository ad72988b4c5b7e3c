package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// asMain makes the test binary be the program.
const asMain = "KS_TEST_AS_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

const waitLimit = 60 * time.Second

// program is the program in a process of its own.
type program struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout chan string // lines; closed at the end
	exited chan struct{}

	mu     sync.Mutex
	stderr bytes.Buffer
}

func (p *program) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.Write(b)
}

func (p *program) errText() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.String()
}

// launch starts the program with nothing of our environment but PATH and a
// temporary directory of the test.
func launch(t *testing.T, tmp string, args ...string) *program {
	t.Helper()
	p := &program{t: t, cmd: exec.Command(os.Args[0], args...), stdout: make(chan string, 100), exited: make(chan struct{})}
	p.cmd.Env = []string{asMain + "=1", "TMPDIR=" + tmp, "PATH=" + os.Getenv("PATH")}
	p.cmd.Stderr = p
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.stdout <- lines.Text()
		}
		close(p.stdout)
		_ = p.cmd.Wait() // the exit code is looked at where it matters
	}()
	t.Cleanup(func() {
		select {
		case <-p.exited:
		default:
			_ = p.cmd.Process.Kill()
			<-p.exited
		}
		if t.Failed() {
			t.Logf("%v:\n%s", args, p.errText())
		}
	})
	return p
}

// line waits for a line of the standard output and returns what follows prefix.
func (p *program) line(prefix string) string {
	p.t.Helper()
	select {
	case line, ok := <-p.stdout:
		rest, found := strings.CutPrefix(line, prefix)
		if !ok || !found {
			p.t.Fatalf("got line %q (%v), want %s...", line, ok, prefix)
		}
		return rest
	case <-time.After(waitLimit):
		p.t.Fatalf("no line %s...", prefix)
	}
	return ""
}

func (p *program) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// code waits for the end and returns the exit code.
func (p *program) code() int {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(waitLimit):
		p.t.Fatal("the program does not end")
	}
	return p.cmd.ProcessState.ExitCode()
}

// get is one HTTP request: status and body, or the error as text.
func get(url string) (int, string) {
	client := &http.Client{Timeout: waitLimit / 2, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return 0, err.Error()
	}
	return r.StatusCode, strings.TrimSpace(string(body))
}

// eventually polls a condition.
func eventually(t *testing.T, what string, cond func() error) {
	t.Helper()
	for deadline := time.Now().Add(waitLimit); ; {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waiting until %s: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func waitReady(t *testing.T, base string) {
	t.Helper()
	eventually(t, "the node is ready", func() error {
		if code, body := get(base + "/readyz"); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
}

func dial(t *testing.T, addr string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // closed earlier by some tests
	return conn
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	t.Cleanup(cancel)
	return ctx
}

// here runs the program in this process and returns what it says.
func here(environ []string, args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(args, environ, &out, &err)
	return code, out.String(), err.String()
}
