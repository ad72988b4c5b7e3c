package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"go.yaml.in/yaml/v3"
)

// apiVersion is the version of the JSON keys.
const apiVersion = "keelstate/v1"

func validOutput(o string) bool {
	return slices.Contains([]string{"table", "wide", "json", "yaml", "jsonl"}, o)
}

// field is one key of an item. A wide one is left out of the plain table.
type field struct {
	name  string
	value any
	wide  bool
}

// record is an item with its keys in order.
type record []field

// MarshalJSON keeps the order of the keys.
func (r record) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, f := range r {
		if i > 0 {
			b.WriteByte(',')
		}
		value, err := json.Marshal(f.value)
		if err != nil {
			return nil, fmt.Errorf("key %s: %w", f.name, err)
		}
		fmt.Fprintf(&b, "%q:%s", f.name, value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// pick keeps the named keys, in the order asked; all if none are named.
func (r record) pick(columns []string) (record, error) {
	if len(columns) == 0 {
		return r, nil
	}
	var out record
	for _, c := range columns {
		i := slices.IndexFunc(r, func(f field) bool { return strings.EqualFold(f.name, c) })
		if i < 0 {
			return nil, usage(fmt.Errorf("--columns: there is no %q", c))
		}
		f := r[i]
		f.wide = false
		out = append(out, f)
	}
	return out, nil
}

func header(kind string) record {
	return record{{name: "apiVersion", value: apiVersion}, {name: "kind", value: kind}}
}

// printOne prints one object.
func (a *app) printOne(kind string, r record) error {
	r, err := r.pick(a.columns)
	if err != nil {
		return err
	}
	if a.output != "table" && a.output != "wide" {
		return a.encode(append(header(kind), r...))
	}
	t := newTable()
	for _, f := range r {
		if !f.wide || a.output == "wide" {
			t.AppendRow(table.Row{strings.ToUpper(f.name), text(f.value)})
		}
	}
	_, err = io.WriteString(a.stdout, t.Render()+"\n")
	return err
}

// printList prints items.
func (a *app) printList(kind string, items []record) error {
	picked := make([]record, len(items))
	for i, r := range items {
		var err error
		if picked[i], err = r.pick(a.columns); err != nil {
			return err
		}
	}
	switch a.output {
	case "table", "wide":
		return a.printTable(picked)
	case "jsonl":
		for _, r := range picked {
			if err := a.encode(append(header(kind), r...)); err != nil {
				return err
			}
		}
		return nil
	}
	return a.encode(append(header(kind+"List"), field{name: "items", value: picked}))
}

func (a *app) printTable(items []record) error {
	t := newTable()
	for i, r := range items {
		var head, row table.Row
		for _, f := range r {
			if f.wide && a.output != "wide" {
				continue
			}
			head, row = append(head, strings.ToUpper(f.name)), append(row, text(f.value))
		}
		if i == 0 {
			t.AppendHeader(head)
		}
		t.AppendRow(row)
	}
	_, err := io.WriteString(a.stdout, t.Render()+"\n")
	return err
}

func (a *app) encode(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encoding the output: %w", err)
	}
	switch a.output {
	case "yaml":
		if b, err = jsonToYAML(b); err != nil {
			return fmt.Errorf("encoding the output: %w", err)
		}
	case "json":
		var indented bytes.Buffer
		if err := json.Indent(&indented, b, "", "  "); err != nil {
			return fmt.Errorf("encoding the output: %w", err)
		}
		b = indented.Bytes()
	}
	_, err = fmt.Fprintf(a.stdout, "%s\n", trimNewline(b))
	return err
}

// jsonToYAML keeps the order of the keys: JSON is YAML in flow style.
func jsonToYAML(b []byte) ([]byte, error) {
	var n yaml.Node
	if err := yaml.Unmarshal(b, &n); err != nil {
		return nil, err
	}
	block(&n)
	return yaml.Marshal(&n)
}

func block(n *yaml.Node) {
	if n.Kind == yaml.MappingNode || n.Kind == yaml.SequenceNode {
		n.Style = 0
	}
	if n.Kind == yaml.MappingNode {
		for i := 0; i < len(n.Content); i += 2 {
			n.Content[i].Style = 0 // a key in JSON's quotes
		}
	}
	for _, c := range n.Content {
		block(c)
	}
}

func trimNewline(b []byte) []byte { return bytes.TrimRight(b, "\n") }

// newTable is a plain table: no borders and no colours, so NO_COLOR holds.
func newTable() table.Writer {
	t := table.NewWriter()
	style := table.StyleDefault
	style.Options = table.OptionsNoBordersAndSeparators
	style.Box.PaddingLeft, style.Box.PaddingRight = "", "  "
	style.Format.Header = 0
	t.SetStyle(style)
	t.SuppressTrailingSpaces()
	return t
}

// text is a cell of a table.
func text(v any) string {
	switch x := v.(type) {
	case string:
		if x == "" {
			return `""`
		}
		return x
	case []string:
		if len(x) == 0 {
			return "-"
		}
		return strings.Join(x, "; ")
	case map[string]int:
		var parts []string
		for k, n := range x {
			parts = append(parts, fmt.Sprintf("%s %d", k, n))
		}
		slices.Sort(parts)
		if len(parts) == 0 {
			return "-"
		}
		return strings.Join(parts, ", ")
	}
	return fmt.Sprint(v)
}
