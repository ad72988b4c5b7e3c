package s3

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// call is what the responses to one call's requests said beside their errors,
// which minio-go does not pass on. It travels in the context.
type call struct {
	mu sync.Mutex
	// pause is what a service that throttles asks for.
	pause time.Duration
	// skew is how far the service's clock is ahead of ours, if it refused.
	skew time.Duration
}

type callKey struct{}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	if c == nil {
		c = &call{}
	}
	return c
}

// watched looks at every response before minio-go does.
type watched struct{ base http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (w watched) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := w.base.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	callOf(r.Context()).note(response, time.Now())
	if err := mustBegin(r, response); err != nil {
		return nil, err
	}
	return response, nil
}

// note remembers what a refusal says in its headers: a HEAD has nothing else.
func (c *call) note(r *http.Response, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch r.StatusCode {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		c.pause = retryAfter(r.Header.Get("Retry-After"), now)
	case http.StatusForbidden:
		if date, err := http.ParseTime(r.Header.Get("Date")); err == nil {
			c.skew = date.Sub(now)
		}
	}
}

// maxPause bounds what a service may ask for.
const maxPause = time.Minute

// retryAfter reads the header of that name: seconds, or a date.
func retryAfter(v string, now time.Time) time.Duration {
	d := throttlePause
	if s, err := strconv.ParseUint(v, 10, 31); err == nil {
		d = time.Duration(s) * time.Second
	} else if at, err := http.ParseTime(v); err == nil {
		d = at.Sub(now)
	}
	return min(max(d, throttlePause), maxPause)
}

// mustBegin refuses a success whose document is another than was asked for: an
// error page that comes as a success would read as an empty list (OC3).
func mustBegin(r *http.Request, response *http.Response) error {
	want := document(r)
	if want == "" || response.StatusCode != http.StatusOK {
		return nil
	}
	const begin = 1 << 10 // a declaration, spaces and comments may come before
	b := bufio.NewReaderSize(response.Body, begin)
	got, _ := b.Peek(begin) // its error comes again when it is read
	if bytes.Contains(got, []byte("<"+want)) {
		response.Body = struct {
			io.Reader
			io.Closer
		}{b, response.Body}
		return nil
	}
	_ = response.Body.Close() // it is of no use
	return fmt.Errorf("the service answers a request for %s with something else: %.200q", want, got)
}

// document is the root of the XML document that answers a request, if it is one
// whose emptiness would be taken for an answer.
func document(r *http.Request) string {
	q := r.URL.Query()
	switch {
	case r.Method == http.MethodGet && q.Has("list-type"):
		return "ListBucketResult"
	case r.Method == http.MethodGet && q.Has("uploads"):
		return "ListMultipartUploadsResult"
	case r.Method == http.MethodPost && q.Has("delete"):
		return "DeleteResult"
	}
	return ""
}
