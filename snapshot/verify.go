package snapshot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// VerifyOptions tune VerifyCheckpoint.
type VerifyOptions struct {
	// Full reads and hashes every object; otherwise only `_metadata` and manifests
	// are read, and the sizes of the others are looked at.
	Full bool
	// Parallel bounds the objects looked at once. Default 4.
	Parallel int
	// Progress is told how many of the objects known so far are looked at. It is
	// never called twice at once; may be nil.
	Progress func(done, objects int)
}

// Fault says what is wrong with an object.
type Fault string

// The faults.
const (
	// FaultMissing: there is no such object.
	FaultMissing Fault = "missing"
	// FaultShort: it has fewer bytes than are wanted of it.
	FaultShort Fault = "short"
	// FaultForeign: it is not one of this checkpoint: of another cluster, shard,
	// or number, or of a name that is not ours.
	FaultForeign Fault = "foreign"
	// FaultDamaged: its bytes are not what they were.
	FaultDamaged Fault = "damaged"
)

// BadObject is an object that is not as it must be.
type BadObject struct {
	Key   string
	Fault Fault
	// Why says more, in words; Shard is one that needs the object, 0 if all do.
	Why   string
	Shard base.GroupID
}

// Verification is what VerifyCheckpoint found.
type Verification struct {
	Key string
	// Checkpoint is what `_metadata` says; nil if it cannot be read.
	Checkpoint *Checkpoint
	Full       bool
	// Objects is how many were looked at, `_metadata` and manifests included;
	// Bytes is their size, ReadBytes how much of it was read.
	Objects          int
	Bytes, ReadBytes int64
	// Files is how many files the manifests have, Segments how many segments.
	Files, Segments, Requests int
	// Bad is in the order of the keys.
	Bad []BadObject
}

// maxNamed bounds the bad objects that an error names; Bad has them all.
const maxNamed = 50

// Err is nil if nothing is bad, else it names the bad objects, the first 50 of
// them, and is base.ErrCorrupt.
func (v *Verification) Err() error {
	if len(v.Bad) == 0 {
		return nil
	}
	var texts []string
	for i, b := range v.Bad {
		if i == maxNamed {
			texts = append(texts, fmt.Sprintf("and %d more", len(v.Bad)-i))
			break
		}
		texts = append(texts, fmt.Sprintf("%s is %s (%s)", b.Key, b.Fault, b.Why))
	}
	return fmt.Errorf("%d bad objects: %s: %w", len(v.Bad), strings.Join(texts, "; "), base.ErrCorrupt)
}

// looks is how often an object is looked at before it is bad: what broke on the
// way is not the object's fault.
const looks = 2

// VerifyCheckpoint looks at all objects of a checkpoint, and names each that is
// missing, short, foreign or damaged (SN10). The error is nil only if all are as
// they must be: it is base.ErrCorrupt if objects are bad, and another if not all
// could be looked at. The verification holds what was found so far, except after
// base.ErrInvalid, for a key that is not one of a checkpoint.
func VerifyCheckpoint(ctx context.Context, store objectstore.Store, metadataKey string, o VerifyOptions) (*Verification, error) {
	folder, ok := metadataFolder(metadataKey)
	if !ok {
		return nil, fmt.Errorf("verifying checkpoint: %w", base.Invalid("key", fmt.Sprintf("%.200q is not the key of a checkpoint", metadataKey)))
	}
	if o.Parallel <= 0 {
		o.Parallel = 4
	}
	if o.Progress == nil {
		o.Progress = func(int, int) {}
	}
	counted := &countedStore{Store: store}
	v := &verifier{
		opts: o, store: counted, folder: folder, wanted: map[string]*wantedObject{},
		out: &Verification{Key: metadataKey, Full: o.Full}, objects: 1,
	}
	err := v.run(ctx, metadataKey)
	v.out.Requests = int(counted.requests.Load())
	slices.SortFunc(v.out.Bad, func(a, b BadObject) int { return strings.Compare(a.Key, b.Key) })
	if err = errors.Join(err, v.out.Err()); err != nil {
		return v.out, fmt.Errorf("verifying checkpoint %s: %w", metadataKey, err)
	}
	return v.out, nil
}
