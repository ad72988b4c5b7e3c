package cliout

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

func sample() Record {
	return Record{{Name: "id", Value: 7}, {Name: "names", Value: []string(nil)}, {Name: "why", Value: Phrases{"a, b", "c"}},
		{Name: "counts", Value: map[string]int{"b": 2, "a": 1}, Wide: true}, {Name: "parts", Value: []Record(nil)}}
}

func printed(t *testing.T, format string, columns ...string) string {
	t.Helper()
	var b bytes.Buffer
	if err := (Printer{Out: &b, Format: format, Columns: columns}).One("Thing", sample()); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// CO1.
func TestOneObject(t *testing.T) {
	const line = `{"apiVersion":"keelstate/v1","kind":"Thing","id":7,"names":[],"why":["a, b","c"],"counts":{"a":1,"b":2},"parts":[]}` + "\n"
	if got := printed(t, "jsonl"); got != line {
		t.Errorf("%s", got)
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, []byte(line), "", "  "); err != nil {
		t.Fatal(err)
	}
	if got := printed(t, "json"); got != indented.String() {
		t.Errorf("%s", got)
	}
	if got, want := printed(t, "yaml", "why", "ID"), "apiVersion: \"keelstate/v1\"\nkind: \"Thing\"\nwhy:\n    - \"a, b\"\n    - \"c\"\nid: 7\n"; got != want {
		t.Errorf("%s", got)
	}
	if got, want := printed(t, "table"), "ID     7\nNAMES  -\nWHY    a, b; c\n"; got != want {
		t.Errorf("%q", got)
	}
	if got := printed(t, "wide"); !strings.Contains(got, "COUNTS  a 1, b 2\n") {
		t.Errorf("%q", got)
	}
}

// CO2, and the head of a table without items.
func TestLists(t *testing.T) {
	var b bytes.Buffer
	l := Printer{Out: &b, Format: "jsonl"}.List("Thing")
	if err := l.Add(sample()); err != nil || strings.Count(b.String(), "\n") != 1 {
		t.Errorf("an item is not printed when it is added: %q %v", b.String(), err)
	}
	for _, c := range []struct{ format, want string }{
		{"table", "ID  WHY\n"}, {"jsonl", ""}, {"json", "{\n  \"apiVersion\": \"keelstate/v1\",\n  \"kind\": \"ThingList\",\n  \"items\": []\n}\n"},
	} {
		b.Reset()
		if err := (Printer{Out: &b, Format: c.format}).List("Thing", "id", "why").End(); err != nil || b.String() != c.want {
			t.Errorf("%s: %q %v", c.format, b.String(), err)
		}
	}
}

// CO3.
func TestColumns(t *testing.T) {
	var none *NoColumn
	if _, err := sample().Pick([]string{"id", "nonsense"}); !errors.As(err, &none) || none.Column != "nonsense" || len(none.Known) != 5 {
		t.Errorf("%v", err)
	}
	if err := CheckColumns([]string{"ID"}, sample().Names()); err != nil {
		t.Error(err)
	}
	if err := CheckColumns([]string{"idd"}, sample().Names()); !errors.As(err, &none) {
		t.Errorf("%v", err)
	}
	if got := printed(t, "table", "counts"); got != "COUNTS  a 1, b 2\n" { // a wide one that was asked for
		t.Errorf("%q", got)
	}
}

func TestAsked(t *testing.T) {
	for _, c := range []struct{ words, environment, want string }{
		{"", "", "table"}, {"", "json", "json"}, {"x -o yaml", "json", "yaml"}, {"--output=wide", "", "wide"}, {"--output jsonl", "", "jsonl"},
		{"-ojson", "", "json"}, {"-o=json", "", "json"}, {"-o", "", "table"}, {"-o xml", "json", "table"}, {"-- -o json", "", "table"}, {"-o json -o yaml", "", "yaml"},
	} {
		if got := Asked(strings.Fields(c.words), c.environment); got != c.want {
			t.Errorf("%q with %q: %s, want %s", c.words, c.environment, got, c.want)
		}
	}
}
