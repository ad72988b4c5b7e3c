package s3

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// source gives minio-go its credentials, by asking providers in turn. Unlike
// minio-go's own chain it fails where none has any: that one would go on without,
// so that a public bucket were used unseen, and a refusal would say nothing of
// what is missing (OC6).
type source struct {
	anonymous bool
	providers []credentials.Provider

	current credentials.Provider // whom the last came from; under the lock of credentials.Credentials
	secrets atomic.Pointer[[]string]
}

func (o *Options) source() *source {
	if o.AccessKey != "" {
		return &source{providers: []credentials.Provider{&credentials.Static{Value: credentials.Value{
			AccessKeyID: o.AccessKey, SecretAccessKey: string(o.SecretKey), SignerType: credentials.SignatureV4,
		}}}}
	}
	return &source{anonymous: o.Anonymous, providers: []credentials.Provider{
		&credentials.EnvAWS{}, &credentials.EnvMinio{}, &credentials.FileAWSCredentials{},
		&credentials.IAM{Region: os.Getenv("AWS_REGION")},
	}}
}

// RetrieveWithCredContext implements credentials.Provider.
func (s *source) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	if s.anonymous {
		return credentials.Value{SignerType: credentials.SignatureAnonymous}, nil
	}
	var last error
	for _, p := range s.providers {
		v, err := p.RetrieveWithCredContext(cc)
		if err == nil && v.AccessKeyID != "" && v.SecretAccessKey != "" {
			s.current = p
			s.secrets.Store(&[]string{v.SecretAccessKey, v.SessionToken})
			return v, nil
		}
		if err != nil {
			last = err // that of the machine's role, which is asked last, says most
		}
	}
	err := errors.New("no credentials were found")
	if last != nil {
		err = fmt.Errorf("%w (the last place that was asked says: %w)", err, last)
	}
	return credentials.Value{}, trouble(err, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for the node, or write the "+
		"shared credentials file, or give the machine a role; or say that the bucket needs none", 0)
}

// Retrieve implements credentials.Provider.
func (s *source) Retrieve() (credentials.Value, error) { return s.RetrieveWithCredContext(nil) }

// IsExpired implements credentials.Provider.
func (s *source) IsExpired() bool {
	return !s.anonymous && (s.current == nil || s.current.IsExpired())
}

// redact hides secrets that a service, or something before it, has sent back (OC5).
func (s *source) redact(err error) error {
	secrets := s.secrets.Load()
	if secrets == nil {
		return err
	}
	text := err.Error()
	for _, secret := range *secrets {
		if secret != "" {
			text = strings.ReplaceAll(text, secret, redacted)
		}
	}
	if text == err.Error() {
		return err
	}
	return errors.New(text)
}
