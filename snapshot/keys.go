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
	savepointsPart  = "savepoints"
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

// SavepointFolder is below what a cluster stores all objects of a savepoint, and
// nothing else.
func SavepointFolder(cluster base.ClusterID, number uint64) string {
	return fmt.Sprintf("%s/%s/%0*d", cluster, savepointsPart, numberDigits, number)
}

// SavepointKey is the key under which a cluster stores a savepoint's `_metadata`.
func SavepointKey(cluster base.ClusterID, number uint64) string {
	return SavepointFolder(cluster, number) + "/" + metadataPart
}

// SavepointObjectKey is ObjectKey for an object of a savepoint.
func SavepointObjectKey(cluster base.ClusterID, number uint64, sum [sha256.Size]byte, attempt uint64) string {
	return ObjectKey(SavepointFolder(cluster, number), sum, attempt)
}

// ParseSavepointKey takes apart a key below the folder of a cluster's savepoint:
// that of its `_metadata`, or of an object. Any other key is not ours.
func ParseSavepointKey(key string) (cluster base.ClusterID, number uint64, metadata, ok bool) {
	parts := strings.Split(key, "/")
	if len(parts) != 4 {
		return "", 0, false, false
	}
	cluster = base.ClusterID(parts[0])
	number, err := strconv.ParseUint(parts[2], 10, 64)
	if err != nil || number == 0 || objectstore.CheckKey(key) != nil {
		return "", 0, false, false
	}
	metadata = parts[3] == metadataPart
	if !metadata {
		if _, _, ok := parseObjectName(parts[3]); !ok {
			return "", 0, false, false
		}
	}
	if SavepointFolder(cluster, number)+"/"+parts[3] != key {
		return "", 0, false, false
	}
	return cluster, number, metadata, true
}

// parseObjectName takes apart the last part of an object's key.
func parseObjectName(name string) (sum [sha256.Size]byte, attempt uint64, ok bool) {
	_, sum, attempt, ok = ParseObjectKey("c/" + name)
	return sum, attempt, ok
}

// metadataFolder is the folder of a key that ends as those of `_metadata` do; it
// is empty for an object in the root of the store.
func metadataFolder(key string) (folder string, ok bool) {
	if key == metadataPart {
		return "", true
	}
	folder, ok = strings.CutSuffix(key, "/"+metadataPart)
	if parts := strings.Split(folder, "/"); len(parts) == 3 && parts[1] == checkpointsPart {
		_, _, ok = ParseMetadataKey(key) // where checkpoints lie nothing else does
	}
	return folder, ok && objectstore.CheckKey(key) == nil
}

// checkPrefix says why no objects can be kept under a cluster's id.
func checkPrefix(field, prefix string) error {
	if strings.Contains(prefix, "/") || objectstore.CheckKey(prefix) != nil {
		return base.Invalid(field, "a cluster id: one part of an object's key")
	}
	return nil
}
