//go:build failpoints

package failpoint

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	aHit  = "raftlog.append.after-sync"
	anErr = "raftlog.append.before-sync"
	anInt = "raftlog.segment-bytes"
)

func arm(t *testing.T, list string) {
	t.Helper()
	if err := Arm(list); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(Disarm)
}

// TestUnarmed is FP3.
func TestUnarmed(t *testing.T) {
	Hit(aHit)
	if err, n := Err(anErr), Int(anInt, 7); err != nil || n != 7 {
		t.Fatal(err, n)
	}
}

func TestCounts(t *testing.T) {
	for list, want := range map[string]string{
		"": ".....", "error": "!!!!!", "error@2": "..!!!", "error*2": "!!...", "error(EIO)@1*3": ".!!!.", "error@9": ".....",
	} {
		if list != "" {
			list = anErr + "=" + list
		}
		arm(t, list)
		got := ""
		for range 5 {
			got += map[bool]string{true: ".", false: "!"}[Err(anErr) == nil]
		}
		if got != want {
			t.Errorf("%q: %s, want %s", list, got, want)
		}
		Disarm()
	}
}

func TestErrors(t *testing.T) {
	for arg, want := range map[string]error{"": syscall.EIO, "(EIO)": syscall.EIO, "(ENOSPC)": syscall.ENOSPC, "(EROFS)": syscall.EROFS} {
		arm(t, anErr+"=error"+arg)
		if err := Err(anErr); !errors.Is(err, want) || !strings.Contains(err.Error(), anErr) {
			t.Errorf("%s: %v", arg, err)
		}
	}
	arm(t, anErr+"=error(no such luck)")
	if err := Err(anErr); err == nil || !strings.Contains(err.Error(), "no such luck") {
		t.Error(err)
	}
}

func TestDelayStallPanicInt(t *testing.T) {
	arm(t, aHit+"=delay(30ms); "+anInt+"=value(12)*1")
	start := time.Now()
	if Hit(aHit); time.Since(start) < 30*time.Millisecond {
		t.Error("it did not wait")
	}
	if a, b := Int(anInt, 7), Int(anInt, 7); a != 12 || b != 7 {
		t.Error(a, b)
	}
	for _, let := range []func(){func() { _ = Release(aHit) }, Disarm, func() { _ = Arm(aHit + "=off") }, func() { _ = Arm(aHit + "=delay(1ns)") }} {
		arm(t, aHit+"=stall")
		gone := make(chan struct{})
		go func() { Hit(aHit); close(gone) }()
		select {
		case <-gone:
			t.Fatal("it did not stall")
		case <-time.After(20 * time.Millisecond):
		}
		let()
		<-gone
		Disarm()
	}
	arm(t, aHit+"=panic")
	defer func() {
		if r := recover(); r == nil {
			t.Error("no panic")
		}
	}()
	Hit(aHit)
}

// TestBadLists is FP4.
func TestBadLists(t *testing.T) {
	for _, bad := range []string{
		"no.such=crash", aHit, aHit + "=", aHit + "=bang", aHit + "=error", aHit + "=value(1)", anErr + "=value(1)", anInt + "=crash",
		anInt + "=value(x)", anInt + "=value", aHit + "=delay", aHit + "=delay(-1s)", aHit + "=delay(1s", aHit + "=crash(1)",
		aHit + "=crash@", aHit + "=crash@x", aHit + "=crash*0", aHit + "=crash*", aHit + "=crash@-1",
	} {
		if err := Arm(anErr + "=error;" + bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
		if err := Err(anErr); err != nil {
			t.Fatalf("%q armed something: %v", bad, err)
		}
	}
}

func TestHTTP(t *testing.T) {
	t.Cleanup(Disarm)
	call := func(method, target, body string) (int, string) {
		w := httptest.NewRecorder()
		ServeHTTP(w, httptest.NewRequest(method, target, strings.NewReader(body)))
		return w.Code, w.Body.String()
	}
	if code, body := call("POST", "/", anErr+"=error@1"); code != http.StatusOK || !strings.Contains(body, `"armed":"error@1"`) {
		t.Error(code, body)
	}
	if a, b := Err(anErr), Err(anErr); a != nil || b == nil {
		t.Error(a, b)
	}
	if code, body := call("POST", "/", "x=crash"); code != http.StatusBadRequest || !strings.Contains(body, `"x"`) {
		t.Error(code, body)
	}
	if code, _ := call("POST", "/", strings.Repeat(";", maxList+1)); code != http.StatusBadRequest {
		t.Error(code)
	}
	if code, _ := call("POST", "/?release="+anErr, ""); code != http.StatusOK {
		t.Error(code)
	}
	if code, _ := call("POST", "/?release=x", ""); code != http.StatusBadRequest {
		t.Error(code)
	}
	if code, _ := call("PUT", "/", ""); code != http.StatusMethodNotAllowed {
		t.Error(code)
	}
	if code, body := call("DELETE", "/", ""); code != http.StatusOK || strings.Contains(body, "armed") || Err(anErr) != nil {
		t.Error(code, body)
	}
}

// TestUnregistered: a wrong name or kind is a bug, which shows at once.
func TestUnregistered(t *testing.T) {
	for _, f := range []func(){func() { Hit("no.such") }, func() { Hit(anErr) }, func() { _ = Err(aHit) }, func() { Int(aHit, 1) }} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		}()
	}
}

// TestEndsTheProcess ends a process at the third arrival, with no deferred call run.
func TestEndsTheProcess(t *testing.T) {
	if os.Getenv("FAILPOINT_CHILD") != "" {
		defer os.Stdout.WriteString("deferred")
		if err := Arm(aHit + "=crash@2"); err != nil {
			t.Fatal(err)
		}
		for range 5 {
			os.Stdout.WriteString("before ")
			Hit(aHit)
		}
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestEndsTheProcess$")
	cmd.Env = append(os.Environ(), "FAILPOINT_CHILD=1")
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL || string(out) != "before before before " ||
		!strings.Contains(errs.String(), "failpoint: crash at "+aHit+"\n") {
		t.Errorf("%v, %q, %q", err, out, errs.String())
	}
}
