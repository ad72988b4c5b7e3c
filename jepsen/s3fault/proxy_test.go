package s3fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// object is what the service answers to every GET.
var object = bytes.Repeat([]byte("0123456789"), 2000)

// service is a fake one: it keeps what was put last.
type service struct {
	whole, broken atomic.Int64 // uploads
	host          atomic.Value
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.host.Store(r.Host)
	w.Header().Set("X-Said", r.Header.Get("Authorization"))
	if r.Method == http.MethodPut {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			s.broken.Add(1)
			return
		}
		s.whole.Add(1)
		return
	}
	if r.URL.Path == "/b/missing" {
		w.WriteHeader(http.StatusNotFound)
	}
	w.Header().Set("Content-Length", fmt.Sprint(len(object)))
	if r.Method == http.MethodGet {
		_, _ = w.Write(object)
	}
}

type rig struct {
	*Proxy
	service *service
	client  *http.Client
	url     string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	s := &service{}
	backend := httptest.NewServer(s)
	t.Cleanup(backend.Close)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	r := &rig{service: s, url: "http://" + l.Addr().String(), client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}}
	r.Proxy = New(l, strings.TrimPrefix(backend.URL, "http://"))
	t.Cleanup(func() { must(t, r.Close()) })
	return r
}

func (r *rig) inject(t *testing.T, f Fault) *Active {
	t.Helper()
	if f.Share == 0 {
		f.Share = 1
	}
	a, err := r.Inject(f)
	must(t, err)
	return a
}

func (r *rig) get(path string) (status int, body []byte, err error) {
	req, err := http.NewRequest(http.MethodGet, r.url+path, nil)
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "signed")
	resp, err := r.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	return resp.StatusCode, body, err
}

func (r *rig) put(size int) error {
	req, err := http.NewRequest(http.MethodPut, r.url+"/b/k", bytes.NewReader(make([]byte, size)))
	if err != nil {
		return err
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// whole says that nothing is wrong (SF1).
func (r *rig) whole(t *testing.T) {
	t.Helper()
	status, body, err := r.get("/b/k")
	if err != nil || status != 200 || !bytes.Equal(body, object) {
		t.Errorf("without a fault: %d, %d bytes, %v", status, len(body), err)
	}
	if got := r.service.host.Load(); "http://"+got.(string) != r.url {
		t.Errorf("the service was asked for %v", got)
	}
	before := r.service.whole.Load()
	if err := r.put(100_000); err != nil || r.service.whole.Load() != before+1 {
		t.Errorf("without a fault: %v", err)
	}
}

// TestFaults: each does what it says, counts what it hit and is gone after Remove
// (SF1 to SF4).
func TestFaults(t *testing.T) {
	// Which error a client has depends on what it was doing.
	isReset := func(err error) bool { return err != nil && !errors.Is(err, context.DeadlineExceeded) }
	for _, c := range []struct {
		fault Fault
		met   int
		check func(t *testing.T, r *rig)
	}{
		{Fault{Kind: Down}, 1, func(t *testing.T, r *rig) {
			if _, _, err := r.get("/b/k"); !isReset(err) {
				t.Error(err)
			}
		}},
		{Fault{Kind: Throttle}, 1, func(t *testing.T, r *rig) {
			if status, body, err := r.get("/b/k"); err != nil || status != 503 || !strings.Contains(string(body), "<Code>SlowDown</Code>") {
				t.Error(status, string(body), err)
			}
		}},
		{Fault{Kind: Errors}, 1, func(t *testing.T, r *rig) {
			if status, body, err := r.get("/b/k"); err != nil || status != 500 || !strings.Contains(string(body), "InternalError") {
				t.Error(status, string(body), err)
			}
		}},
		{Fault{Kind: LostAnswer}, 1, func(t *testing.T, r *rig) {
			if err := r.put(100); !isReset(err) || r.service.whole.Load() != 1 {
				t.Errorf("%v; the service stored %d", err, r.service.whole.Load())
			}
		}},
		{Fault{Kind: CutBody}, 3, func(t *testing.T, r *rig) {
			_, body, err := r.get("/b/k")
			if !errors.Is(err, io.ErrUnexpectedEOF) || len(body) != len(object)*6/10 {
				t.Errorf("%d bytes of %d, %v", len(body), len(object), err)
			}
			if _, body, err = r.get("/b?list-type=2"); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("a list: %d bytes, %v", len(body), err)
			}
			if err := r.put(100_000); !isReset(err) || r.service.whole.Load() != 0 {
				t.Errorf("%v; the service stored %d", err, r.service.whole.Load())
			}
			if _, body, err := r.get("/b/missing"); err != nil || len(body) != len(object) {
				t.Errorf("an error is no body: %v", err)
			}
		}},
		{Fault{Kind: WrongBytes, Seed: 5}, 1, func(t *testing.T, r *rig) {
			_, body, err := r.get("/b/k")
			wrong := 0
			for i := range body {
				if body[i] != object[i] {
					wrong++
				}
			}
			if err != nil || len(body) != len(object) || wrong != 1 {
				t.Errorf("%d wrong of %d bytes, %v", wrong, len(body), err)
			}
			for _, path := range []string{"/b?list-type=2", "/b/?location", "/b/k?uploadId=1", "/b/missing"} {
				if _, body, err := r.get(path); err != nil || !bytes.Equal(body, object) {
					t.Errorf("%s is no object: %v", path, err)
				}
			}
		}},
		{Fault{Kind: Slow, Delay: 50 * time.Millisecond, BytesPerSecond: 100_000}, 1, func(t *testing.T, r *rig) {
			began := time.Now()
			if _, body, err := r.get("/b/k"); err != nil || !bytes.Equal(body, object) {
				t.Error(err)
			}
			if took := time.Since(began); took < 230*time.Millisecond {
				t.Errorf("20 kB at 100 kB/s and 50 ms took %s", took)
			}
		}},
		{Fault{Kind: Down, From: []string{"192.0.2.1"}}, 0, func(t *testing.T, r *rig) { r.whole(t) }},
		{Fault{Kind: Down, From: []string{"127.0.0.1"}}, 1, func(t *testing.T, r *rig) {
			if _, _, err := r.get("/b/k"); !isReset(err) {
				t.Error(err)
			}
		}},
	} {
		name := string(c.fault.Kind) + strings.Join(c.fault.From, "")
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.whole(t)
			r.service.whole.Store(0)
			a := r.inject(t, c.fault)
			c.check(t, r)
			if met := a.Remove(); met != c.met || a.Remove() != met {
				t.Errorf("it met %d requests, not %d", met, c.met)
			}
			r.whole(t)
		})
	}
}

// TestHang: a request that hangs ends when the fault does, without an answer, and
// the one after it is served (SF3).
func TestHang(t *testing.T) {
	r := newRig(t)
	a := r.inject(t, Fault{Kind: Hang})
	done := make(chan error, 1)
	go func() { _, _, err := r.get("/b/k"); done <- err }()
	for a.Met() == 0 {
		select {
		case err := <-done:
			t.Fatalf("it was answered: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	select {
	case err := <-done:
		t.Fatalf("it was answered: %v", err)
	case <-ctx.Done():
	}
	a.Remove()
	if err := <-done; err == nil {
		t.Error("it was answered after all")
	}
	r.whole(t)
}

// TestShare: about the share is hit, the same of a seed, and several faults work
// side by side; Clear ends all.
func TestShare(t *testing.T) {
	r := newRig(t)
	hits := func() string {
		a := r.inject(t, Fault{Kind: Throttle, Share: 0.4, Seed: 9})
		defer a.Remove()
		var all strings.Builder
		for range 50 {
			status, _, err := r.get("/b/k")
			must(t, err)
			fmt.Fprint(&all, status/500)
		}
		if met := a.Met(); met != strings.Count(all.String(), "1") || met < 5 || met > 40 {
			t.Errorf("%d of 50 with a share of 0.4: %s", met, all.String())
		}
		return all.String()
	}
	if a, b := hits(), hits(); a != b {
		t.Errorf("one seed hits %s and %s", a, b)
	}
	first, second := r.inject(t, Fault{Kind: WrongBytes}), r.inject(t, Fault{Kind: Slow, Delay: time.Millisecond})
	if _, body, err := r.get("/b/k"); err != nil || bytes.Equal(body, object) || first.Met() != 1 || second.Met() != 1 {
		t.Errorf("%v, %d, %d", err, first.Met(), second.Met())
	}
	r.Clear()
	if r.Faults() != 0 {
		t.Error("faults are left")
	}
	r.whole(t)
	if n := r.Requests(); n != 103 {
		t.Errorf("%d requests", n)
	}
}

func TestFaultsThatCannotBe(t *testing.T) {
	r := newRig(t)
	for _, f := range []Fault{{Kind: "nonsense", Share: 1}, {Kind: Down}, {Kind: Down, Share: 1.5}, {Kind: Slow, Share: 1, Delay: -1}, {Kind: Slow, Share: 1, BytesPerSecond: -1}} {
		if _, err := r.Inject(f); err == nil {
			t.Errorf("%+v was taken", f)
		}
	}
}

// TestClose: a proxy that is closed ends what hangs, and what it listened on is
// free (SF5).
func TestClose(t *testing.T) {
	r := newRig(t)
	a := r.inject(t, Fault{Kind: Hang})
	done := make(chan error, 1)
	go func() { _, _, err := r.get("/b/k"); done <- err }()
	for a.Met() == 0 {
		<-time.After(time.Millisecond)
	}
	must(t, r.Close())
	if err := <-done; err == nil {
		t.Error("it was answered")
	}
	l, err := net.Listen("tcp", strings.TrimPrefix(r.url, "http://"))
	must(t, err)
	must(t, l.Close())
}
