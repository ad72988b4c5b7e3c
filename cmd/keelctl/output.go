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
	value any // a scalar, []string, or []record for a table of its own
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
		name, err := json.Marshal(f.name)
		if err != nil {
			return nil, err
		}
		v := f.value
		switch list := v.(type) { // an empty list is [], not null
		case []record:
			if list == nil {
				v = []record{}
			}
		case []string:
			if list == nil {
				v = []string{}
			}
		}
		value, err := json.Marshal(v)
		if err != nil {
			return nil, fmt.Errorf("key %s: %w", f.name, err)
		}
		b.Write(name)
		b.WriteByte(':')
		b.Write(value)
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
			var names []string
			for _, f := range r {
				names = append(names, f.name)
			}
			return nil, noColumn(c, names)
		}
		f := r[i]
		f.wide = false
		out = append(out, f)
	}
	return out, nil
}

// printOne prints one object.
func (a *app) printOne(kind string, r record) error {
	r, err := r.pick(a.columns)
	if err != nil {
		return err
	}
	switch a.output {
	case "table", "wide":
		return a.printSheet(r)
	default:
		return a.encode(append(header(kind), r...))
	}
}

// printDone prints what a command with an effect did. A failure to print it does
// not undo it (KX5).
func (a *app) printDone(kind string, r record) error {
	if err := a.printOne(kind, r); err != nil {
		return &unprinted{err}
	}
	return nil
}

// printed collects or streams the items of a list.
type printed struct {
	app     *app
	kind    string
	columns []string // shown when there is no item
	items   []record
}

func (a *app) list(kind string, columns ...string) *printed {
	return &printed{app: a, kind: kind, columns: columns}
}

// add takes an item; under jsonl it is printed at once.
func (p *printed) add(r record) error {
	r, err := r.pick(p.app.columns)
	if err != nil {
		return err
	}
	if p.app.output == "jsonl" {
		return p.app.encode(append(header(p.kind), r...))
	}
	p.items = append(p.items, r)
	return nil
}

// end prints what is left.
func (p *printed) end() error {
	switch p.app.output {
	case "jsonl":
		return nil
	case "table", "wide":
		return p.app.printTable(p.app.stdout, p.items, p.columns)
	default:
		return p.app.encode(append(header(p.kind+"List"), field{name: "items", value: p.items}))
	}
}

func header(kind string) record {
	return record{{name: "apiVersion", value: apiVersion}, {name: "kind", value: kind}}
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

// printSheet prints one object: its scalars one a line, then its lists as
// tables.
func (a *app) printSheet(r record) error {
	t := newTable()
	var lists []field
	for _, f := range r {
		if _, isList := f.value.([]record); isList {
			lists = append(lists, f)
			continue
		}
		if !f.wide || a.output == "wide" {
			t.AppendRow(table.Row{strings.ToUpper(f.name), text(f.value)})
		}
	}
	if t.Length() > 0 {
		if err := render(a.stdout, t); err != nil {
			return err
		}
	}
	for _, f := range lists {
		items := f.value.([]record)
		if len(items) == 0 {
			continue
		}
		if _, err := fmt.Fprintf(a.stdout, "\n%s\n", strings.ToUpper(f.name)); err != nil {
			return err
		}
		if err := a.printTable(a.stdout, items, nil); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) printTable(w io.Writer, items []record, columns []string) error {
	t := newTable()
	var head table.Row
	if len(items) == 0 {
		for _, c := range columns {
			head = append(head, strings.ToUpper(c))
		}
	}
	for i, r := range items {
		var row table.Row
		for _, f := range r {
			if f.wide && a.output != "wide" {
				continue
			}
			if i == 0 {
				head = append(head, strings.ToUpper(f.name))
			}
			row = append(row, text(f.value))
		}
		t.AppendRow(row)
	}
	t.AppendHeader(head)
	return render(w, t)
}

// render writes a table. The table's own output mirror drops the writer's error.
func render(w io.Writer, t table.Writer) error {
	_, err := io.WriteString(w, t.Render()+"\n")
	return err
}

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
	case nil:
		return "-"
	case string:
		if x == "" {
			return `""`
		}
		return x
	case []string:
		if len(x) == 0 {
			return "-"
		}
		return strings.Join(x, ",")
	case json.RawMessage:
		return string(x)
	case []record:
		return fmt.Sprintf("%d", len(x))
	}
	return fmt.Sprint(v)
}
