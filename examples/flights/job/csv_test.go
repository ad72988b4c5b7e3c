package job

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
)

const header = "date,delay,distance,origin,destination\n"

func readAll(t *testing.T, text string) (rows []Row, bad []*BadLine, err error) {
	t.Helper()
	c, err := NewReader(strings.NewReader(text))
	if err != nil {
		return nil, nil, err
	}
	for {
		row, err := c.Next()
		var b *BadLine
		switch {
		case err == io.EOF:
			return rows, bad, nil
		case errors.As(err, &b):
			bad = append(bad, b)
		case err != nil:
			return rows, bad, err
		default:
			rows = append(rows, row)
		}
	}
}

func TestReaderAcceptsTheFormsOfCSV(t *testing.T) {
	want := Flight{Date: "2001/01/01 00:47", DelayMinutes: 66, DistanceMiles: 1750, Origin: "DTW", Destination: "LAS"}
	for name, text := range map[string]string{
		"plain":         header + "2001/01/01 00:47,66,1750,DTW,LAS\n",
		"no last break": header + "2001/01/01 00:47,66,1750,DTW,LAS",
		"CRLF":          strings.ReplaceAll(header+"2001/01/01 00:47,66,1750,DTW,LAS\n", "\n", "\r\n"),
		"byte order":    "\ufeff" + header + "2001/01/01 00:47,66,1750,DTW,LAS\n",
		"quoted":        header + "\"2001/01/01 00:47\",66,\"1750\",DTW,\"LAS\"\n",
		"other order":   "origin,note,destination,date,distance,delay\nDTW,\"a, b\",LAS,2001/01/01 00:47,1750,66\n",
		"empty lines":   header + "\n\n2001/01/01 00:47,66,1750,DTW,LAS\n\n",
		"gzip":          packed(t, header+"2001/01/01 00:47,66,1750,DTW,LAS\n"),
	} {
		rows, bad, err := readAll(t, text)
		if err != nil || len(bad) > 0 || len(rows) != 1 || rows[0].Flight != want {
			t.Errorf("%s: %+v, %v, %v", name, rows, bad, err)
		}
	}
}

func packed(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestReaderNamesBrokenLines(t *testing.T) {
	good := "2001/01/01 00:47,66,1750,DTW,LAS\n"
	for _, tc := range []struct{ line, reason string }{
		{"2001/01/01 00:47,66,1750,DTW", "4 fields, the header has 5"},
		{"2001/01/01 00:47,66,1750,DTW,LAS,x", "6 fields"},
		{"2001/13/01 00:47,66,1750,DTW,LAS", "date"},
		{"2001/01/01,66,1750,DTW,LAS", "date"},
		{"2001/01/01 00:47,late,1750,DTW,LAS", "delay"},
		{"2001/01/01 00:47,,1750,DTW,LAS", "delay"},
		{"2001/01/01 00:47,1.5,1750,DTW,LAS", "delay"},
		{"2001/01/01 00:47,66,-1,DTW,LAS", "distance"},
		{"2001/01/01 00:47,66,99999999999,DTW,LAS", "distance"},
		{"2001/01/01 00:47,66,1750,,LAS", "origin is empty"},
		{"2001/01/01 00:47,66,1750,DTW,", "destination is empty"},
		{"2001/01/01 00:47,66,1750,D\xffW,LAS", "origin"},
		{"2001/01/01 00:47,66,1750," + strings.Repeat("x", 65) + ",LAS", "origin has 65 bytes"},
		{"2001/01/01 00:47,66,1750,DTW,\"LAS", "quote"},
		{"2001/01/01 00:47,66,1750,DTW," + strings.Repeat("x", maxLineBytes), "longer than"},
	} {
		rows, bad, err := readAll(t, header+good+tc.line+"\n"+good)
		if err != nil || len(rows) != 2 || len(bad) != 1 {
			t.Fatalf("%.60q: %d rows, %v, %v", tc.line, len(rows), bad, err)
		}
		if rows[1].Line != 4 {
			t.Errorf("%.60q: the next line is %d, want 4", tc.line, rows[1].Line)
		}
		b := bad[0]
		if b.Line != 3 || !strings.Contains(b.Reason, tc.reason) || !strings.HasPrefix(tc.line, b.Text) || b.Text == "" {
			t.Errorf("%.60q: %v", tc.line, b)
		}
	}
}

func TestReaderRefusesOtherFiles(t *testing.T) {
	for text, want := range map[string]string{
		"":                                       "header is needed",
		"date,delay,distance,origin\n":           `lacks the column "destination"`,
		"DATE,delay,distance,origin,dest\n":      `lacks the column "date"`,
		"\x1f\x8b":                               "gzip",
		packed(t, header+"2001/01/01 00:4")[:30]: "unexpected EOF",
	} {
		_, _, err := readAll(t, text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// A broken archive is never taken for the end of the input.
func TestReaderReportsATruncatedArchiveAtEveryOffset(t *testing.T) {
	whole := packed(t, header+strings.Repeat("2001/01/01 00:47,66,1750,DTW,LAS\n", 50))
	for n := 2; n < len(whole); n++ {
		if _, _, err := readAll(t, whole[:n]); err == nil {
			t.Fatalf("cut after %d of %d bytes: no error", n, len(whole))
		}
	}
}

func TestCheckCountsAndStopsAtTheFirstBrokenLine(t *testing.T) {
	f, err := os.Open("../testdata/flights-20k.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if rows, err := Check(f, false); rows != 20000 || err != nil {
		t.Errorf("Check = %d, %v", rows, err)
	}
	text := header + "2001/01/01 00:47,66,1750,DTW,LAS\nnonsense\n2001/01/01 00:47,66,1750,DTW,LAS\n"
	_, err = Check(strings.NewReader(text), false)
	if err == nil || err.Error() != `line 3: 1 fields, the header has 5: "nonsense"` {
		t.Errorf("Check = %v", err)
	}
	if rows, err := Check(strings.NewReader(text), true); rows != 2 || err != nil {
		t.Errorf("Check with skipBad = %d, %v", rows, err)
	}
}

func TestSourceIDTellsInputsApart(t *testing.T) {
	id := func(text string) string {
		c, err := NewReader(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		return c.SourceID()
	}
	a := id(header + "2001/01/01 00:47,66,1750,DTW,LAS\n")
	if b := id(header + "2001/01/01 00:47,66,1750,DTW,LAS\n2001/01/01 00:48,66,1750,DTW,LAS\n"); b != a {
		t.Error("an appended line changes the id")
	}
	if b := id(packed(t, header+"2001/01/01 00:47,66,1750,DTW,LAS\n")); b != a {
		t.Error("compression changes the id")
	}
	if b := id(header + "2001/01/01 00:48,66,1750,DTW,LAS\n"); b == a {
		t.Error("another first line has the same id")
	}
}

func FuzzReader(f *testing.F) {
	f.Add([]byte(header + "2001/01/01 00:47,66,1750,DTW,LAS\n"))
	f.Add([]byte(header + "\"2001/01/01 00:47\",66,1750,DTW,\n\r\n"))
	f.Add([]byte("\x1f\x8b\x08\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := NewReader(bytes.NewReader(b))
		if err != nil {
			return
		}
		last := int64(1)
		for {
			row, err := c.Next()
			var bad *BadLine
			switch {
			case err == io.EOF:
				return
			case errors.As(err, &bad):
				row.Line = bad.Line
			case err != nil:
				return
			case row.Origin == "" || row.Day() == "" || row.DistanceMiles < 0:
				t.Fatalf("took %+v for a flight", row)
			}
			if row.Line <= last {
				t.Fatalf("line %d after line %d", row.Line, last)
			}
			last = row.Line
		}
	})
}
