package broadcast

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"reflect"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

// goldenCommands has one command of every kind, condition and operation.
func goldenCommands(t testing.TB) map[string][]byte {
	return map[string][]byte{
		"txn": mustTxn(t, Txn{
			Stamp:      1_700_000_000_000,
			Conditions: []Condition{IfAbsent("a\x00b"), IfRevision("k", 300), IfValue("v", []byte{}), IfValue("w", []byte("old"))},
			Then:       []Op{Put("k", []byte("new")), Put("empty", nil), Delete("gone"), DeletePrefix("p/")},
		}),
		"txn-empty": mustTxn(t, Txn{}),
		"tick":      EncodeTick(1_700_000_000_001),
		"compact":   EncodeCompact(129),
	}
}

func dumpCommand(b []byte) string {
	var s strings.Builder
	s.WriteString(hex.Dump(b))
	c, err := DecodeCommand(b)
	if err != nil {
		return s.String() + err.Error() + "\n"
	}
	fmt.Fprintf(&s, "kind %d stamp %d compact %d\n", c.Kind, c.Stamp, c.Compact)
	for _, x := range c.Conditions {
		fmt.Fprintf(&s, "condition %d %q revision %d value %q\n", x.Kind, x.Key, x.Revision, x.Value)
	}
	for _, x := range c.Then {
		fmt.Fprintf(&s, "op %d %q value %q\n", x.Kind, x.Key, x.Value)
	}
	return s.String()
}

func TestCommandGolden(t *testing.T) {
	for name, b := range goldenCommands(t) {
		stored := golden(t, "testdata/golden/v1/command-"+name+".bin", b)
		golden(t, "testdata/golden/v1/command-"+name+".txt", []byte(dumpCommand(stored)))
	}
}

// reseal puts the right checksum under a changed command.
func reseal(b []byte) []byte {
	body := b[:len(b)-commandTrailerLen]
	binary.LittleEndian.PutUint32(b[len(body):], crc32.Checksum(body, castagnoli))
	return b
}

func TestCommandOfAnotherVersionIsNotCorrupt(t *testing.T) {
	for _, seal := range []bool{false, true} {
		b := EncodeTick(5)
		b[4]++
		if seal {
			reseal(b)
		}
		_, err := DecodeCommand(b)
		if !errors.Is(err, base.ErrFormatVersion) || errors.Is(err, base.ErrCorrupt) {
			t.Errorf("sealed %v: %v, want ErrFormatVersion", seal, err)
		}
	}
}

func TestCommandCutAtEveryOffsetIsRefused(t *testing.T) {
	for name, b := range goldenCommands(t) {
		for n := range b {
			if _, err := DecodeCommand(b[:n]); !errors.Is(err, base.ErrCorrupt) {
				t.Errorf("%s cut to %d: %v, want ErrCorrupt", name, n, err)
			}
			// Cut in the body under a valid checksum: the fields decide.
			if n > commandHeaderLen+commandTrailerLen {
				if c, err := DecodeCommand(reseal(bytes.Clone(b[:n]))); err == nil {
					t.Errorf("%s cut to %d and sealed: decoded as %+v", name, n, c)
				}
			}
		}
	}
}

func TestCommandWithAnyFlippedBitIsRefused(t *testing.T) {
	for name, b := range goldenCommands(t) {
		for i := range len(b) * 8 {
			c := bytes.Clone(b)
			c[i/8] ^= 1 << (i % 8)
			if _, err := DecodeCommand(c); !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Errorf("%s bit %d: %v", name, i, err)
			}
		}
	}
}

func TestCommandLimitsAreRefusedByEncoderAndDecoder(t *testing.T) {
	long := strings.Repeat("k", MaxKeyBytes+1)
	for name, txn := range map[string]Txn{
		"empty key":         {Then: []Op{Put("", nil)}},
		"empty prefix":      {Then: []Op{DeletePrefix("")}},
		"long key":          {Then: []Op{Delete(long)}},
		"long value":        {Then: []Op{Put("k", make([]byte, MaxValueBytes+1))}},
		"unknown op":        {Then: []Op{{Kind: 9, Key: "k"}}},
		"long condition":    {Conditions: []Condition{IfAbsent(long)}},
		"unknown condition": {Conditions: []Condition{{Kind: 9, Key: "k"}}},
		"too many ops":      {Then: make([]Op, MaxOps+1)},
	} {
		if _, err := EncodeTxn(txn); !errors.Is(err, base.ErrInvalid) && !errors.Is(err, base.ErrTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
	many := Txn{}
	for range MaxCommandBytes/MaxValueBytes + 1 {
		many.Then = append(many.Then, Put("k", make([]byte, MaxValueBytes)))
	}
	if _, err := EncodeTxn(many); !errors.Is(err, base.ErrTooLarge) {
		t.Errorf("a command over the limit: %v", err)
	}
	if _, err := DecodeCommand(make([]byte, MaxCommandBytes+1)); !errors.Is(err, base.ErrTooLarge) {
		t.Errorf("decoding a command over the limit: %v", err)
	}
	for name, raw := range map[string]string{
		"empty key":      "\x00\x00\x01\x02\x00",
		"huge count":     "\x00\xff\xff\xff\xff\x0f\x00",
		"not minimal":    "\x80\x00\x00\x00",
		"huge length":    "\x00\x00\x01\x02\xff\xff\xff\xff\x0f",
		"trailing bytes": "\x00\x00\x00\x00",
	} {
		b := append([]byte(commandMagic+"\x01\x00\x01\x00"), raw...)
		if c, err := DecodeCommand(reseal(append(b, 0, 0, 0, 0))); err == nil {
			t.Errorf("%s: decoded as %+v", name, c)
		}
	}
}

func FuzzDecodeCommand(f *testing.F) {
	for _, b := range goldenCommands(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= commandHeaderLen+commandTrailerLen {
			b = reseal(bytes.Clone(b))
		}
		c, err := DecodeCommand(b)
		if err != nil {
			return
		}
		again, err := encodeCommand(c)
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("not canonical: %x became %x, %v", b, again, err)
		}
		if back, err := DecodeCommand(again); err != nil || !reflect.DeepEqual(back, c) {
			t.Fatalf("%+v became %+v, %v", c, back, err)
		}
	})
}
