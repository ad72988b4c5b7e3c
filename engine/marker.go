package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/zeebo/xxh3"

	"github.com/keelstate/keelstate/engine/internal/durable"
	"github.com/keelstate/keelstate/internal/base"
)

// MarkerFile is the name of the file in every store directory that says which
// implementation the directory belongs to.
const MarkerFile = "keelstate-engine"

// Marker is the content of a marker file (docs/formats/engine-marker.md).
type Marker struct {
	// Engine is the Name of the Driver.
	Engine string
	// Layout is the implementation's version of everything else in the
	// directory, from 1.
	Layout uint16
}

// The layout of the file is frozen.
const (
	markerMagic      = "KSENGINE"
	markerVersion    = 1
	markerFixed      = len(markerMagic) + 2 + 2 + 1
	maxMarkerName    = 32
	markerChecksum   = 8
	maxMarkerFileLen = markerFixed + maxMarkerName + markerChecksum
)

// EncodeMarker returns the bytes of a marker file. It fails with base.ErrInvalid
// if the name is empty or longer than 32 bytes or the layout is 0.
func EncodeMarker(m Marker) ([]byte, error) {
	if len(m.Engine) == 0 || len(m.Engine) > maxMarkerName || m.Layout == 0 {
		return nil, fmt.Errorf("encoding engine marker %q layout %d: %w", m.Engine, m.Layout, base.ErrInvalid)
	}
	b := append(make([]byte, 0, maxMarkerFileLen), markerMagic...)
	b = binary.BigEndian.AppendUint16(b, markerVersion)
	b = binary.BigEndian.AppendUint16(b, m.Layout)
	b = append(b, byte(len(m.Engine)))
	b = append(b, m.Engine...)
	return binary.BigEndian.AppendUint64(b, xxh3.Hash(b)), nil
}

// DecodeMarker is the inverse. It fails with base.ErrFormatVersion for a marker
// of another version, with base.ErrCorrupt for anything else that EncodeMarker
// does not produce.
func DecodeMarker(b []byte) (Marker, error) {
	const doing = "decoding engine marker"
	if len(b) < len(markerMagic)+2 || string(b[:len(markerMagic)]) != markerMagic {
		return Marker{}, fmt.Errorf("%s: no magic: %w", doing, base.ErrCorrupt)
	}
	if v := binary.BigEndian.Uint16(b[len(markerMagic):]); v != markerVersion {
		return Marker{}, fmt.Errorf("%s: version %d: %w", doing, v, base.ErrFormatVersion)
	}
	if len(b) < markerFixed+1+markerChecksum || len(b) > maxMarkerFileLen {
		return Marker{}, fmt.Errorf("%s: %d bytes: %w", doing, len(b), base.ErrCorrupt)
	}
	body, sum := b[:len(b)-markerChecksum], binary.BigEndian.Uint64(b[len(b)-markerChecksum:])
	if xxh3.Hash(body) != sum {
		return Marker{}, fmt.Errorf("%s: checksum differs: %w", doing, base.ErrCorrupt)
	}
	m := Marker{Layout: binary.BigEndian.Uint16(b[len(markerMagic)+2:]), Engine: string(body[markerFixed:])}
	if int(b[markerFixed-1]) != len(m.Engine) || m.Layout == 0 {
		return Marker{}, fmt.Errorf("%s: length or layout: %w", doing, base.ErrCorrupt)
	}
	return m, nil
}

// ReadMarker reads the marker of a store directory. Without a marker file it
// fails with base.ErrNotFound.
func ReadMarker(dir string) (Marker, error) {
	f, err := os.Open(filepath.Join(dir, MarkerFile))
	if errors.Is(err, os.ErrNotExist) {
		return Marker{}, fmt.Errorf("reading engine marker of %s: %w", dir, base.ErrNotFound)
	}
	if err != nil {
		return Marker{}, fmt.Errorf("reading engine marker of %s: %w: %w", dir, base.ErrDiskFailed, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, int64(maxMarkerFileLen)+1))
	if err != nil {
		return Marker{}, fmt.Errorf("reading engine marker of %s: %w: %w", dir, base.ErrDiskFailed, err)
	}
	m, err := DecodeMarker(b)
	if err != nil {
		return Marker{}, fmt.Errorf("reading engine marker of %s: %w", dir, err)
	}
	return m, nil
}

// WriteMarker writes the marker of a store directory durably.
func WriteMarker(dir string, m Marker) error {
	b, err := EncodeMarker(m)
	if err != nil {
		return err
	}
	_, err = durable.WriteFile(filepath.Join(dir, MarkerFile), func(w io.Writer) error {
		_, err := w.Write(b)
		return err
	})
	return err
}

// ClaimDirectory makes dir a store directory of m's implementation, or checks
// that it is one: an absent or empty directory gets the marker, durably and
// before any other file. It fails with base.ErrIdentity if the directory is
// another implementation's or holds files without a marker, and with
// base.ErrFormatVersion if its layout is not m's.
func ClaimDirectory(dir string, m Marker) error {
	got, err := ReadMarker(dir)
	if errors.Is(err, base.ErrNotFound) {
		return claimEmpty(dir, m)
	}
	if err != nil {
		return err
	}
	return compareMarker(dir, got, m)
}

// CheckDirectory is ClaimDirectory for a directory that must be a store
// already; without a marker it fails with base.ErrNotFound.
func CheckDirectory(dir string, m Marker) error {
	got, err := ReadMarker(dir)
	if err != nil {
		return err
	}
	return compareMarker(dir, got, m)
}

func compareMarker(dir string, got, want Marker) error {
	if got.Engine != want.Engine {
		return fmt.Errorf("opening %s as a store of engine %q: it is one of %q: %w", dir, want.Engine, got.Engine, base.ErrIdentity)
	}
	if got.Layout != want.Layout {
		return fmt.Errorf("opening %s: layout %d of engine %q, this build has %d: %w", dir, got.Layout, got.Engine, want.Layout, base.ErrFormatVersion)
	}
	return nil
}

func claimEmpty(dir string, m Marker) error {
	if err := durable.Mkdir(dir); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("listing %s: %w: %w", dir, base.ErrDiskFailed, err)
	}
	for _, e := range entries {
		// A crash while the marker was written leaves its temporary file.
		if e.Name() != MarkerFile+durable.TempSuffix {
			return fmt.Errorf("opening %s as a store: it holds %s but no %s: %w", dir, e.Name(), MarkerFile, base.ErrIdentity)
		}
	}
	return WriteMarker(dir, m)
}
