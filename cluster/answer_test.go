package cluster

import (
	"errors"
	"fmt"
	"testing"

	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
)

// chunkReader answers every query with a value of the size that its key says,
// and notes what was read at once.
type chunkReader struct {
	size   func(i int) int
	chunks []int
	read   int // queries
	bytes  int
}

func (r *chunkReader) readMany(qs []*state.Query) ([]state.Answer, []error) {
	answers := make([]state.Answer, len(qs))
	for i := range qs {
		answers[i] = state.Answer{Found: true, Value: make([]byte, r.size(r.read))}
		r.bytes += len(answers[i].Value)
		r.read++
	}
	r.chunks = append(r.chunks, len(qs))
	return answers, make([]error, len(qs))
}

func someQueries(n int) ([]*state.Query, []error) {
	qs := make([]*state.Query, n)
	for i := range qs {
		qs[i] = &state.Query{Kind: state.QueryGet}
	}
	return qs, make([]error, n)
}

func TestReadOfManyLargeValuesStopsAtOneMessage(t *testing.T) {
	for _, c := range []struct {
		name  string
		size  func(i int) int
		limit int // of what may be read
	}{
		{"4 MiB each", func(int) int { return state.MaxValueBytes }, state.MaxMessageBytes + 2*state.MaxValueBytes},
		{"1 MiB each", func(int) int { return 1 << 20 }, state.MaxMessageBytes + 4<<20},
		{"growing", func(i int) int { return min(1<<i, state.MaxValueBytes) }, 2*state.MaxMessageBytes + 4<<20},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &chunkReader{size: c.size}
			qs, failed := someQueries(1000)
			answers, err := answerQueries(r.readMany, qs, failed, nil)
			if err != nil || len(answers) != len(qs) {
				t.Fatal(len(answers), err)
			}
			if r.bytes > c.limit {
				t.Errorf("%d bytes were read in parts of %v, at most %d", r.bytes, r.chunks, c.limit)
			}
			for i := range qs {
				if refused := errors.Is(failed[i], base.ErrTooLarge); refused != (i >= r.read) || refused == answers[i].Found {
					t.Fatalf("query %d of %d read: %v", i, r.read, failed[i])
				}
			}
		})
	}
}

// Small values, the usual case, are read in large parts.
func TestReadOfManySmallValuesTakesFewParts(t *testing.T) {
	r := &chunkReader{size: func(int) int { return 100 }}
	qs, failed := someQueries(100)
	failed[3], qs[3] = base.ErrUndeclared, nil
	if _, err := answerQueries(r.readMany, qs, failed, func(int) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(r.chunks); got != "[4 16 64 15]" {
		t.Errorf("read in parts of %s", got)
	}
	if !errors.Is(failed[3], base.ErrUndeclared) || failed[2] != nil || failed[99] != nil {
		t.Errorf("failed: %v", failed)
	}
}

// The reservation hears of what was read before more is read, and may end it.
func TestReadEndsWhereThereIsNoRoom(t *testing.T) {
	r := &chunkReader{size: func(int) int { return 1 << 20 }}
	var asked []int
	qs, failed := someQueries(20)
	answers, err := answerQueries(r.readMany, qs, failed, func(bytes int) error {
		if asked = append(asked, bytes); bytes > 5<<20 {
			return base.ErrOverloaded
		}
		return nil
	})
	if !errors.Is(err, base.ErrOverloaded) || answers != nil {
		t.Fatalf("%d answers, %v", len(answers), err)
	}
	if len(asked) != 3 || asked[0] != 4<<20 || r.read != 6 {
		t.Errorf("asked at %v, %d were read", asked, r.read)
	}
}
