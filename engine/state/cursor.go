package state

import (
	"fmt"

	"github.com/keelstate/keelstate/internal/base"
)

// A cursor is the position of the last item that was returned:
//
//	0  u8  version, 1
//	1  u8  'L' list page, 'M' map page, 'S' scan, 'K' scan of keys
//	2      L: element suffix (12 bytes); M: the user key; S: the engine key;
//	       K: the engine key up to and including the namespace
//
// It comes back from clients, so every part is checked before it is used. It
// can only name a place inside what the query may see.
const (
	cursorVersion  = 1
	cursorList     = 'L'
	cursorMap      = 'M'
	cursorScan     = 'S'
	cursorScanKeys = 'K'
)

// maxCursorBytes holds the largest engine key, every byte of it escaped.
const maxCursorBytes = 2 + 2*(MaxKeyBytes+MaxNamespaceBytes+MaxUserKeyBytes) + 32

func listCursor(suffix []byte) []byte {
	return append([]byte{cursorVersion, cursorList}, suffix...)
}

func mapCursor(userKey []byte) []byte {
	return append([]byte{cursorVersion, cursorMap}, userKey...)
}

func scanCursor(keysOnly bool, place []byte) []byte {
	tag := byte(cursorScan)
	if keysOnly {
		tag = cursorScanKeys
	}
	return append([]byte{cursorVersion, tag}, place...)
}

func badCursor() error {
	return base.Invalid("cursor", "use the cursor of the previous page of the same query, or none")
}

// cutCursor checks version and tag and returns the position.
func cutCursor(cursor []byte, tag byte) ([]byte, error) {
	if len(cursor) < 2 || len(cursor) > maxCursorBytes {
		return nil, badCursor()
	}
	if cursor[0] != cursorVersion {
		return nil, refuse(fmt.Errorf("cursor version %d: %w", cursor[0], base.ErrUnsupported), "cursor", "start again without a cursor")
	}
	if cursor[1] != tag {
		return nil, badCursor()
	}
	return cursor[2:], nil
}

// after is the smallest engine key above key. Engine keys of one family are
// never prefixes of each other, so key with a zero byte is below any other.
func after(key []byte) []byte { return append(append(make([]byte, 0, len(key)+1), key...), 0) }

// pageStart returns where the page after the cursor starts.
func (l Layout) pageStart(d *Declaration, cursor, cell []byte) ([]byte, error) {
	if d.Kind == KindList {
		suffix, err := cutCursor(cursor, cursorList)
		if err != nil {
			return nil, err
		}
		if len(suffix) != elementSuffix {
			return nil, badCursor()
		}
		return after(append(cell[:len(cell):len(cell)], suffix...)), nil
	}
	userKey, err := cutCursor(cursor, cursorMap)
	if err != nil {
		return nil, err
	}
	if validateUserKey("cursor", d, userKey) != nil {
		return nil, badCursor()
	}
	return after(appendPart(cell[:len(cell):len(cell)], userKey)), nil
}

// scanStart returns where the scan after the cursor starts.
func (l Layout) scanStart(d *Declaration, q *ScanQuery) ([]byte, error) {
	tag := byte(cursorScan)
	if q.KeysOnly {
		tag = cursorScanKeys
	}
	place, err := cutCursor(q.Cursor, tag)
	if err != nil {
		return nil, err
	}
	kind := d.Kind
	if q.KeysOnly {
		kind = KindValue // a cell has the form of a single-valued state's key
	}
	k, err := l.ParseKey(kind, place)
	if err != nil || !q.Range.Contains(k.Group) {
		return nil, badCursor()
	}
	if q.KeysOnly {
		return prefixEnd(place), nil
	}
	return after(place), nil
}
