package objectstore

import (
	"fmt"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
)

// Limits of keys. S3 takes 1,024 bytes, file systems 255 for a part of a path.
const (
	MaxKeyBytes  = 900
	MaxPartBytes = 200
)

// CheckKey says why a key cannot be: it consists of parts of A-Z, a-z, 0-9, '.',
// '_' and '-', with slashes between them; no part begins with a dot. It fails
// with base.ErrInvalid.
func CheckKey(key string) error {
	if len(key) == 0 || len(key) > MaxKeyBytes {
		return base.Invalid("key", fmt.Sprintf("1 to %d bytes", MaxKeyBytes))
	}
	for part := range strings.SplitSeq(key, "/") {
		if err := checkPart(part); err != nil {
			return err
		}
	}
	return nil
}

// CheckPrefix says why a prefix of keys cannot be. An empty one is all keys.
func CheckPrefix(prefix string) error {
	if prefix == "" {
		return nil
	}
	// The rest of its last part may follow.
	return CheckKey(strings.TrimSuffix(prefix, "/"))
}

func checkPart(part string) error {
	if len(part) == 0 || len(part) > MaxPartBytes {
		return base.Invalid("key", fmt.Sprintf("parts between slashes of 1 to %d bytes", MaxPartBytes))
	}
	if part[0] == '.' {
		return base.Invalid("key", "no part that begins with a dot")
	}
	for _, c := range []byte(part) {
		ok := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-'
		if !ok {
			return base.Invalid("key", "letters, digits, '.', '_', '-', and '/' between parts")
		}
	}
	return nil
}
