package history

import "math"

// scanner reads the lines that this build writes, which are plain JSON in a
// fixed style, several times faster than encoding/json. It gives up on all
// else: then the general decoder decides.
type scanner struct {
	b    []byte
	at   int
	bad  bool
	text func([]byte) string
}

// scanLine fills l from an object; false if it is not in the plain style. Names
// go through text, which keeps one copy of each.
func scanLine(object []byte, l *line, text func([]byte) string) bool {
	s := &scanner{b: object, text: text}
	s.expect('{')
	for first := true; !s.bad; first = false {
		if s.peek() == '}' {
			return s.at == len(s.b)-1
		}
		if !first {
			s.expect(',')
		}
		name := s.raw()
		s.expect(':')
		s.field(string(name), l)
	}
	return false
}

func (s *scanner) field(name string, l *line) {
	switch name {
	case "t":
		l.T = s.word()
	case "id":
		l.ID = s.int()
	case "at":
		l.At = s.int()
	case "p":
		l.P = s.int()
	case "ops":
		l.Ops = s.int()
	case "shard":
		v := s.int()
		s.bad = s.bad || v < 0
		l.Shard = uint64(v)
	case "w":
		l.W = s.word()
	case "f":
		l.F = s.word()
	case "k":
		l.K = s.word()
	case "level":
		l.Level = s.word()
	case "node":
		l.Node = s.word()
	case "code":
		l.Code = s.word()
	case "arg":
		l.Arg = s.ints()
	case "result":
		l.Result = s.ints()
	case "results":
		s.list(func() { l.Results = append(l.Results, s.ints()) })
	case "parts":
		s.list(func() { l.Parts = append(l.Parts, s.part()) })
	default:
		s.bad = true
	}
}

func (s *scanner) part() (p linePart) {
	s.expect('{')
	for first := true; !s.bad; first = false {
		if s.peek() == '}' {
			s.at++
			return p
		}
		if !first {
			s.expect(',')
		}
		name := string(s.raw())
		s.expect(':')
		switch name {
		case "k":
			p.K = s.word()
		case "arg":
			p.Arg = s.ints()
		default:
			s.bad = true
		}
	}
	return p
}

func (s *scanner) peek() byte {
	if s.at >= len(s.b) {
		s.bad = true
		return 0
	}
	return s.b[s.at]
}

func (s *scanner) expect(c byte) {
	if s.peek() != c {
		s.bad = true
		return
	}
	s.at++
}

// raw reads a string without escapes or bytes outside ASCII.
func (s *scanner) raw() []byte {
	s.expect('"')
	from := s.at
	for !s.bad {
		c := s.peek()
		if c == '"' {
			s.at++
			return s.b[from : s.at-1]
		}
		if c == '\\' || c < ' ' || c >= 0x80 {
			s.bad = true
		}
		s.at++
	}
	return nil
}

func (s *scanner) word() string { return s.text(s.raw()) }

func (s *scanner) int() int64 {
	negative := s.peek() == '-'
	if negative {
		s.at++
	}
	from := s.at
	var v uint64
	for s.at < len(s.b) && s.b[s.at] >= '0' && s.b[s.at] <= '9' && s.at-from < 19 {
		v = v*10 + uint64(s.b[s.at]-'0')
		s.at++
	}
	digits := s.at - from
	if digits == 0 || (digits > 1 && s.b[from] == '0') || v > math.MaxInt64 ||
		(s.at < len(s.b) && s.b[s.at] >= '0' && s.b[s.at] <= '9') {
		s.bad = true // -1<<63 too goes the general way
		return 0
	}
	if negative {
		return -int64(v)
	}
	return int64(v)
}

func (s *scanner) ints() []int64 {
	var out []int64
	s.list(func() { out = append(out, s.int()) })
	return out
}

func (s *scanner) list(element func()) {
	s.expect('[')
	if !s.bad && s.peek() == ']' {
		s.at++
		return
	}
	for !s.bad {
		element()
		if s.bad {
			return
		}
		switch s.peek() {
		case ',':
			s.at++
		case ']':
			s.at++
			return
		default:
			s.bad = true
		}
	}
}
