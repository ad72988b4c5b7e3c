package history

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// plain makes empty and nil lists alike.
func plain(l line) line {
	fix := func(v []int64) []int64 {
		if len(v) == 0 {
			return nil
		}
		return v
	}
	l.Arg, l.Result = fix(l.Arg), fix(l.Result)
	for i := range l.Parts {
		l.Parts[i].Arg = fix(l.Parts[i].Arg)
	}
	for i := range l.Results {
		l.Results[i] = fix(l.Results[i])
	}
	if len(l.Parts) == 0 {
		l.Parts = nil
	}
	if len(l.Results) == 0 {
		l.Results = nil
	}
	return l
}

func checkScanned(t *testing.T, b []byte, l *line) {
	t.Helper()
	for _, name := range []string{"results", "parts", "arg", "k"} { // given twice: appended to, or replaced
		if strings.Count(string(b), `"`+name+`"`) > 1 {
			return
		}
	}
	var want line
	if err := json.Unmarshal(b, &want); err != nil {
		t.Fatalf("taken, but %v: %q", err, b)
	}
	if !reflect.DeepEqual(plain(*l), plain(want)) {
		t.Fatalf("%q:\n got %+v\nwant %+v", b, *l, want)
	}
}

func TestScanLine(t *testing.T) {
	cases := map[string]bool{
		`{}`:                         true,
		`{"t":"end","ops":12}`:       true,
		`{"arg":[]}`:                 true,
		`{"parts":[{"k":"x"}]}`:      true,
		`{"at":-0}`:                  true,
		`{"at":9223372036854775807}`: true,
		`{"at":9223372036854775808}`: false,
		`{"at":01}`:                  false,
		`{"at":1.5}`:                 false,
		`{"at": 1}`:                  false,
		`{"other":1}`:                false,
		`{"k":"\n"}`:                 false,
		`{"k":"é"}`:                  false,
		`{"arg":[1,]}`:               false,
		`{"arg":[1}`:                 false,
		`{"shard":-1}`:               false,
		`{"t":"end",}`:               false,
		`{"t":"end"}}`:               false,
		`{"t":"end"`:                 false,
		`{`:                          false,
		``:                           false,
	}
	for in, want := range cases {
		var l line
		got := scanLine([]byte(in), &l, func(b []byte) string { return string(b) })
		if got != want {
			t.Errorf("%q: %v", in, got)
		} else if got {
			checkScanned(t, []byte(in), &l)
		}
	}
}
