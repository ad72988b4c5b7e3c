//go:build linux

package nemesis

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/host"
)

func TestHTTPClockSaysWhatTheNodeIsToSee(t *testing.T) {
	var got []string
	status := http.StatusOK
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = append(got, r.Method+" "+r.URL.Path+" "+string(body))
		w.WriteHeader(status)
		_, _ = io.WriteString(w, "no such page\n")
	}))
	defer s.Close()
	n := &host.Node{HTTP: strings.TrimPrefix(s.URL, "http://")}
	c := NewHTTPClock(time.Minute)
	must(t, c.Set(t.Context(), n, -90*time.Second, 500))
	must(t, c.Set(t.Context(), n, 0, 0))
	for i, want := range []string{`PUT /debug/fault/clock {"driftPPM":500,"offsetMs":-90000}`, `PUT /debug/fault/clock {"driftPPM":0,"offsetMs":0}`} {
		if got[i] != want {
			t.Errorf("call %d: %s, want %s", i, got[i], want)
		}
	}
	// A node without the flag is no success.
	status = http.StatusNotFound
	if err := c.Set(t.Context(), n, time.Second, 0); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("a node without the control: %v", err)
	}
}
