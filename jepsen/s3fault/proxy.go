package s3fault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Proxy passes requests on to a service.
type Proxy struct {
	backend   string
	transport *http.Transport
	server    *http.Server
	cancel    context.CancelFunc
	// served has the listener, and each request that began before closed was set.
	served sync.WaitGroup

	mu struct {
		sync.Mutex
		closed bool
		active []*Active
		// requests counts all.
		requests int
	}
}

// New serves what a listener accepts by passing it on to the service at backend,
// host:port. Close it.
func New(l net.Listener, backend string) *Proxy {
	// Requests that are held end with the proxy.
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proxy{backend: backend, cancel: cancel, transport: &http.Transport{
		Proxy:       nil, // whatever the environment says
		DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
		// A body is passed on as it was stored (SF1).
		DisableCompression: true, MaxIdleConnsPerHost: 64, IdleConnTimeout: 30 * time.Second,
	}}
	p.server = &http.Server{Handler: p, BaseContext: func(net.Listener) context.Context { return ctx }, ReadHeaderTimeout: time.Minute,
		// What nodes that are killed leave half done is nothing to tell.
		ErrorLog: log.New(io.Discard, "", 0)}
	p.served.Go(func() { _ = p.server.Serve(l) }) // it ends by Close
	return p
}

// Close ends everything that is under way (SF5).
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.mu.closed = true
	p.mu.Unlock()
	p.cancel()
	err := p.server.Close()
	p.served.Wait()
	p.transport.CloseIdleConnections()
	return err
}

// Inject puts a fault in force.
func (p *Proxy) Inject(f Fault) (*Active, error) {
	if err := f.validate(); err != nil {
		return nil, err
	}
	a := &Active{Fault: f, proxy: p, over: make(chan struct{}), rnd: rand.New(rand.NewPCG(f.Seed, 0x7333))}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.active = append(p.mu.active, a)
	return a, nil
}

// Clear ends all faults.
func (p *Proxy) Clear() {
	p.mu.Lock()
	all := append([]*Active(nil), p.mu.active...)
	p.mu.Unlock()
	for _, a := range all {
		a.Remove()
	}
}

// Faults is how many faults are in force.
func (p *Proxy) Faults() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.mu.active)
}

// Met is how many requests the faults in force have hit.
func (p *Proxy) Met() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	met := 0
	for _, a := range p.mu.active {
		met += a.Met()
	}
	return met
}

// Requests is how many requests came so far.
func (p *Proxy) Requests() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.requests
}

// enter counts a request that begins; none does after Close.
func (p *Proxy) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return false
	}
	p.mu.requests++
	p.served.Add(1)
	return true
}

// hit is the fault of a kind that hits a request, or nil.
func (p *Proxy) hit(r *http.Request, kind Kind) *Active {
	from, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		from = r.RemoteAddr
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.mu.active {
		if a.Kind == kind && a.hits(from) {
			return a
		}
	}
	return nil
}

// ServeHTTP passes a request on, or does what the faults in force say.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !p.enter() {
		reset(w)
	}
	defer p.served.Done()
	if p.hit(r, Down) != nil {
		reset(w)
	}
	if a := p.hit(r, Hang); a != nil {
		_ = a.await(r.Context(), 0) // then it is too late for an answer
		reset(w)
	}
	slow := p.hit(r, Slow)
	if slow != nil && slow.Delay > 0 {
		if err := slow.await(r.Context(), slow.Delay); err != nil {
			reset(w)
		}
	}
	if a := p.hit(r, Throttle); a != nil {
		if a.below(2) == 0 {
			w.Header().Set("Retry-After", "1")
		}
		refuse(w, http.StatusServiceUnavailable, "SlowDown", "Please reduce your request rate.")
		return
	}
	if p.hit(r, Errors) != nil {
		refuse(w, http.StatusInternalServerError, "InternalError", "We encountered an internal error. Please try again.")
		return
	}
	p.pass(w, r, slow)
}

// refuse is an error as S3 has them.
func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, `<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>%s</Message></Error>`, code, message)
}

// reset ends the connection of a request, as a peer that is gone does. It does not
// return.
func reset(w http.ResponseWriter) {
	if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // else it would be a proper end
		}
		_ = conn.Close()
	}
	panic(http.ErrAbortHandler) // which the server takes for what it is
}

// errCut ends an upload.
var errCut = errors.New("the upload is cut off")

// pass passes a request on, and its answer back.
func (p *Proxy) pass(w http.ResponseWriter, r *http.Request, slow *Active) {
	out := r.Clone(r.Context())
	out.URL.Scheme, out.URL.Host, out.RequestURI = "http", p.backend, ""
	out.Host = r.Host // it is signed
	if r.ContentLength != 0 {
		body := io.Reader(r.Body)
		if r.ContentLength > 1 && p.hit(r, CutBody) != nil {
			body = io.MultiReader(io.LimitReader(body, part(r.ContentLength)), failing{errCut})
		}
		out.Body = struct {
			io.Reader
			io.Closer
		}{slowly(r.Context(), body, slow), r.Body}
	}
	resp, err := p.transport.RoundTrip(out)
	if err != nil {
		reset(w) // the service is gone, or the upload was cut
	}
	defer resp.Body.Close()
	if p.hit(r, LostAnswer) != nil {
		_, _ = io.Copy(io.Discard, resp.Body) // it is done all the same
		resp.Body.Close()
		reset(w)
	}
	for k, vs := range resp.Header {
		w.Header()[k] = vs
	}
	w.Header().Del("Connection") // that is between the service and us
	if resp.ContentLength >= 0 {
		w.Header().Set("Content-Length", strconv.FormatInt(resp.ContentLength, 10))
	}
	body, cut := p.harm(r, resp)
	w.WriteHeader(resp.StatusCode)
	if _, err := io.Copy(w, slowly(r.Context(), body, slow)); err != nil || cut {
		_ = http.NewResponseController(w).Flush() // what has come so far
		panic(http.ErrAbortHandler)
	}
}

// harm is what is sent of the body of an answer, and whether that is cut.
func (p *Proxy) harm(r *http.Request, resp *http.Response) (body io.Reader, cut bool) {
	body = resp.Body
	if r.Method == http.MethodHead || resp.StatusCode >= 300 || resp.ContentLength < 2 {
		return body, false
	}
	if isObject(r) {
		if a := p.hit(r, WrongBytes); a != nil {
			body = &flipped{in: body, left: a.below(resp.ContentLength)}
		}
	}
	if p.hit(r, CutBody) != nil {
		return io.LimitReader(body, part(resp.ContentLength)), true
	}
	return body, false
}

// part is 60 % of a body.
func part(of int64) int64 { return of - max(1, 2*of/5) }

// failing is a reader that only fails.
type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// flipped changes the byte behind left others.
type flipped struct {
	in   io.Reader
	left int64
}

func (f *flipped) Read(b []byte) (int, error) {
	n, err := f.in.Read(b)
	if f.left >= 0 && f.left < int64(n) {
		b[f.left] ^= 0x20
	}
	f.left -= int64(n)
	return n, err
}

// slowed passes bytes at the rate of a fault.
type slowed struct {
	ctx context.Context
	in  io.Reader
	by  *Active
}

func slowly(ctx context.Context, in io.Reader, by *Active) io.Reader {
	if by == nil || by.BytesPerSecond == 0 {
		return in
	}
	return &slowed{ctx, in, by}
}

func (s *slowed) Read(b []byte) (int, error) {
	n, err := s.in.Read(b[:min(len(b), 8<<10)])
	if waited := s.by.pass(s.ctx, n); waited != nil {
		return n, waited
	}
	return n, err
}

// cutPath parts the path of a request into bucket and key.
func cutPath(path string) (bucket, key string, found bool) {
	return strings.Cut(strings.TrimPrefix(path, "/"), "/")
}
