package keygroup

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/keelstate/keelstate/internal/base"
)

// ParseText reads a value of type t from text, as given on the command line:
//
//	string   the text itself (must be UTF-8)
//	int32, int64   decimal
//	bool     true or false
//	bytes    the text's bytes, with \xHH for any byte and \\ for a backslash
//	float64  decimal or hexadecimal floating point, NaN, Inf, -Inf
//	json     a JSON document
//	tuple    (f1,f2,...): each field as above, or as a JSON string that holds
//	         such text where it is empty or has one of , ( ) " or outer spaces
//
// ParseText(t, FormatText(t, v)) is v. Errors are base.ErrInvalid.
func ParseText(t Type, text string) (any, error) {
	if t.kind == kindTuple {
		return parseTuple(t, text)
	}
	return parseScalarText(t.kind, text)
}

func parseScalarText(k kind, text string) (any, error) {
	t := Type{kind: k}
	switch k {
	case kindString:
		if !utf8.ValidString(text) {
			return nil, fmt.Errorf("%w: a string must be valid UTF-8", base.ErrInvalid)
		}
		return text, nil
	case kindInt32:
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return nil, notText(t, text)
		}
		return int32(n), nil
	case kindInt64:
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, notText(t, text)
		}
		return n, nil
	case kindBool:
		if text != "true" && text != "false" {
			return nil, notText(t, text)
		}
		return text == "true", nil
	case kindBytes:
		return parseBytesText(text)
	case kindFloat64:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, notText(t, text)
		}
		return f, nil
	case kindJSON:
		if err := checkJSON([]byte(text)); err != nil {
			return nil, err
		}
		return json.RawMessage(text), nil
	}
	return nil, fmt.Errorf("%w: no type to read %q as", base.ErrInvalid, text)
}

func notText(t Type, text string) error {
	return fmt.Errorf("%w: %q is not the text of a %s", base.ErrInvalid, text, t)
}

func parseBytesText(text string) (any, error) {
	out := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		if text[i] != '\\' {
			out = append(out, text[i])
			continue
		}
		rest := text[i+1:]
		switch {
		case strings.HasPrefix(rest, `\`):
			out = append(out, '\\')
			i++
		case len(rest) >= 3 && rest[0] == 'x':
			b, err := hex.DecodeString(rest[1:3])
			if err != nil {
				return nil, fmt.Errorf("%w: %q is not a byte escape", base.ErrInvalid, text[i:i+4])
			}
			out = append(out, b[0])
			i += 3
		default:
			return nil, fmt.Errorf(`%w: a backslash in bytes must start \xHH or \\`, base.ErrInvalid)
		}
	}
	return out, nil
}

func parseTuple(t Type, text string) (any, error) {
	rest, open := strings.CutPrefix(strings.TrimSpace(text), "(")
	rest, closed := strings.CutSuffix(rest, ")")
	if !open || !closed {
		return nil, fmt.Errorf("%w: the text of a tuple is (field,field,...), not %q", base.ErrInvalid, text)
	}
	fields := make([]any, len(t.fields))
	for i := range fields {
		field, after, err := cutTextField(rest)
		if err != nil {
			return nil, fmt.Errorf("reading field %d of %q: %w", i, text, err)
		}
		if fields[i], err = parseScalarText(kind(t.fields[i]), field); err != nil {
			return nil, fmt.Errorf("reading field %d of %q: %w", i, text, err)
		}
		if i == len(fields)-1 {
			if after != "" {
				return nil, fmt.Errorf("%w: %q has more fields than %s", base.ErrInvalid, text, t)
			}
			return fields, nil
		}
		var comma bool
		if rest, comma = strings.CutPrefix(after, ","); !comma {
			return nil, fmt.Errorf("%w: %q has fewer fields than %s", base.ErrInvalid, text, t)
		}
	}
	return nil, fmt.Errorf("%w: %s has no fields", base.ErrInvalid, t)
}

// cutTextField returns the text of the first field of s, unquoted, and what
// follows it: "" or a comma with more.
func cutTextField(s string) (field, rest string, err error) {
	s = strings.TrimLeft(s, " ")
	if !strings.HasPrefix(s, `"`) {
		end := strings.IndexByte(s, ',')
		if end < 0 {
			end = len(s)
		}
		field = strings.TrimRight(s[:end], " ")
		if field == "" || strings.ContainsAny(field, `()"`) {
			return "", "", fmt.Errorf(`%w: a field that is empty or has one of ()" must be a JSON string`, base.ErrInvalid)
		}
		return field, s[end:], nil
	}
	end := 1
	for end < len(s) && s[end] != '"' {
		if s[end] == '\\' {
			end++
		}
		end++
	}
	if end >= len(s) {
		return "", "", fmt.Errorf("%w: a quote is not closed", base.ErrInvalid)
	}
	field, err = unquoteJSON(s[:end+1])
	return field, strings.TrimLeft(s[end+1:], " "), err
}

// unquoteJSON reads a JSON string. Unlike encoding/json it refuses half of a
// surrogate pair and bytes that are not UTF-8 instead of replacing them.
func unquoteJSON(quoted string) (string, error) {
	var s string
	if !utf8.ValidString(quoted) || json.Unmarshal([]byte(quoted), &s) != nil {
		return "", fmt.Errorf("%w: %s is not a JSON string", base.ErrInvalid, quoted)
	}
	if strings.ContainsRune(s, utf8.RuneError) && strings.Contains(strings.ToLower(quoted), `\ud`) {
		return "", fmt.Errorf("%w: %s holds half of a surrogate pair", base.ErrInvalid, quoted)
	}
	return s, nil
}

// FormatText returns the text of v for people, which ParseText reads back. A
// value that is not of type t is printed as Go prints it, between angle
// brackets, so that a wrong value is seen and not hidden.
func FormatText(t Type, v any) string {
	if t.kind != kindTuple {
		if s, ok := formatScalar(t.kind, v); ok {
			return s
		}
		return fmt.Sprintf("<%T %v>", v, v)
	}
	fields, ok := v.([]any)
	if !ok || len(fields) != len(t.fields) {
		return fmt.Sprintf("<%T %v>", v, v)
	}
	var b strings.Builder
	b.WriteByte('(')
	for i, f := range fields {
		if i > 0 {
			b.WriteByte(',')
		}
		s := FormatText(t.Field(i), f)
		if needsQuotes(s) {
			s = quoteJSON(s)
		}
		b.WriteString(s)
	}
	b.WriteByte(')')
	return b.String()
}

func formatScalar(k kind, v any) (string, bool) {
	switch x := v.(type) {
	case string:
		return x, k == kindString
	case int32:
		return strconv.FormatInt(int64(x), 10), k == kindInt32
	case int64:
		return strconv.FormatInt(x, 10), k == kindInt64
	case bool:
		return strconv.FormatBool(x), k == kindBool
	case []byte:
		return formatBytes(x), k == kindBytes
	case float64:
		return strconv.FormatFloat(x, 'g', -1, 64), k == kindFloat64
	case json.RawMessage:
		return string(x), k == kindJSON
	}
	return "", false
}

func formatBytes(b []byte) string {
	var out strings.Builder
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		switch {
		case r == '\\':
			out.WriteString(`\\`)
		case r == utf8.RuneError && n == 1 || !unicode.IsPrint(r):
			for _, c := range b[:n] {
				fmt.Fprintf(&out, `\x%02x`, c)
			}
		default:
			out.WriteRune(r)
		}
		b = b[n:]
	}
	return out.String()
}

func needsQuotes(s string) bool {
	return s == "" || strings.ContainsAny(s, `,()"`) || strings.TrimSpace(s) != s ||
		strings.ContainsFunc(s, unicode.IsControl)
}

func quoteJSON(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil { // a string always has a JSON form
		return strconv.Quote(s)
	}
	return strings.TrimSuffix(b.String(), "\n")
}
