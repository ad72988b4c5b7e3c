package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestFaultClockStepsAndDrifts(t *testing.T) {
	truth := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	c := &faultClock{real: func() time.Time { return truth }}
	want := func(offset time.Duration) {
		t.Helper()
		if got := c.Now().Sub(truth); got != offset {
			t.Errorf("the clock is off by %v, want %v", got, offset)
		}
	}
	set := func(offset time.Duration, ppm int64) {
		t.Helper()
		if err := c.setTo(clockSetting{offset.Milliseconds(), ppm}); err != nil {
			t.Fatal(err)
		}
	}
	want(0)
	set(time.Hour, 0)
	want(time.Hour)
	truth = truth.Add(time.Hour)
	want(time.Hour)
	set(-time.Second, 1000)
	want(-time.Second)
	truth = truth.Add(1000 * time.Second)
	want(0) // gained 1 s
	set(0, -500_000)
	truth = truth.Add(time.Hour)
	want(-30 * time.Minute)
	set(0, 0)
	want(0)
	// Nothing overflows: a hundred years off, drifting for years.
	set(maxClockOffsetMs*time.Millisecond, maxClockDriftPPM)
	truth = truth.Add(10 * 365 * 24 * time.Hour)
	want(maxClockOffsetMs*time.Millisecond + 10*365*24*time.Hour)
}

func TestFaultClockOverHTTP(t *testing.T) {
	c := newFaultClock()
	for _, x := range []struct {
		method, body string
		code         int
		has          string
	}{
		{http.MethodGet, "", 200, `{"offsetMs":0,"driftPPM":0,"nowMs":`},
		{http.MethodPut, `{"offsetMs":86400000,"driftPPM":-5}`, 200, `{"offsetMs":86400000,"driftPPM":-5,"nowMs":`},
		{http.MethodPut, `{"offset":1}`, 400, "offset"},
		{http.MethodPut, ``, 400, ""},
		{http.MethodPut, `{"offsetMs":` + strings.Repeat("1", 5000) + `}`, 400, ""},
		{http.MethodPut, fmt.Sprintf(`{"offsetMs":%d}`, maxClockOffsetMs+1), 400, "offsetMs"},
		{http.MethodPut, `{"driftPPM":-1000001}`, 400, "driftPPM"},
		{http.MethodPost, `{"offsetMs":0}`, 405, ""},
		{http.MethodGet, "", 200, `{"offsetMs":86400000,"driftPPM":-5,"nowMs":`}, // refused ones changed nothing
	} {
		w := httptest.NewRecorder()
		c.ServeHTTP(w, httptest.NewRequest(x.method, clockPath, strings.NewReader(x.body)))
		if w.Code != x.code || !strings.Contains(w.Body.String(), x.has) {
			t.Errorf("%s %.60s: %d %s", x.method, x.body, w.Code, w.Body.String())
		}
	}
	if off := time.Until(c.Now()); off < 23*time.Hour || off > 25*time.Hour {
		t.Errorf("the clock is off by %v", off)
	}
}

// CN5: without the flag there is no such control.
func TestFaultClockExistsUnderItsFlagOnly(t *testing.T) {
	for _, on := range []bool{false, true} {
		tmp := t.TempDir()
		args := []string{"dev", "--grpc-addr", "127.0.0.1:0", "--http-addr", freeAddr(t)}
		web := "http://" + args[4]
		if on {
			args = append(args, "--fault-injection")
		}
		launch(t, tmp, args...)
		waitReady(t, web)
		req, err := http.NewRequest(http.MethodPut, web+clockPath, strings.NewReader(`{"offsetMs":3600000}`))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if want := map[bool]int{false: http.StatusNotFound, true: http.StatusOK}[on]; resp.StatusCode != want {
			t.Errorf("fault injection %v: %d %s", on, resp.StatusCode, body)
		}
	}
}
