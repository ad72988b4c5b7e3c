package s3

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/s3server"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
)

// against returns a store whose service is h, for what no real service can be
// brought to say.
func against(t *testing.T, h http.HandlerFunc, change ...func(*Options)) *Store {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	o := Options{Endpoint: strings.TrimPrefix(server.URL, "http://"), Bucket: "bucket", Insecure: true, Region: "us-east-1",
		AccessKey: "an-access-key", SecretKey: "a-secret-key", PartBytes: minPartBytes}
	for _, c := range change {
		c(&o)
	}
	return open(t, o)
}

func refuse(w http.ResponseWriter, status int, code string) {
	w.WriteHeader(status)
	fmt.Fprintf(w, "<?xml version=\"1.0\"?><Error><Code>%s</Code><Message>refused</Message></Error>", code)
}

// every does each operation once.
func every(s *Store) map[string]error {
	ctx := context.Background()
	all := map[string]error{
		"put":    s.Put(ctx, "k", objectstore.Bytes([]byte("v"))),
		"parts":  s.Put(ctx, "k", objectstore.Bytes(objectstoretest.Pattern(minPartBytes+1))),
		"delete": s.Delete(ctx, "k"),
		"list":   nil,
	}
	_, all["stat"] = s.Stat(ctx, "k")
	_, all["sweep"] = s.Sweep(ctx, "", time.Now())
	_, all["get"] = read(s, "k")
	for _, err := range s.List(ctx, "", "") {
		all["list"] = err
	}
	return all
}

// Whatever a service refuses, every call says so, with a hint and, where it asks
// for one, a pause; and it was asked once.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name   string
		status int
		code   string
		header http.Header
		hint   string
		pause  time.Duration
	}{
		{"throttled", 503, "SlowDown", nil, "fewer requests", time.Second},
		{"throttled, with a time", 503, "SlowDown", http.Header{"Retry-After": {"7"}}, "fewer requests", 7 * time.Second},
		{"throttled for long", 429, "TooManyRequests", http.Header{"Retry-After": {"86400"}}, "fewer requests", time.Minute},
		{"throttled, nonsense", 503, "SlowDown", http.Header{"Retry-After": {"-5 minutes"}}, "fewer requests", time.Second},
		{"clock", 403, "RequestTimeTooSkewed", http.Header{"Date": {time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat)}}, "clock", 0},
		{"clock, by another name", 403, "AccessDenied", http.Header{"Date": {time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)}}, "clock", 0},
		{"forbidden", 403, "AccessDenied", nil, "credentials", 0},
		{"signature", 403, "SignatureDoesNotMatch", nil, "credentials", 0},
		{"full", 507, "XMinioStorageFull", nil, "no space", 0},
		{"broken", 500, "InternalError", nil, "log", 0},
	} {
		var asked atomic.Int32
		s := against(t, func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			for k, v := range c.header {
				w.Header()[k] = v
			}
			refuse(w, c.status, c.code)
		})
		all := every(s)
		for op, err := range all {
			var detail *base.Error
			if !hinted(err, c.hint) || !errors.As(err, &detail) {
				// A HEAD has no body, so no code: its status must do.
				if op != "stat" && op != "get" || !errors.Is(err, base.ErrObjectStore) {
					t.Errorf("%s: %s: %v", c.name, op, err)
				}
				continue
			}
			if detail.RetryAfter != c.pause {
				t.Errorf("%s: %s asks for a pause of %v, want %v", c.name, op, detail.RetryAfter, c.pause)
			}
		}
		// The upload in parts looks whether the key is taken first.
		if n := int(asked.Load()); n != len(all)+1 {
			t.Errorf("%s: %d requests for %d calls", c.name, n, len(all))
		}
	}
}

// OC5: not even what a service sends back, or a careless log, shows a secret.
func TestSecretsAreNotTold(t *testing.T) {
	const secret = "a-secret-key"
	s := against(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(400)
		fmt.Fprintf(w, "<Error><Code>Bad</Code><Message>you are %s with %s</Message></Error>", secret, r.Header.Get("Authorization"))
	})
	for op, err := range every(s) {
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", op, err)
		}
	}
	o := Options{SecretKey: secret}
	var b bytes.Buffer
	slog.New(slog.NewJSONHandler(&b, nil)).Info("x", "o", o, "p", &o, "key", o.SecretKey)
	slog.New(slog.NewTextHandler(&b, nil)).Info("x", "o", o, "p", &o, "key", o.SecretKey)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		fmt.Fprintf(&b, verb, o)
		fmt.Fprintf(&b, verb, o.SecretKey)
		fmt.Fprintf(&b, verb, s.o)
	}
	if text := b.String(); strings.Contains(text, secret) || strings.Contains(text, fmt.Sprintf("%x", secret)) || !strings.Contains(text, redacted) {
		t.Errorf("printed: %s", text)
	}
}

func page(truncated bool, token string, keys ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "<?xml version=\"1.0\"?><ListBucketResult><Name>bucket</Name><IsTruncated>%v</IsTruncated>", truncated)
	if token != "" {
		fmt.Fprintf(&b, "<NextContinuationToken>%s</NextContinuationToken>", token)
	}
	for _, k := range keys {
		fmt.Fprintf(&b, "<Contents><Key>%s</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>", k)
	}
	return b.String() + "</ListBucketResult>"
}

// B54, OC3: a list that is not whole is an error, never a shorter list.
func TestListsThatAreNotWhole(t *testing.T) {
	good := page(false, "", "a", "b", "c")
	for name, pages := range map[string][]string{
		"error page as a success":     {"<Error><Code>InternalError</Code></Error>"},
		"web page as a success":       {"<html><body>please log in</body></html>"},
		"nothing as a success":        {""},
		"cut":                         {good[:len(good)/2]},
		"cut at the end":              {good[:len(good)-len("</ListBucketResult>")]},
		"truncated without a token":   {page(true, "", "a")},
		"out of order":                {page(false, "", "b", "a")},
		"twice the same":              {page(false, "", "a", "a")},
		"second page begins again":    {page(true, "t", "a", "b"), page(false, "", "a", "b")},
		"second page is an error":     {page(true, "t", "a", "b"), "!503"},
		"second page is another text": {page(true, "t", "a", "b"), "<Error><Code>SlowDown</Code></Error>"},
		"the same page for ever":      {page(true, "t", "a", "b"), page(true, "t", "a", "b"), page(true, "t", "a", "b")},
		"foreign prefix":              {page(false, "", "elsewhere")},
	} {
		n := -1
		s := against(t, func(w http.ResponseWriter, r *http.Request) {
			if n++; n >= len(pages) {
				n = len(pages) - 1
			}
			if pages[n] == "!503" {
				refuse(w, 503, "SlowDown")
				return
			}
			fmt.Fprint(w, pages[n])
		})
		var last error
		prefix := ""
		if name == "foreign prefix" {
			prefix = "a"
		}
		for _, err := range s.List(context.Background(), prefix, "") {
			last = err
		}
		if !errors.Is(last, base.ErrObjectStore) {
			t.Errorf("%s: %v", name, last)
		}
	}
	// What no key can be called is not ours, and not listed.
	s := against(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, page(false, "", "a", "b/", "c d", "e")) })
	if got := keys(t, s); len(got) != 2 {
		t.Errorf("listed %v", got)
	}
}

// OC3: a deletion that is not answered for is not done.
func TestDeletionsThatAreNotDone(t *testing.T) {
	const gone = "<Deleted><Key>a</Key></Deleted><Deleted><Key>b</Key></Deleted>"
	for name, c := range map[string]struct {
		answer string
		want   error
	}{
		"done":            {"<DeleteResult>" + gone + "</DeleteResult>", nil},
		"one is silent":   {"<DeleteResult><Deleted><Key>a</Key></Deleted></DeleteResult>", base.ErrObjectStore},
		"all are silent":  {"<DeleteResult></DeleteResult>", base.ErrObjectStore},
		"another key":     {"<DeleteResult><Deleted><Key>a</Key></Deleted><Deleted><Key>c</Key></Deleted></DeleteResult>", base.ErrObjectStore},
		"one is refused":  {"<DeleteResult><Deleted><Key>a</Key></Deleted><Error><Key>b</Key><Code>AccessDenied</Code></Error></DeleteResult>", base.ErrObjectStore},
		"one is invalid":  {"<DeleteResult><Deleted><Key>a</Key></Deleted><Error><Key>b</Key><Code>InvalidArgument</Code></Error></DeleteResult>", base.ErrObjectStore},
		"one was absent":  {"<DeleteResult><Deleted><Key>a</Key></Deleted><Error><Key>b</Key><Code>NoSuchKey</Code></Error></DeleteResult>", nil},
		"an error":        {"<Error><Code>InternalError</Code></Error>", base.ErrObjectStore},
		"something other": {"ok", base.ErrObjectStore},
		"cut":             {"<DeleteResult>" + gone, base.ErrObjectStore},
	} {
		s := against(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, c.answer) })
		if err := s.Delete(context.Background(), "a", "b"); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// B52: whatever a body lacks or has too much is an error.
func TestBodiesThatAreNotWhole(t *testing.T) {
	const size = 100_000
	whole := objectstoretest.Pattern(size)
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter)
		want   error
	}{
		"cut": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "100000")
			_, _ = w.Write(whole[:size*6/10])
			panic(http.ErrAbortHandler)
		}, base.ErrObjectStore},
		"cut, of no length":   {func(w http.ResponseWriter) { _, _ = w.Write(whole[:size*6/10]); panic(http.ErrAbortHandler) }, base.ErrObjectStore},
		"short, of no length": {func(w http.ResponseWriter) { _, _ = w.Write(whole[:size*6/10]); w.(http.Flusher).Flush() }, base.ErrCorrupt},
		"short":               {func(w http.ResponseWriter) { w.Header().Set("Content-Length", "60000"); _, _ = w.Write(whole[:60_000]) }, base.ErrCorrupt},
		"long": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "100001")
			_, _ = w.Write(append(whole, 1))
		}, base.ErrCorrupt},
		"empty":      {func(w http.ResponseWriter) { w.Header().Set("Content-Length", "0") }, base.ErrCorrupt},
		"error text": {func(w http.ResponseWriter) { fmt.Fprint(w, "<Error><Code>InternalError</Code></Error>") }, base.ErrCorrupt},
		"other range": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Range", "bytes 1-100000/100001")
			w.Header().Set("Content-Length", "100000")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(whole)
		}, base.ErrCorrupt},
		"stalled": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "100000")
			_, _ = w.Write(whole[:10])
			w.(http.Flusher).Flush()
			<-stall(t)
		}, base.ErrObjectStore},
		"no answer": {func(w http.ResponseWriter) { <-stall(t) }, base.ErrObjectStore},
	} {
		s := against(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodHead {
				w.Header().Set("Content-Length", fmt.Sprint(size))
				w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
				return
			}
			w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
			c.answer(w)
		}, func(o *Options) { o.Idle = 200 * time.Millisecond })
		for _, length := range []int64{-1, size} {
			r, err := s.Get(context.Background(), "k", 0, length)
			if err == nil {
				_, err = io.Copy(io.Discard, r)
				_ = r.Close()
			}
			if !errors.Is(err, c.want) {
				t.Errorf("%s, length %d: %v", name, length, err)
			}
		}
	}
}

// stall blocks for longer than the client waits, but ends.
func stall(t *testing.T) <-chan time.Time {
	t.Helper()
	return time.After(time.Second)
}

// OC1: an upload in parts that did not become the object is an error.
func TestPartsThatDoNotBecomeTheObject(t *testing.T) {
	const size = minPartBytes + 1
	for name, c := range map[string]struct {
		complete string
		became   int64
		want     error
		aborted  bool
	}{
		"as it should":        {"<CompleteMultipartUploadResult><Bucket>bucket</Bucket><Key>k</Key><ETag>x</ETag></CompleteMultipartUploadResult>", size, nil, false},
		"other size":          {"<CompleteMultipartUploadResult><Bucket>bucket</Bucket><Key>k</Key><ETag>x</ETag></CompleteMultipartUploadResult>", size - 1, base.ErrCorrupt, false},
		"error as a success":  {"<Error><Code>InternalError</Code></Error>", size, base.ErrObjectStore, true},
		"conflict as success": {"<Error><Code>PreconditionFailed</Code></Error>", size, base.ErrConflict, true},
	} {
		aborted, completed := false, false
		s := against(t, func(w http.ResponseWriter, r *http.Request) {
			q := r.URL.Query()
			switch {
			case r.Method == http.MethodHead && !completed:
				w.WriteHeader(http.StatusNotFound)
			case r.Method == http.MethodHead:
				w.Header().Set("Content-Length", fmt.Sprint(c.became))
				w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
			case r.Method == http.MethodPost && q.Has("uploads"):
				fmt.Fprint(w, "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
			case r.Method == http.MethodPut:
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("ETag", "\"x\"")
			case r.Method == http.MethodPost:
				if r.Header.Get("If-None-Match") != "*" {
					t.Errorf("%s: the completion has no condition", name)
				}
				completed = true
				fmt.Fprint(w, c.complete)
			case r.Method == http.MethodDelete:
				aborted = true
				w.WriteHeader(http.StatusNoContent)
			}
		})
		err := s.Put(context.Background(), "k", objectstore.Bytes(objectstoretest.Pattern(size)))
		if !errors.Is(err, c.want) || aborted != c.aborted {
			t.Errorf("%s: %v, aborted: %v", name, err, aborted)
		}
	}
}

// OC6, and the places where credentials are looked for, in their order.
func TestWhereCredentialsComeFrom(t *testing.T) {
	server := s3server.Run(t)
	dir := t.TempDir()
	for _, v := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY", "AWS_SECRET_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE",
		"MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD", "MINIO_ACCESS_KEY", "MINIO_SECRET_KEY", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
		"AWS_WEB_IDENTITY_TOKEN_FILE"} {
		t.Setenv(v, "")
	}
	role := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/role" {
			http.Error(w, "no role here", http.StatusNotFound)
			return
		}
		fmt.Fprintf(w, `{"AccessKeyId": %q, "SecretAccessKey": %q, "Token": "", "Expiration": %q}`, s3server.AccessKey, s3server.SecretKey,
			time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	}))
	defer role.Close()
	file := filepath.Join(dir, "credentials")
	must(t, os.WriteFile(file, []byte(fmt.Sprintf("[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n", s3server.AccessKey, s3server.SecretKey)), 0o600))
	o := options(server, "")
	o.AccessKey, o.SecretKey = "", ""
	use := func() error {
		s, err := Open(o)
		must(t, err)
		defer func() { must(t, s.Close()) }()
		return objectstore.Probe(context.Background(), s)
	}
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", filepath.Join(dir, "absent"))
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", role.URL+"/none")
	if err := use(); !hinted(err, "AWS_ACCESS_KEY_ID") || !strings.Contains(err.Error(), "no credentials were found") {
		t.Errorf("none anywhere: %v", err)
	}
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", role.URL+"/role")
	if err := use(); err != nil {
		t.Errorf("the machine's role: %v", err)
	}
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", role.URL+"/none")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", file)
	if err := use(); err != nil {
		t.Errorf("the shared file: %v", err)
	}
	t.Setenv("MINIO_ROOT_USER", "wrong")
	t.Setenv("MINIO_ROOT_PASSWORD", "wrong-secret")
	if err := use(); !hinted(err, "credentials") {
		t.Errorf("the environment, MinIO's, wins over the file: %v", err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", s3server.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s3server.SecretKey)
	if err := use(); err != nil {
		t.Errorf("the environment wins: %v", err)
	}
}

// With TLS, a service is believed if the authorities of the options have signed
// its certificate.
func TestAuthorities(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, page(false, "", "a")) }))
	defer server.Close()
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	must(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600))
	o := Options{Endpoint: strings.TrimPrefix(server.URL, "https://"), Bucket: "bucket", Region: "us-east-1", AccessKey: "k", SecretKey: "s"}
	for _, err := range open(t, o).List(context.Background(), "", "") {
		if !errors.Is(err, base.ErrObjectStore) || !strings.Contains(err.Error(), "certificate") {
			t.Errorf("an unknown authority: %v", err)
		}
	}
	o.CAFile = ca
	if got := keys(t, open(t, o)); len(got) != 1 {
		t.Errorf("listed %v", got)
	}
}
