package s3

import (
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Options say which bucket, and how to reach it.
type Options struct {
	// Endpoint is "host:port" of the service, without a scheme.
	Endpoint string
	// Bucket exists already. Prefix, if set, is put before every key with a slash;
	// nothing outside it is touched.
	Bucket, Prefix string
	// Region is asked for from the service if it is empty.
	Region string
	// Insecure speaks HTTP without TLS.
	Insecure bool
	// AccessKey and SecretKey, if set, are the credentials. Else they come from the
	// environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or MINIO_ROOT_USER
	// and MINIO_ROOT_PASSWORD), the shared credentials file, or the machine's role.
	AccessKey, SecretKey string
	// PartBytes is the size of an upload's parts; a smaller object is one request.
	// Each Put holds one part in memory. Default 16 MiB, at least 5 MiB.
	PartBytes int64
	// Idle ends a request on which nothing moves. Default 30 s.
	Idle time.Duration
}

const (
	minPartBytes = 5 << 20
	maxParts     = 10_000
)

func (o *Options) ensureDefaults() {
	if o.PartBytes == 0 {
		o.PartBytes = 16 << 20
	}
	if o.Idle == 0 {
		o.Idle = 30 * time.Second
	}
}

func (o *Options) validate() error {
	if o.Endpoint == "" || strings.Contains(o.Endpoint, "/") {
		return base.Invalid("endpoint", "host or host:port, without a scheme or a path")
	}
	if o.Bucket == "" {
		return base.Invalid("bucket", "the name of a bucket that exists")
	}
	if o.Prefix != "" {
		if err := objectstore.CheckKey(o.Prefix); err != nil {
			return base.Invalid("prefix", "parts of letters, digits, '.', '_' and '-', with slashes between them and none at its end")
		}
	}
	if o.PartBytes < minPartBytes {
		return base.Invalid("part bytes", "at least 5 MiB")
	}
	if o.Idle < 0 {
		return base.Invalid("idle", "more than 0")
	}
	if (o.AccessKey == "") != (o.SecretKey == "") {
		return base.Invalid("credentials", "both an access key and a secret key, or neither")
	}
	return nil
}

func (o *Options) credentials() *credentials.Credentials {
	if o.AccessKey != "" {
		return credentials.NewStaticV4(o.AccessKey, o.SecretKey, "")
	}
	return credentials.NewChainCredentials([]credentials.Provider{
		&credentials.EnvAWS{}, &credentials.EnvMinio{}, &credentials.FileAWSCredentials{},
		&credentials.IAM{Region: os.Getenv("AWS_REGION")},
	})
}

// transport is one of our own: its bounds must not depend on other users of the
// default one, and Close closes its connections.
func (o *Options) transport() *http.Transport {
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: o.Idle,
		ExpectContinueTimeout: time.Second,
		IdleConnTimeout:       time.Minute,
		MaxIdleConnsPerHost:   16,
		DisableCompression:    true, // a range is one of the stored bytes
	}
}
