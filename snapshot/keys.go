package snapshot

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// The parts of a checkpoint's key.
const (
	checkpointsPart = "checkpoints"
	metadataPart    = "_metadata"
	// numberDigits lets checkpoints be listed in the order of their numbers.
	numberDigits = 10
)

// ObjectKey is the key of an object with that content, stored by an attempt: two
// attempts never use one key, and one key never has two contents (SN5). The
// prefix is the cluster's id; attempts begin at 1.
func ObjectKey(prefix string, sum [sha256.Size]byte, attempt uint64) string {
	return prefix + "/" + hex.EncodeToString(sum[:]) + "." + strconv.FormatUint(attempt, 10)
}

// ParseObjectKey takes apart a key that ObjectKey made. Any other key is not
// ours.
func ParseObjectKey(key string) (prefix string, sum [sha256.Size]byte, attempt uint64, ok bool) {
	prefix, name, found := strings.Cut(key, "/")
	digits, number, dotted := strings.Cut(name, ".")
	if !found || !dotted || len(digits) != hex.EncodedLen(len(sum)) {
		return "", sum, 0, false
	}
	raw, err := hex.DecodeString(digits)
	if err != nil {
		return "", sum, 0, false
	}
	copy(sum[:], raw)
	attempt, err = strconv.ParseUint(number, 10, 64)
	if err != nil || attempt == 0 || objectstore.CheckKey(key) != nil || ObjectKey(prefix, sum, attempt) != key {
		return "", [sha256.Size]byte{}, 0, false
	}
	return prefix, sum, attempt, true
}

// MetadataKey is the key of a checkpoint's `_metadata`.
func MetadataKey(cluster base.ClusterID, number uint64) string {
	return fmt.Sprintf("%s/%s/%0*d/%s", cluster, checkpointsPart, numberDigits, number, metadataPart)
}

// ParseMetadataKey takes apart a key that MetadataKey made. Any other key is not
// one of a checkpoint.
func ParseMetadataKey(key string) (cluster base.ClusterID, number uint64, ok bool) {
	parts := strings.Split(key, "/")
	if len(parts) != 4 {
		return "", 0, false
	}
	cluster = base.ClusterID(parts[0])
	number, err := strconv.ParseUint(parts[2], 10, 64)
	if err != nil || number == 0 || objectstore.CheckKey(key) != nil || MetadataKey(cluster, number) != key {
		return "", 0, false
	}
	return cluster, number, true
}

// checkPrefix says why no objects can be kept under a cluster's id.
func checkPrefix(field, prefix string) error {
	if strings.Contains(prefix, "/") || objectstore.CheckKey(prefix) != nil {
		return base.Invalid(field, "a cluster id: one part of an object's key")
	}
	return nil
}
