package rocks

// #include <stdlib.h>
// #include "native.h"
import "C"

import (
	"encoding/binary"
	"unsafe"

	"github.com/keelstate/keelstate/engine"
)

// The functions here serve tests, which cannot call native code themselves.

// nativeFold folds values with the native merge operator of a kind: the first
// one as base if hasBase, by a partial merge if partial. ok is false if the
// operator refuses.
func nativeFold(k engine.MergeKind, hasBase, partial bool, values [][]byte) (folded []byte, ok bool) {
	var packed []byte
	for _, v := range values {
		packed = binary.NativeEndian.AppendUint32(packed, uint32(len(v)))
		packed = append(packed, v...)
	}
	flag := func(b bool) C.int {
		if b {
			return 1
		}
		return 0
	}
	var big *C.char
	var used C.size_t
	var accepted C.int
	err := take(C.ks_merge_for_test(C.uint8_t(k), flag(hasBase), flag(partial), chars(packed), C.size_t(len(packed)),
		C.size_t(len(values)), &big, &used, &accepted))
	if err != nil {
		return nil, false
	}
	defer C.free(unsafe.Pointer(big))
	return C.GoBytes(unsafe.Pointer(big), C.int(used)), accepted != 0
}

// nativePrefixLen is the length of the prefix of a key.
func nativePrefixLen(width int, key []byte) int {
	return int(C.ks_prefix_for_test(C.uint8_t(width), chars(key), C.size_t(len(key))))
}

// trimNative gives memory that the C allocator keeps back to the system, so
// that the resident set shows what is in use.
func trimNative() { C.ks_trim_for_test() }

// holdCompactions keeps RocksDB in this process from compacting by itself until
// release is called.
func holdCompactions() (release func()) {
	C.ks_hold_compactions_for_test(1)
	return func() { C.ks_hold_compactions_for_test(0) }
}
