package apierr_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/internal/base"
)

var rewrite = flag.Bool("rewrite", false, "rewrite generated documents")

const docsHead = `# Errors

Every failed call carries a gRPC status with one ` + "`keelstate.v1.ErrorDetail`" + `: a stable
reason, what is known about the effect of the request, and what to do. Results of
streams carry the same detail without a status. Reasons are stable; texts are not.

**Outcome.** *not applied*: the request had no effect and never will have. *applied*:
it took effect, and only what came after it failed. *unknown*: it may have taken effect,
or may still do. A reader of a detail without an outcome, or of a status without a detail
(an error of the transport), must take the outcome as unknown.

**Retry.** *yes*: the same request may succeed later without a change by the caller. A
write whose outcome is unknown may be sent again only under the same session and number.

The outcome in the detail wins over this table: a newer server may know better.
This file is generated: ` + "`go test ./api/apierr -run TestErrorsPage -rewrite`" + `.

| reason | meaning | outcome | retry | gRPC code |
|---|---|---|---|---|
`

// TestErrorsPage keeps docs/errors.md current.
func TestErrorsPage(t *testing.T) {
	var b bytes.Buffer
	b.WriteString(docsHead)
	for _, s := range base.Sentinels() {
		retry := "no"
		if s.Retryable {
			retry = "yes"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", s.Reason, s.Error(), s.Outcome, retry, apierr.Code(s.Reason))
	}
	name := filepath.Join("..", "..", "docs", "errors.md")
	if *rewrite {
		if err := os.WriteFile(name, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b.Bytes()) {
		t.Errorf("%s is out of date; run this test with -rewrite", name)
	}
}
