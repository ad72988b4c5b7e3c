//go:build linux

package nemesis

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// TestMain is also the fake node and the fake keelctl of these tests, told apart
// by their flags.
func TestMain(m *testing.M) {
	if os.Getenv("KEELJ_TEST_FAKE") != "" {
		if slices.Contains(os.Args, "--sidecar") {
			os.Exit(fakeService())
		}
		if slices.Contains(os.Args, "--node-id") {
			os.Exit(fakeNode())
		}
		os.Exit(fakeCtl())
	}
	code := m.Run()
	if binaries != "" {
		if err := os.RemoveAll(binaries); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// binaries is the directory of what build made; removed by TestMain.
var binaries string

func flagValue(name string) string {
	if i := slices.Index(os.Args, "--"+name); i >= 0 {
		return os.Args[i+1]
	}
	return ""
}

// fakeNode writes and syncs all the time, and ends with code 70 if its disk fails,
// as a node does.
func fakeNode() int {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	dir := flagValue("data-dir")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 70
	}
	l, err := net.Listen("tcp", flagValue("grpc-addr"))
	if err != nil {
		return 1
	}
	defer l.Close()
	failed := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_WRONLY, 0o644)
		if d, e := os.Open(dir); err == nil && e == nil {
			err = errors.Join(d.Sync(), d.Close())
		}
		for n := int64(0); err == nil; n++ {
			_, err = f.WriteAt([]byte("entry"), n%1000*5)
			if err == nil || errors.Is(err, syscall.ENOSPC) {
				err = f.Sync()
			}
			if b, e := os.ReadFile(filepath.Join(dir, "log")); e == nil && len(b) == 0 {
				err = errors.New("what was written is not there")
			}
		}
		failed <- err
	}()
	select {
	case <-term:
		return 0
	case err := <-failed:
		fmt.Fprintln(os.Stderr, err)
		return 70
	}
}

// fakeService has every object.
func fakeService() int {
	err := http.ListenAndServe(flagValue("port"), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "the object of "+r.URL.Path)
	}))
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// fakeCtl knows one shard that n1 leads, and replicas that agree. Nobody opens a
// session under KEELJ_TEST_NO_SYSTEM.
func fakeCtl() int {
	var answer []map[string]any
	switch {
	case slices.Contains(os.Args, "list"):
		answer = append(answer, map[string]any{"id": 1, "leader": "n1", "replicas": []string{"r1", "r2", "r3"}})
	case slices.Contains(os.Args, "set") && os.Getenv("KEELJ_TEST_NO_SYSTEM") != "":
		return 5
	case slices.Contains(os.Args, "hash"):
		for _, n := range []string{"n1", "n2", "n3"} {
			answer = append(answer, map[string]any{"shard": 1, "node": n, "content": "abc", "index": 7})
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(map[string]any{"items": answer}); err != nil {
		return 1
	}
	return 0
}

// build makes the real binaries once per process.
var build = sync.OnceValue(func() (err error) {
	if binaries, err = os.MkdirTemp("", "nemesis"); err != nil {
		return err
	}
	for _, p := range []string{"node", "keelctl"} {
		out, err := exec.Command("go", "build", "-o", filepath.Join(binaries, p), "../../cmd/"+p).CombinedOutput()
		if err != nil {
			return fmt.Errorf("building %s: %w: %s", p, err, out)
		}
	}
	return nil
})

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually repeats a look until it finds no error.
func eventually(t *testing.T, look func() error) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		err := look()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %v", err)
		}
		pauseFor(t.Context(), 5*time.Millisecond)
	}
}
