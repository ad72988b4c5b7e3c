package s3

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Secret is a text that is never printed.
type Secret string

const redacted = "[redacted]"

// Format implements fmt.Formatter: whatever the verb, the text stays hidden.
func (Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(redacted)) }

// MarshalText keeps the text out of JSON and of logs.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Addressing says where requests name the bucket.
type Addressing int

const (
	// AddressAuto names the bucket in the path, except at services that are known
	// to want it in the host's name.
	AddressAuto Addressing = iota
	AddressPath
	AddressHost
)

// Options say which bucket, and how to reach it.
type Options struct {
	// Endpoint is "host" or "host:port" of the service, without a scheme. Default
	// Amazon's.
	Endpoint string
	// Bucket exists already. Prefix, if set, is put before every key with a slash;
	// nothing outside it is touched.
	Bucket, Prefix string
	// Region is asked for from the service if it is empty.
	Region string
	// Addressing says how requests name the bucket.
	Addressing Addressing
	// Insecure speaks HTTP without TLS. CAFile, if set, names a PEM file of the
	// authorities that may have signed the service's certificate, instead of the
	// system's.
	Insecure bool
	CAFile   string
	// AccessKey and SecretKey, if set, are the credentials. Else they come from the
	// environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or MINIO_ROOT_USER
	// and MINIO_ROOT_PASSWORD), the shared credentials file, or the machine's role.
	// Anonymous needs and looks for none.
	AccessKey string
	SecretKey Secret
	Anonymous bool
	// PartBytes is the size of an upload's parts; a smaller object is one request.
	// Each Put holds one part in memory. Default 20 MiB, at least 5 MiB:
	// the files of an engine that cuts them at 16 MiB, and a little above, are one
	// request and not six.
	PartBytes int64
	// Idle ends a request on which nothing moves. Default 30 s.
	Idle time.Duration
}

const (
	// amazon is the service that an s3:// name means if nothing else is said.
	amazon       = "s3.amazonaws.com"
	minPartBytes = 5 << 20
	maxParts     = 10_000
)

func (o *Options) ensureDefaults() {
	if o.Endpoint == "" {
		o.Endpoint = amazon
	}
	if o.PartBytes == 0 {
		o.PartBytes = 20 << 20
	}
	if o.Idle == 0 {
		o.Idle = 30 * time.Second
	}
}

var (
	endpointPattern = regexp.MustCompile(`^([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$`)
	bucketPattern   = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)
)

// CheckBucket says why a bucket cannot have a name, with base.ErrInvalid.
func CheckBucket(name string) error {
	if !bucketPattern.MatchString(name) || strings.Contains(name, "..") || net.ParseIP(name) != nil {
		return base.Invalid("bucket", "3 to 63 lower-case letters, digits, '.' and '-'")
	}
	return nil
}

// CheckEndpoint says why an endpoint cannot be, with base.ErrInvalid.
func CheckEndpoint(endpoint string) error {
	if !endpointPattern.MatchString(endpoint) {
		return base.Invalid("endpoint", "host or host:port, without a scheme or a path")
	}
	return nil
}

func (o *Options) validate() error {
	if err := CheckEndpoint(o.Endpoint); err != nil {
		return err
	}
	if err := CheckBucket(o.Bucket); err != nil {
		return err
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
	if (o.AccessKey == "") != (o.SecretKey == "") || o.Anonymous && o.AccessKey != "" {
		return base.Invalid("credentials", "both an access key and a secret key, or neither; and none with anonymous")
	}
	if o.Insecure && o.CAFile != "" {
		return base.Invalid("CA file", "none without TLS")
	}
	return nil
}

func (o *Options) lookup() minio.BucketLookupType {
	switch o.Addressing {
	case AddressPath:
		return minio.BucketLookupPath
	case AddressHost:
		return minio.BucketLookupDNS
	}
	return minio.BucketLookupAuto
}

// transport is one of our own: its bounds must not depend on other users of the
// default one, and Close closes its connections.
func (o *Options) transport() (*http.Transport, error) {
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: o.Idle,
		ExpectContinueTimeout: time.Second,
		IdleConnTimeout:       time.Minute,
		MaxIdleConnsPerHost:   16,
		DisableCompression:    true, // a range is one of the stored bytes
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12},
	}
	if o.CAFile == "" {
		return t, nil
	}
	pem, err := os.ReadFile(o.CAFile)
	if err != nil {
		return nil, base.Invalid("CA file", "a PEM file that the node may read: "+err.Error())
	}
	t.TLSClientConfig.RootCAs = x509.NewCertPool()
	if !t.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem) {
		return nil, base.Invalid("CA file", o.CAFile+" holds no certificate in PEM")
	}
	return t, nil
}
