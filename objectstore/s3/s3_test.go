package s3

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/s3server"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
)

func options(server *s3server.Server, prefix string) Options {
	return Options{
		Endpoint: server.Endpoint, Bucket: s3server.Bucket, Prefix: prefix, Insecure: true, Region: "us-east-1",
		AccessKey: s3server.AccessKey, SecretKey: s3server.SecretKey, PartBytes: minPartBytes,
	}
}

func TestConformance(t *testing.T) {
	server := s3server.Run(t)
	var n atomic.Int32
	objectstoretest.Run(t, objectstoretest.Options{
		Open: func(t testing.TB) objectstore.Store {
			s, err := Open(context.Background(), options(server, fmt.Sprintf("suite/%d", n.Add(1))))
			if err != nil {
				t.Fatal(err)
			}
			return s
		},
		Sizes: []int64{minPartBytes*2 - 1, minPartBytes * 2, minPartBytes*2 + 1},
	})
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	server := s3server.Run(t)
	good := options(server, "")
	for name, c := range map[string]struct {
		change func(*Options)
		want   error
		hint   string
	}{
		"no endpoint":    {func(o *Options) { o.Endpoint = "" }, base.ErrInvalid, "host"},
		"with a scheme":  {func(o *Options) { o.Endpoint = "http://x" }, base.ErrInvalid, "scheme"},
		"no bucket":      {func(o *Options) { o.Bucket = "" }, base.ErrInvalid, "bucket"},
		"bad prefix":     {func(o *Options) { o.Prefix = "../x" }, base.ErrInvalid, "parts"},
		"half a key":     {func(o *Options) { o.SecretKey = "" }, base.ErrInvalid, "both"},
		"small parts":    {func(o *Options) { o.PartBytes = 1 }, base.ErrInvalid, "5 MiB"},
		"another bucket": {func(o *Options) { o.Bucket = "not-there" }, base.ErrObjectStore, "create bucket not-there"},
		"wrong secret":   {func(o *Options) { o.SecretKey = "wrong-secret" }, base.ErrObjectStore, "credentials"},
		"nobody there":   {func(o *Options) { o.Endpoint = "127.0.0.1:1" }, base.ErrObjectStore, "127.0.0.1:1"},
	} {
		o := good
		c.change(&o)
		s, err := Open(context.Background(), o)
		if err == nil {
			_ = s.Close()
		}
		var detail *base.Error
		if !errors.Is(err, c.want) || !errors.As(err, &detail) || !strings.Contains(detail.Hint, c.hint) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && (strings.Contains(err.Error(), s3server.SecretKey) || strings.Contains(err.Error(), "wrong-secret")) {
			t.Errorf("%s: the secret is in %v", name, err)
		}
	}
}
