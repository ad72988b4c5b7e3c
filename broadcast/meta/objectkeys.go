package meta

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
)

// Keys in the object store, below the cluster's id. Frozen:
//
//	<sha256>.<attempt>                 an object of an upload
//	checkpoints/<number>/_metadata     what a completed checkpoint consists of
//	savepoints/<number>/_metadata      the same of a savepoint, and
//	savepoints/<number>/<sha256>.<attempt>  all its objects
const (
	metadataFolder  = "checkpoints/"
	savepointFolder = "savepoints/"
	metadataName    = "/_metadata"
	numberDigits    = 10
)

// metadataKey is the key of a checkpoint's `_metadata`.
func metadataKey(cluster base.ClusterID, number uint64) string {
	return fmt.Sprintf("%s/%s%0*d%s", cluster, metadataFolder, numberDigits, number, metadataName)
}

// metadataKey is the key of the `_metadata` of this checkpoint or savepoint.
func (c *Checkpoint) metadataKey(cluster base.ClusterID) string {
	if c.Savepoint {
		return fmt.Sprintf("%s/%s%0*d%s", cluster, savepointFolder, numberDigits, c.Number, metadataName)
	}
	return metadataKey(cluster, c.Number)
}

// objectFolder is where the checkpoint's uploads store objects.
func (c *Checkpoint) objectFolder(cluster base.ClusterID) string {
	if c.Savepoint {
		return strings.TrimSuffix(c.metadataKey(cluster), metadataName)
	}
	return string(cluster)
}

// savepointOf returns the number of the savepoint in whose folder a key lies.
func savepointOf(key string) (number uint64, ok bool) {
	_, name, _ := strings.Cut(key, "/")
	rest, ok := strings.CutPrefix(name, savepointFolder)
	if !ok {
		return 0, false
	}
	digits, _, _ := strings.Cut(rest, "/")
	return parseNumber(digits)
}

// parseMetadataName reads the part of such a key behind the cluster's id.
func parseMetadataName(name string) (number uint64, ok bool) {
	digits, ok := strings.CutPrefix(name, metadataFolder)
	if !ok {
		return 0, false
	}
	if digits, ok = strings.CutSuffix(digits, metadataName); !ok {
		return 0, false
	}
	return parseNumber(digits)
}

func parseNumber(digits string) (number uint64, ok bool) {
	number, err := strconv.ParseUint(digits, 10, 64)
	return number, err == nil && number > 0 && fmt.Sprintf("%0*d", numberDigits, number) == digits
}

// objectKey is the key of an object with this content, stored by an attempt.
// The folder is the cluster's, or that of a savepoint.
func objectKey(folder string, sum Sum, attempt uint64) string {
	return fmt.Sprintf("%s/%s.%d", folder, sum, attempt)
}

// parseObjectName reads the last part of an object's key: what objectKey writes,
// and nothing else.
func parseObjectName(key string) (sum Sum, attempt uint64, err error) {
	name := key[strings.LastIndexByte(key, '/')+1:]
	digits, number, ok := strings.Cut(name, ".")
	if !ok || len(digits) != 2*len(sum) || sum.UnmarshalText([]byte(digits)) != nil {
		return Sum{}, 0, base.Invalid("key", fmt.Sprintf("%q does not begin with a SHA-256", key))
	}
	attempt, err = strconv.ParseUint(number, 10, 64)
	if err != nil || strconv.FormatUint(attempt, 10) != number || attempt == 0 || attempt > maxAttempt {
		return Sum{}, 0, base.Invalid("key", fmt.Sprintf("%q does not end with an attempt", key))
	}
	return sum, attempt, nil
}

// ownKey says what a key below the cluster's id is: an object of an attempt, or
// the `_metadata` of a checkpoint, then without an attempt; saved says that it lies
// in the folder of savepoint number. Whatever else there is, is foreign.
func ownKey(cluster base.ClusterID, key string) (attempt, number uint64, saved, ok bool) {
	name, ok := strings.CutPrefix(key, string(cluster)+"/")
	if !ok || cluster == "" {
		return 0, 0, false, false
	}
	if number, ok = parseMetadataName(name); ok {
		return 0, number, false, true
	}
	if number, saved = savepointOf(key); saved {
		name = strings.TrimPrefix(name, fmt.Sprintf("%s%0*d/", savepointFolder, numberDigits, number))
		if "/"+name == metadataName {
			return 0, number, true, true
		}
	}
	if strings.Contains(name, "/") {
		return 0, 0, false, false
	}
	_, attempt, err := parseObjectName(name)
	return attempt, number, saved, err == nil
}
