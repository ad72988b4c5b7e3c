package metered

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, reg prometheus.Registerer, hook fault.Hook) *Store {
	t.Helper()
	f, err := file.Open(t.TempDir())
	must(t, err)
	m, err := NewMetrics(reg)
	must(t, err)
	return Wrap(fault.Wrap(f, hook), m)
}

func none(fault.Op, string) fault.Fault { return fault.Fault{} }

func TestConformance(t *testing.T) {
	objectstoretest.Run(t, objectstoretest.Options{Open: func(t testing.TB) objectstore.Store { return open(t, nil, none) }})
}

func TestFigures(t *testing.T) {
	ctx := context.Background()
	reg := prometheus.NewRegistry()
	failing := ""
	s := open(t, reg, func(op fault.Op, key string) fault.Fault {
		if key == failing && key != "" {
			return fault.Fault{Err: fault.Trouble("down"), Body: fault.Body{}}
		}
		if op == fault.OpGet && key == "breaks" {
			return fault.Fault{Body: fault.Body{Kind: fault.BodyBroken, At: 3}}
		}
		return fault.Fault{}
	})
	must(t, s.Put(ctx, "a", objectstore.Bytes([]byte("12345"))))
	must(t, s.Put(ctx, "breaks", objectstore.Bytes([]byte("12345"))))
	_ = s.Put(ctx, "a", objectstore.Bytes([]byte("12345")))
	_ = s.Put(ctx, "../a", objectstore.Bytes([]byte("12345")))
	get := func(key string, length int64) {
		if r, err := s.Get(ctx, key, 0, length); err == nil {
			_, _ = io.Copy(io.Discard, r)
			_ = r.Close()
			_ = r.Close()
		}
	}
	get("a", 4)
	get("none", 1)
	get("breaks", 5)
	_, _ = s.Stat(ctx, "a")
	for range s.List(ctx, "", "") {
		break
	}
	failing = "a"
	_ = s.Delete(ctx, "a")
	gone, cancel := context.WithCancel(ctx)
	cancel()
	_, _ = s.Stat(gone, "x")
	s.m.Repeated("put", 1, errors.New("x"))
	must(t, s.Close())

	families, err := reg.Gather()
	must(t, err)
	var got []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			line := f.GetName()[len("keelstate_object_store_"):]
			for _, l := range m.GetLabel() {
				line += " " + l.GetValue()
			}
			if c := m.GetCounter(); c != nil {
				got = append(got, fmt.Sprint(line, " ", c.GetValue()))
			} else {
				got = append(got, fmt.Sprint(line, " ", m.GetHistogram().GetSampleCount()))
			}
		}
	}
	want := []string{
		"bytes_total get 7", "bytes_total put 10",
		"calls_total delete object_store 1", "calls_total get not_found 1", "calls_total get object_store 1", "calls_total get ok 1",
		"calls_total list ok 1", "calls_total put conflict 1", "calls_total put invalid_argument 1", "calls_total put ok 2",
		"calls_total stat cancelled 1", "calls_total stat ok 1",
		"repeats_total put 1",
		"seconds delete 1", "seconds get 3", "seconds list 1", "seconds put 4", "seconds stat 2",
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("figures:\n%q\nwant\n%q", got, want)
	}
}
