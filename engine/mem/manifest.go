package mem

import (
	"encoding/binary"
	"fmt"
	"sort"

	"github.com/zeebo/xxh3"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// The layout is frozen; see docs/formats/engine-mem-checkpoint.md.
const (
	manifestMagic   = "KSMEMMAN"
	manifestVersion = 1
	manifestFixed   = 8 + 2 + 2 + 8 + 8 + 8 + 4
	maxFamilies     = 1 << 16
	maxManifestLen  = manifestFixed + maxFamilies*familyLen + checksumLen
)

// manifest says which image is the durable one and which families exist.
type manifest struct {
	image    uint64 // number; 0 = none
	imageSum uint64 // last checksum of that image
	// births is the newest birth number that was given out.
	births   uint64
	families map[engine.FamilyID]*family // without trees
}

func sortedFamilies(m map[engine.FamilyID]*family) []*family {
	out := make([]*family, 0, len(m))
	for _, f := range m {
		out = append(out, f)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].id < out[j].id })
	return out
}

func encodeManifest(m *manifest) []byte {
	b := binary.BigEndian.AppendUint16([]byte(manifestMagic), manifestVersion)
	b = append(b, 0, 0)
	b = binary.BigEndian.AppendUint64(b, m.image)
	b = binary.BigEndian.AppendUint64(b, m.imageSum)
	b = binary.BigEndian.AppendUint64(b, m.births)
	b = binary.BigEndian.AppendUint32(b, uint32(len(m.families)))
	for _, f := range sortedFamilies(m.families) {
		b = appendFamily(b, f)
	}
	return binary.BigEndian.AppendUint64(b, xxh3.Hash(b))
}

func decodeManifest(b []byte) (*manifest, error) {
	const doing = "decoding manifest"
	if err := checkMagic(b, manifestMagic, manifestVersion); err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	if len(b) < manifestFixed+checksumLen || len(b) > maxManifestLen {
		return nil, corrupt("%s: %d bytes", doing, len(b))
	}
	body := b[:len(b)-checksumLen]
	if xxh3.Hash(body) != binary.BigEndian.Uint64(b[len(body):]) {
		return nil, corrupt("%s: checksum differs", doing)
	}
	m := &manifest{
		image:    binary.BigEndian.Uint64(b[12:]),
		imageSum: binary.BigEndian.Uint64(b[20:]),
		births:   binary.BigEndian.Uint64(b[28:]),
		families: make(map[engine.FamilyID]*family),
	}
	list := body[manifestFixed:]
	if n := int64(binary.BigEndian.Uint32(b[36:])); b[10] != 0 || b[11] != 0 || n*familyLen != int64(len(list)) {
		return nil, corrupt("%s: %d families in %d bytes", doing, n, len(list))
	}
	last := int64(-1)
	for ; len(list) > 0; list = list[familyLen:] {
		f, err := decodeFamily(list[:familyLen])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", doing, err)
		}
		if int64(f.id) <= last || f.birth > m.births {
			return nil, corrupt("%s: family %d of birth %d", doing, f.id, f.birth)
		}
		last = int64(f.id)
		m.families[f.id] = f
	}
	if m.families[engine.MetaFamily] == nil {
		return nil, corrupt("%s: no metadata family", doing)
	}
	return m, nil
}

// metaOptions are those of the metadata family, which every store has.
var metaOptions = engine.FamilyOptions{Use: engine.UseScanned, Merge: engine.MergeNone}

func checkOptions(f engine.FamilyID, o engine.FamilyOptions) error {
	if f == engine.MetaFamily {
		if o != metaOptions {
			return fmt.Errorf("metadata family with options %v: %w", o, base.ErrInvalid)
		}
		return nil
	}
	if o.Use > engine.UsePoint || o.Merge > engine.MergeSumCount || o.GroupWidth < 1 || o.GroupWidth > 2 {
		return fmt.Errorf("family %d with options %v: %w", f, o, base.ErrInvalid)
	}
	return nil
}
