package snapshot

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/objectstore"
)

// Manifest says what one snapshot of one shard holds and which files it is made
// of. Its format is docs/formats/shard-manifest.md.
type Manifest struct {
	Group       base.GroupID
	Birth       base.Birth
	Incarnation base.Incarnation
	Epoch       base.Epoch
	Range       keygroup.Range
	M           int
	// Engine is the implementation whose files these are: "rocks" or "mem".
	Engine string
	// Index and Term are those of the newest entry that the engine has applied;
	// they may be ahead of the index under which Raft keeps the snapshot.
	Index, Term uint64
	Sequence    uint64
	ClockMs     uint64
	// Files are in the order of their names.
	Files []File
	// Changelog, if there is one, leads from the files, which are of an earlier
	// moment then, to Index, Term, Sequence and ClockMs.
	Changelog *Changelog `json:",omitempty"`
}

// File is one file of a snapshot.
type File struct {
	Name   string
	Size   int64
	SHA256 [sha256.Size]byte
	// Object, Offset and Length say where the file lies in an object store;
	// Object is empty where it lies in none.
	Object         string
	Offset, Length int64
}

// Limits of a manifest.
const (
	MaxFiles = 100_000
	// MaxNameBytes leaves room for the suffix of a part in a file name of 255.
	MaxNameBytes   = 255 - len(partSuffix)
	MaxObjectBytes = 1024
	maxEngineBytes = 255
	maxKeyGroups   = keygroup.MaxM
)

// The constants of the format are frozen.
const (
	manifestMagic   = "KSSM"
	manifestVersion = 1
	// changelogVersion is that of a manifest with a changelog, and of no other:
	// whoever knows only version 1 would take the files for the whole.
	changelogVersion = 2
	sumLen           = sha256.Size
)

// Encode returns the bytes of the manifest. It sorts Files.
func (m *Manifest) Encode() ([]byte, error) {
	slices.SortFunc(m.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	if err := m.validate(); err != nil {
		return nil, fmt.Errorf("encoding manifest of %s: %w", m.Group, err)
	}
	b := append([]byte(manifestMagic), m.version())
	for _, v := range []uint64{uint64(m.Group), uint64(m.Birth), uint64(m.Incarnation), uint64(m.Epoch),
		uint64(m.Range.Lo), uint64(m.Range.Hi), uint64(m.M), m.Index, m.Term, m.Sequence, m.ClockMs} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	b = appendText(b, m.Engine)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Files)))
	for i := range m.Files {
		f := &m.Files[i]
		b = appendText(b, f.Name)
		b = binary.LittleEndian.AppendUint64(b, uint64(f.Size))
		b = append(b, f.SHA256[:]...)
		b = appendText(b, f.Object)
		b = binary.LittleEndian.AppendUint64(b, uint64(f.Offset))
		b = binary.LittleEndian.AppendUint64(b, uint64(f.Length))
	}
	if m.Changelog != nil {
		b = appendChangelog(b, m.Changelog)
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

// version is that of the format in which the manifest is written.
func (m *Manifest) version() byte {
	if m.Changelog != nil {
		return changelogVersion
	}
	return manifestVersion
}

func appendText(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(s))), s...)
}

// Decode parses and checks a manifest. Damage is base.ErrCorrupt, a version of a
// newer build base.ErrFormatVersion.
func Decode(raw []byte) (*Manifest, error) {
	version, body, err := unseal("manifest", raw, manifestMagic, changelogVersion)
	if err != nil {
		return nil, err
	}
	d := decoder{b: body}
	m := &Manifest{}
	m.Group, m.Birth = base.GroupID(d.u64()), base.Birth(d.u64())
	m.Incarnation, m.Epoch = base.Incarnation(d.u64()), base.Epoch(d.u64())
	m.Range = keygroup.Range{Lo: keygroup.Group(d.small()), Hi: keygroup.Group(d.small())}
	m.M = int(d.small())
	m.Index, m.Term, m.Sequence, m.ClockMs = d.u64(), d.u64(), d.u64(), d.u64()
	m.Engine = d.text()
	// Each file takes at least this much: the count cannot make us allocate
	// more than the manifest holds.
	const fileMin = 2 + 8 + sha256.Size + 2 + 8 + 8
	n := int(d.u32())
	if n > MaxFiles || n*fileMin > len(d.b) {
		return nil, fmt.Errorf("decoding manifest: %d files in %d bytes: %w", n, len(d.b), base.ErrCorrupt)
	}
	m.Files = make([]File, n)
	for i := range m.Files {
		f := &m.Files[i]
		f.Name, f.Size = d.text(), int64(d.u64())
		copy(f.SHA256[:], d.take(sha256.Size))
		f.Object, f.Offset, f.Length = d.text(), int64(d.u64()), int64(d.u64())
	}
	if version == changelogVersion {
		if m.Changelog, err = d.changelog(); err != nil {
			return nil, err
		}
	}
	if d.bad || len(d.b) != 0 {
		return nil, fmt.Errorf("decoding manifest: lengths do not add up: %w", base.ErrCorrupt)
	}
	if err := m.validate(); err != nil {
		return nil, fmt.Errorf("decoding manifest: %v: %w", err, base.ErrCorrupt)
	}
	return m, nil
}

// unseal looks at magic, version and checksum, in this order, and returns the
// version, which is 1 to newest, and what is between them.
func unseal(what string, raw []byte, magic string, newest byte) (version byte, body []byte, err error) {
	if len(raw) < len(magic)+1 || string(raw[:len(magic)]) != magic {
		return 0, nil, fmt.Errorf("decoding %s: no magic: %w", what, base.ErrCorrupt)
	}
	if version = raw[len(magic)]; version == 0 || version > newest {
		return 0, nil, fmt.Errorf("decoding %s: version %d: %w", what, version, base.ErrFormatVersion)
	}
	if len(raw) < len(magic)+1+sumLen {
		return 0, nil, fmt.Errorf("decoding %s: %d bytes: %w", what, len(raw), base.ErrCorrupt)
	}
	body = raw[:len(raw)-sumLen]
	if sum := sha256.Sum256(body); string(sum[:]) != string(raw[len(body):]) {
		return 0, nil, fmt.Errorf("decoding %s: checksum mismatch: %w", what, base.ErrCorrupt)
	}
	return version, body[len(magic)+1:], nil
}

// CheckPlaces says why the files cannot be read from an object store: each that
// is not empty has a place, as long as the file, and no other has one (SN6). It fails with
// base.ErrCorrupt and names the file.
func (m *Manifest) CheckPlaces() error {
	for i := range m.Files {
		if f := &m.Files[i]; !f.placed() {
			return fmt.Errorf("file %s of %s has no place in an object store for its %d bytes: %w", f.Name, m.Group, f.Size, base.ErrCorrupt)
		}
	}
	if m.Changelog == nil {
		return nil
	}
	for i := range m.Changelog.Segments {
		if s := &m.Changelog.Segments[i]; !s.placed() {
			return fmt.Errorf("changelog segment %s of %s has no place in an object store: %w", s.FileName(), m.Group, base.ErrCorrupt)
		}
	}
	return nil
}

func (f *File) placed() bool {
	if f.Size == 0 || f.Object == "" { // an empty file needs no object
		return f.Size == 0 && f.Object == "" && f.Offset == 0 && f.Length == 0
	}
	return f.Length == f.Size && f.Offset >= 0 && f.Offset+f.Length >= f.Offset && objectstore.CheckKey(f.Object) == nil
}

// where names the file, and the object in which it lies if it lies in one.
func (f *File) where() string {
	if f.Object == "" {
		return f.Name
	}
	return f.Name + " from object " + f.Object
}

// validate checks what holds for every manifest (SN1).
func (m *Manifest) validate() error {
	switch {
	case m.M < 1 || m.M > maxKeyGroups || m.Range.Empty() || int(m.Range.Hi) > m.M:
		return base.Invalid("range", fmt.Sprintf("%s of %d key groups", m.Range, m.M))
	case len(m.Engine) == 0 || len(m.Engine) > maxEngineBytes:
		return base.Invalid("engine", "1 to 255 bytes")
	case len(m.Files) > MaxFiles:
		return &base.Error{Cause: base.ErrTooLarge, Field: "files", Ordinal: -1, Hint: fmt.Sprintf("at most %d", MaxFiles)}
	}
	for i := range m.Files {
		f := &m.Files[i]
		if err := checkName(f.Name); err != nil {
			return err
		}
		if i > 0 && m.Files[i-1].Name >= f.Name {
			return base.Invalid("files", fmt.Sprintf("%q is out of order or twice", f.Name))
		}
		if f.Size < 0 || f.Offset < 0 || f.Length < 0 || len(f.Object) > MaxObjectBytes {
			return base.Invalid("files", fmt.Sprintf("%q has an impossible size or place", f.Name))
		}
	}
	return m.validateChangelog()
}

// checkName refuses what could leave the directory or clash with our own files.
func checkName(name string) error {
	switch {
	case name == "" || len(name) > MaxNameBytes, name == "." || name == "..",
		strings.ContainsAny(name, "/\\\x00"), strings.HasSuffix(name, partSuffix):
		return base.Invalid("files", fmt.Sprintf("%.64q is no file name of a snapshot", name))
	}
	return nil
}

// Bytes is the size of all files and segments together.
func (m *Manifest) Bytes() int64 {
	n := m.Changelog.Bytes()
	for i := range m.Files {
		n += m.Files[i].Size
	}
	return n
}

type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n int) []byte {
	if d.bad || n > len(d.b) {
		d.bad = true
		return nil
	}
	out := d.b[:n]
	d.b = d.b[n:]
	return out
}

func (d *decoder) u64() uint64 {
	if b := d.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// small is a number that must fit a key group or M.
func (d *decoder) small() uint32 {
	v := d.u64()
	if v > 1<<16 {
		d.bad = true
		return 0
	}
	return uint32(v)
}

func (d *decoder) u32() uint32 {
	if b := d.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) text() string {
	b := d.take(2)
	if b == nil {
		return ""
	}
	return string(d.take(int(binary.LittleEndian.Uint16(b))))
}
