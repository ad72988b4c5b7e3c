//go:build linux

package host

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// TestMain is also the node of these tests: a process that does as it is told
// over a unix socket, which no fault of the network reaches.
func TestMain(m *testing.M) {
	if slices.Contains(os.Args, "--sidecar") {
		fmt.Fprintln(os.Stderr, fakeService())
		os.Exit(1)
	}
	if socket := os.Getenv("KEELJ_TEST_SOCKET"); socket != "" {
		code, err := fakeNode(socket)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(code)
	}
	goleak.VerifyTestMain(m)
}

// fakeService answers every request with where it keeps its objects.
func fakeService() error {
	addr := os.Args[slices.Index(os.Args, "--port")+1]
	return http.ListenAndServe(addr, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/end" {
			os.Exit(3)
		}
		fmt.Fprint(w, os.Args[len(os.Args)-1])
	}))
}

// patience is the limit of what is to succeed: a stall of the whole machine must not
// look like a fault. What is to have no effect is looked at for a moment only.
const patience = 30 * time.Second

// get reads what a service answers.
func get(url string) string {
	client := http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(url)
	if err != nil {
		return "error: " + err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return "error: " + err.Error()
	}
	return string(b)
}

// fake is what a fake node has.
type fake struct {
	data     string
	received atomic.Int64 // datagrams
	code     atomic.Int64 // with which it ends when it is asked to
}

// fakeNode runs until SIGTERM and returns its exit code.
func fakeNode(socket string) (int, error) {
	flag := func(name string) string {
		for i, arg := range os.Args {
			if arg == "--"+name {
				return os.Args[i+1]
			}
		}
		return ""
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	f := &fake{data: flag("data-dir")}
	if err := os.MkdirAll(f.data, 0o755); err != nil {
		return 0, err
	}
	echo, err := net.Listen("tcp", flag("raft-addr"))
	if err != nil {
		return 0, err
	}
	udp, err := net.ListenPacket("udp", flag("gossip-addr"))
	if err != nil {
		return 0, err
	}
	if err := os.RemoveAll(socket); err != nil {
		return 0, err
	}
	orders, err := net.Listen("unix", socket)
	if err != nil {
		return 0, err
	}
	go serve(echo, func(line string) string { return line })
	go serve(orders, f.obey)
	go func() {
		buf := make([]byte, 100)
		for {
			if _, _, err := udp.ReadFrom(buf); err == nil {
				f.received.Add(1)
			}
		}
	}()
	<-term
	return int(f.code.Load()), nil
}

func serve(l net.Listener, answer func(string) string) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			in := bufio.NewScanner(conn)
			in.Buffer(nil, 1<<22)
			for in.Scan() {
				if _, err := fmt.Fprintln(conn, answer(in.Text())); err != nil {
					return
				}
			}
		}()
	}
}

// obey carries out one order.
func (f *fake) obey(line string) string {
	word := strings.Fields(line)
	switch word[0] {
	case "call": // ADDRESS BYTES: an echo over TCP, and how long it took
		n, _ := strconv.Atoi(word[2])
		took, err := call(word[1], n, patience)
		if err != nil {
			return "error " + err.Error()
		}
		return took.String()
	case "reach": // ADDRESS: as call, but soon tired
		if _, err := call(word[1], 1, 300*time.Millisecond); err != nil {
			return "error " + err.Error()
		}
		return "ok"
	case "get": // URL
		return get(word[1])
	case "send": // ADDRESS COUNT datagrams
		n, _ := strconv.Atoi(word[2])
		conn, err := net.Dial("udp", word[1])
		if err != nil {
			return "error " + err.Error()
		}
		defer conn.Close()
		for range n {
			_, _ = conn.Write([]byte("x"))
		}
		return "ok"
	case "received":
		return strconv.FormatInt(f.received.Load(), 10)
	case "work": // computes for 300 ms, and answers how much CPU time it got
		before := cpuTime()
		for began := time.Now(); time.Since(began) < 300*time.Millisecond; {
			for i := range 100000 {
				if i < 0 {
					return "impossible"
				}
			}
		}
		return (cpuTime() - before).String()
	case "write": // FILE BYTES, with fsync, and how long it took
		n, _ := strconv.Atoi(word[2])
		began := time.Now()
		if err := writeSynced(filepath.Join(f.data, word[1]), n); err != nil {
			return "error " + err.Error()
		}
		return time.Since(began).String()
	case "end-with": // CODE, when it is asked to end
		n, _ := strconv.Atoi(word[1])
		f.code.Store(int64(n))
		return "ok"
	case "end-now": // CODE
		n, _ := strconv.Atoi(word[1])
		os.Exit(n)
	case "take": // BYTES of memory
		n, _ := strconv.Atoi(word[1])
		taken := make([]byte, n)
		for i := 0; i < n; i += 4096 {
			taken[i] = 1
		}
		return strconv.Itoa(len(taken))
	}
	return "error what?"
}

func cpuTime() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func writeSynced(path string, n int) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = file.Write(make([]byte, n))
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// call sends bytes to an echo and waits for them.
func call(addr string, bytes int, limit time.Duration) (time.Duration, error) {
	began := time.Now()
	conn, err := net.DialTimeout("tcp", addr, limit)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(began.Add(limit)); err != nil {
		return 0, err
	}
	if _, err := fmt.Fprintln(conn, strings.Repeat("x", bytes)); err != nil {
		return 0, err
	}
	if _, err := io.ReadFull(conn, make([]byte, bytes+1)); err != nil {
		return 0, err
	}
	return time.Since(began), nil
}

// fleet makes a fleet of fake nodes, started, and closes it however the test ends.
func fleet(t *testing.T, opts Options, needs ...Capability) *Fleet {
	t.Helper()
	if err := Detect().Lacks(needs...); err != nil {
		t.Skipf("SKIPPED, NOT TESTED HERE: %v", err)
	}
	self, err := os.Executable()
	must(t, err)
	opts.NodeBinary, opts.Dir = self, t.TempDir()
	f, err := NewFleet(opts)
	must(t, err)
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, n := range f.Nodes {
		n.SetFlags(nil, []string{"KEELJ_TEST_SOCKET=" + socketOf(n)})
	}
	must(t, f.StartAll())
	for _, n := range f.Nodes {
		listening(t, n)
	}
	return f
}

func socketOf(n *Node) string { return n.LogFile + ".sock" }

// listening waits until a fake node takes orders.
func listening(t *testing.T, n *Node) {
	t.Helper()
	must(t, await(patience, n.ID+" takes orders", func() bool {
		conn, err := net.Dial("unix", socketOf(n))
		return err == nil && conn.Close() == nil
	}))
}

// order gives a fake node an order and returns its answer, "" if there is none
// within the limit.
func order(t *testing.T, n *Node, limit time.Duration, format string, args ...any) string {
	t.Helper()
	conn, err := net.Dial("unix", socketOf(n))
	if err != nil {
		return ""
	}
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(limit)))
	if _, err := fmt.Fprintf(conn, format+"\n", args...); err != nil {
		return ""
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return ""
	}
	return strings.TrimSpace(line)
}

// duration reads the answer of an order that takes time.
func duration(t *testing.T, answer string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(answer)
	if err != nil {
		t.Fatalf("answer: %q", answer)
	}
	return d
}

func number(t *testing.T, answer string) int {
	t.Helper()
	n, err := strconv.Atoi(answer)
	if err != nil {
		t.Fatalf("answer: %q", answer)
	}
	return n
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
