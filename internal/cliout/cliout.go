package cliout

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

// APIVersion is the version of the JSON keys.
const APIVersion = "keelstate/v1"

// Formats are what --output may be.
var Formats = []string{"table", "wide", "json", "yaml", "jsonl"}

// Valid says that there is such a format.
func Valid(format string) bool { return slices.Contains(Formats, format) }

// IsTable says that a format is for people.
func IsTable(format string) bool { return format == "table" || format == "wide" }

// Asked is the format that a command line which could not be parsed asks for, for
// its error: the last -o or --output of the raw words, else the environment's.
func Asked(words []string, environment string) string {
	asked := environment
	for i, word := range words {
		if word == "--" {
			break
		}
		switch value, joined := strings.CutPrefix(word, "--output="); {
		case joined:
			asked = value
		case word == "-o" || word == "--output":
			if i+1 < len(words) {
				asked = words[i+1]
			}
		case strings.HasPrefix(word, "-o"):
			asked = strings.TrimPrefix(word[len("-o"):], "=")
		}
	}
	if !Valid(asked) {
		return "table"
	}
	return asked
}

// Field is one key of an item. A wide one is left out of the plain table.
type Field struct {
	Name  string
	Value any // a scalar, []string, Phrases, or []Record for a table of its own
	Wide  bool
}

// Phrases are strings with spaces and commas of their own.
type Phrases []string

// Record is an item with its keys in order.
type Record []Field

// MarshalJSON keeps the order of the keys. An empty list is [], not null.
func (r Record) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, f := range r {
		if i > 0 {
			b.WriteByte(',')
		}
		name, err := json.Marshal(f.Name)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(notNull(f.Value))
		if err != nil {
			return nil, fmt.Errorf("key %s: %w", f.Name, err)
		}
		b.Write(name)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

func notNull(v any) any {
	switch list := v.(type) {
	case []Record:
		if list == nil {
			return []Record{}
		}
	case []string:
		if list == nil {
			return []string{}
		}
	case Phrases:
		if list == nil {
			return Phrases{}
		}
	}
	return v
}

// Names are the keys.
func (r Record) Names() []string {
	var names []string
	for _, f := range r {
		names = append(names, f.Name)
	}
	return names
}

// NoColumn is the error of a column that there is not.
type NoColumn struct {
	Column string
	Known  []string
}

func (e *NoColumn) Error() string {
	return fmt.Sprintf("--columns: no column %q (there are: %s)", e.Column, strings.Join(e.Known, ", "))
}

// CheckColumns refuses columns that are none of the known ones.
func CheckColumns(columns, known []string) error {
	for _, c := range columns {
		if !slices.ContainsFunc(known, func(k string) bool { return strings.EqualFold(k, c) }) {
			return &NoColumn{c, known}
		}
	}
	return nil
}

// Pick keeps the named keys, in the order asked; all if none are named.
func (r Record) Pick(columns []string) (Record, error) {
	if len(columns) == 0 {
		return r, nil
	}
	var out Record
	for _, c := range columns {
		i := slices.IndexFunc(r, func(f Field) bool { return strings.EqualFold(f.Name, c) })
		if i < 0 {
			return nil, &NoColumn{c, r.Names()}
		}
		f := r[i]
		f.Wide = false
		out = append(out, f)
	}
	return out, nil
}

// Printer prints to Out in a format, all keys or those of Columns.
type Printer struct {
	Out     io.Writer
	Format  string
	Columns []string
}

func header(kind string) Record {
	return Record{{Name: "apiVersion", Value: APIVersion}, {Name: "kind", Value: kind}}
}

// One prints one object.
func (p Printer) One(kind string, r Record) error {
	r, err := r.Pick(p.Columns)
	if err != nil {
		return err
	}
	if IsTable(p.Format) {
		return p.sheet(r)
	}
	return p.Encode(append(header(kind), r...))
}

// List collects or streams the items of a list.
type List struct {
	printer Printer
	kind    string
	columns []string // shown when there is no item
	items   []Record
}

// List begins a list of items of a kind.
func (p Printer) List(kind string, columns ...string) *List {
	return &List{printer: p, kind: kind, columns: columns}
}

// Add takes an item; under jsonl it is printed at once.
func (l *List) Add(r Record) error {
	r, err := r.Pick(l.printer.Columns)
	if err != nil {
		return err
	}
	if l.printer.Format == "jsonl" {
		return l.printer.Encode(append(header(l.kind), r...))
	}
	l.items = append(l.items, r)
	return nil
}

// End prints what is left.
func (l *List) End() error {
	switch {
	case l.printer.Format == "jsonl":
		return nil
	case IsTable(l.printer.Format):
		return l.printer.Table(l.items, l.columns)
	default:
		return l.printer.Encode(append(header(l.kind+"List"), Field{Name: "items", Value: l.items}))
	}
}

// Encode prints a value as JSON, YAML or a line.
func (p Printer) Encode(v any) error {
	b, err := Encoded(p.Format, v)
	if err != nil {
		return fmt.Errorf("encoding the output: %w", err)
	}
	_, err = fmt.Fprintf(p.Out, "%s\n", b)
	return err
}

// Encoded is a value in a format that is no table, without a line feed at the end.
func Encoded(format string, v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	switch format {
	case "yaml":
		b, err = jsonToYAML(b)
	case "json":
		var indented bytes.Buffer
		err = json.Indent(&indented, b, "", "  ")
		b = indented.Bytes()
	}
	return bytes.TrimRight(b, "\n"), err
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

// sheet prints one object: its scalars one a line, then its lists as tables.
func (p Printer) sheet(r Record) error {
	t := newTable()
	var lists []Field
	for _, f := range r {
		if _, isList := f.Value.([]Record); isList {
			lists = append(lists, f)
			continue
		}
		if !f.Wide || p.Format == "wide" {
			t.AppendRow(table.Row{strings.ToUpper(f.Name), text(f.Value)})
		}
	}
	if t.Length() > 0 {
		if err := p.render(t); err != nil {
			return err
		}
	}
	for _, f := range lists {
		items := f.Value.([]Record)
		if len(items) == 0 {
			continue
		}
		if _, err := fmt.Fprintf(p.Out, "\n%s\n", strings.ToUpper(f.Name)); err != nil {
			return err
		}
		if err := p.Table(items, nil); err != nil {
			return err
		}
	}
	return nil
}

// Table prints items as a table, with a head of columns where there is none.
func (p Printer) Table(items []Record, columns []string) error {
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
			if f.Wide && p.Format != "wide" {
				continue
			}
			if i == 0 {
				head = append(head, strings.ToUpper(f.Name))
			}
			row = append(row, text(f.Value))
		}
		t.AppendRow(row)
	}
	t.AppendHeader(head)
	return p.render(t)
}

// render writes a table. The table's own output mirror drops the writer's error.
func (p Printer) render(t table.Writer) error {
	_, err := io.WriteString(p.Out, t.Render()+"\n")
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
		return joined(x, ",")
	case Phrases:
		return joined(x, "; ")
	case map[string]int:
		var parts []string
		for k, n := range x {
			parts = append(parts, fmt.Sprintf("%s %d", k, n))
		}
		slices.Sort(parts)
		return joined(parts, ", ")
	case json.RawMessage:
		return string(x)
	case []Record:
		return fmt.Sprintf("%d", len(x))
	}
	return fmt.Sprint(v)
}

func joined(parts []string, by string) string {
	if len(parts) == 0 {
		return "-"
	}
	return strings.Join(parts, by)
}
