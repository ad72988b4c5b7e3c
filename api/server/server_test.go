package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// gaugeValue is the value of one counter or gauge.
func gaugeValue(t testing.TB, c prometheus.Collector) (sum float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	if err := reg.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return sum
}

// TestWriteConversion checks what reaches the backend.
func TestWriteConversion(t *testing.T) {
	var route cluster.Route
	var got *raftfsm.Request
	f := &fake{submit: func(_ context.Context, r cluster.Route, req *raftfsm.Request, done func(raftfsm.Result)) {
		route, got = r, req
		done(raftfsm.Result{Token: raftfsm.Token{Incarnation: 1, Group: 2, Birth: 3, Sequence: 4, Barrier: 5}, Replayed: true})
	}}
	k := newKit(t, f, Options{})
	e := []byte{}
	res, err := k.state.Write(testContext(t), &keelstatepb.WriteRequest{
		Tag: 5, Shard: 9, Epoch: 8, Incarnation: 7, Session: 6, Sequence: 5, Previous: 4, Floor: 3, BarrierSeen: 2, Atomic: true, MetadataRevision: 11,
		Preconditions: []*keelstatepb.Precondition{{State: 2, Kind: keelstatepb.PreconditionKind_PRECONDITION_KIND_VERSION, Key: []byte("p"), HasUserKey: true, UserKey: []byte("u"), Value: []byte("v"), Version: 12}},
		Mutations: []*keelstatepb.Mutation{
			{Ordinal: 2, State: 1, Op: keelstatepb.MutationOp_MUTATION_OP_VALUE_PUT, Key: []byte("k")}, // the empty value
			{Ordinal: 4, State: 1, Op: keelstatepb.MutationOp_MUTATION_OP_LIST_ADD, Key: []byte("k"), Namespace: &keelstatepb.Namespace{}, Elements: [][]byte{{}, {}, []byte("x")}, NullElements: []uint32{1}},
			{Ordinal: 5, State: 1, Op: keelstatepb.MutationOp_MUTATION_OP_MAP_PUT, Entries: []*keelstatepb.MapEntry{{UserKey: []byte("a")}, {UserKey: []byte("b"), Null: true}}},
			{Ordinal: 6, State: 1, Op: keelstatepb.MutationOp_MUTATION_OP_MERGE_NAMESPACES, Sources: []*keelstatepb.NamespaceRef{{}, {Namespace: &keelstatepb.Namespace{Value: []byte("n")}}}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if tok := res.Token; !res.Replayed || res.Tag != 5 || tok.Incarnation != 1 || tok.Shard != 2 || tok.Birth != 3 || tok.Sequence != 4 || tok.Barrier != 5 {
		t.Errorf("result %v", res)
	}
	if route != (cluster.Route{Group: 9, Epoch: 8, Incarnation: 7, MetadataRevision: 11}) {
		t.Errorf("route %+v", route)
	}
	want := &raftfsm.Request{Incarnation: 7, Epoch: 8, Session: 6, Seq: 5, Prev: 4, Floor: 3, Atomic: true, BarrierSeen: 2,
		Preconditions: []state.Precondition{{State: 2, Kind: state.PreVersion, Key: []byte("p"), HasUserKey: true, UserKey: []byte("u"), Bytes: []byte("v"), Version: 12}},
		Mutations: []raftfsm.Mutation{
			{Ordinal: 2, Mutation: state.Mutation{State: 1, Op: state.OpValuePut, Key: []byte("k"), Value: e}},
			{Ordinal: 4, Mutation: state.Mutation{State: 1, Op: state.OpListAdd, Key: []byte("k"), Namespace: state.Namespace{Set: true}, Elements: [][]byte{e, nil, []byte("x")}}},
			{Ordinal: 5, Mutation: state.Mutation{State: 1, Op: state.OpMapPut, Key: e, Entries: []state.Entry{{UserKey: []byte("a"), Value: e}, {UserKey: []byte("b"), Null: true}}}},
			{Ordinal: 6, Mutation: state.Mutation{State: 1, Op: state.OpMergeNamespaces, Key: e, Sources: []state.Namespace{{}, {Set: true, Bytes: []byte("n")}}}},
		}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// TestRefusedBeforeSubmit: each is invalid, not applied, and names its field.
func TestRefusedBeforeSubmit(t *testing.T) {
	k := newKit(t, &fake{}, Options{}) // a submit would panic and be ErrInternal
	ctx := testContext(t)
	write := func(w *keelstatepb.WriteRequest) error { _, err := k.state.Write(ctx, w); return err }
	mutate := func(m *keelstatepb.Mutation) error {
		return write(&keelstatepb.WriteRequest{Mutations: []*keelstatepb.Mutation{m}})
	}
	read := func(r *keelstatepb.ReadRequest) error { _, err := k.state.Read(ctx, r); return err }
	declare := func(d *keelstatepb.Declaration) error {
		_, err := k.cluster.DeclareState(ctx, &keelstatepb.DeclareStateRequest{Declaration: d})
		return err
	}
	scan := func(r *keelstatepb.ScanRequest) error {
		s, err := k.state.Scan(ctx, r)
		if err == nil {
			_, err = s.Recv()
		}
		return err
	}
	value := keelstatepb.StateKind_STATE_KIND_VALUE
	for _, c := range []struct {
		name, field string
		want        *base.Sentinel
		err         error
	}{
		{"no op", "mutations[3].op", base.ErrInvalid, mutate(&keelstatepb.Mutation{Ordinal: 3})},
		{"unknown op", "mutations[0].op", base.ErrInvalid, mutate(&keelstatepb.Mutation{Op: 9})},
		{"negative op", "mutations[0].op", base.ErrInvalid, mutate(&keelstatepb.Mutation{Op: -1})},
		{"null element beyond", "mutations[1].null_elements[0]", base.ErrInvalid,
			mutate(&keelstatepb.Mutation{Ordinal: 1, Op: keelstatepb.MutationOp_MUTATION_OP_ADD, NullElements: []uint32{0}})},
		{"no precondition kind", "preconditions[0].kind", base.ErrInvalid, write(&keelstatepb.WriteRequest{Preconditions: []*keelstatepb.Precondition{{}}})},
		{"unknown precondition kind", "preconditions[0].kind", base.ErrInvalid, write(&keelstatepb.WriteRequest{Preconditions: []*keelstatepb.Precondition{{Kind: 6}}})},
		{"too many mutations", "mutations", base.ErrTooLarge, write(&keelstatepb.WriteRequest{Mutations: make([]*keelstatepb.Mutation, state.MaxRequestMutations+1)})},
		{"unknown consistency", "consistency", base.ErrInvalid, read(&keelstatepb.ReadRequest{Consistency: 1})},
		{"no query kind", "queries[1].kind", base.ErrInvalid, read(&keelstatepb.ReadRequest{Queries: []*keelstatepb.Query{{Kind: 1}, {}}})},
		{"unknown query kind", "queries[0].kind", base.ErrInvalid, read(&keelstatepb.ReadRequest{Queries: []*keelstatepb.Query{{Kind: 6}}})},
		{"scan consistency", "consistency", base.ErrInvalid, scan(&keelstatepb.ScanRequest{Consistency: 7})},
		{"scan range", "range", base.ErrInvalid, scan(&keelstatepb.ScanRequest{Range: &keelstatepb.Range{}})},
		{"scan of a key in all namespaces", "filter_namespace", base.ErrUnsupported, scan(&keelstatepb.ScanRequest{FilterKey: true})},
		{"nothing declared", "declaration", base.ErrInvalid, declare(nil)},
		{"ttl", "declaration.ttl_ms", base.ErrUnsupported, declare(&keelstatepb.Declaration{Kind: value, TtlMs: 1})},
		{"chosen id", "declaration.id", base.ErrInvalid, declare(&keelstatepb.Declaration{Kind: value, Id: 1})},
		{"no kind", "declaration.kind", base.ErrInvalid, declare(&keelstatepb.Declaration{})},
		{"unknown kind", "declaration.kind", base.ErrInvalid, declare(&keelstatepb.Declaration{Kind: 6})},
		{"key type", "declaration.key_type", base.ErrInvalid, declare(&keelstatepb.Declaration{Kind: value, KeyType: "uuid"})},
		{"value type", "declaration.value_type", base.ErrInvalid, declare(&keelstatepb.Declaration{Kind: value, KeyType: "string", ValueType: "tuple("})},
		{"codec version", "declaration.codec_version", base.ErrUnsupported, declare(&keelstatepb.Declaration{Kind: value, CodecVersion: 1 << 16})},
	} {
		var be *base.Error
		err := apierr.FromError(c.err)
		if !errors.As(err, &be) || base.SentinelOf(err) != c.want || be.Field != c.field || base.OutcomeOf(err) != base.OutcomeNotApplied {
			t.Errorf("%s: got %v (field %q), want %s at %q", c.name, err, be.Field, c.want.Reason, c.field)
		}
	}
	if n := gaugeValue(t, k.server.metrics.panics); n != 0 {
		t.Errorf("%v panics", n)
	}
}

// TestPanic is SV6 for plain calls.
func TestPanic(t *testing.T) {
	f := &fake{read: func(context.Context, *cluster.ReadRequest) (*cluster.ReadReply, error) { panic("boom") }}
	k := newKit(t, f, Options{})
	get := &keelstatepb.ReadRequest{Queries: []*keelstatepb.Query{{Kind: keelstatepb.QueryKind_QUERY_KIND_GET}}}
	_, err := k.state.Read(testContext(t), get)
	if err = apierr.FromError(err); !errors.Is(err, base.ErrInternal) || base.OutcomeOf(err) != base.OutcomeUnknown || strings.Contains(err.Error(), "boom") {
		t.Errorf("got %v", err)
	}
	f.read = func(context.Context, *cluster.ReadRequest) (*cluster.ReadReply, error) {
		return nil, base.ErrNotFounded
	}
	if _, err := k.state.Read(testContext(t), get); !errors.Is(apierr.FromError(err), base.ErrNotFounded) {
		t.Errorf("the server does not go on: %v", err)
	}
	if n := gaugeValue(t, k.server.metrics.panics); n != 1 {
		t.Errorf("%v panics counted", n)
	}
}

// TestDeadline: a write that is queued when the deadline passes is unknown.
func TestDeadline(t *testing.T) {
	held := make(chan func(raftfsm.Result), 20)
	f := &fake{submit: func(_ context.Context, _ cluster.Route, _ *raftfsm.Request, done func(raftfsm.Result)) { held <- done }}
	k := newKit(t, f, Options{})
	// A deadline may pass before the write is queued: then the next is longer.
	for within := 50 * time.Millisecond; len(held) == 0 && within < time.Minute; within *= 2 {
		ctx, cancel := context.WithTimeout(testContext(t), within)
		_, err := k.state.Write(ctx, &keelstatepb.WriteRequest{Mutations: []*keelstatepb.Mutation{put("k", "v")}})
		cancel()
		if err = apierr.FromError(err); !errors.Is(err, base.ErrDeadline) || base.OutcomeOf(err) != base.OutcomeUnknown {
			t.Errorf("got %v, outcome %v", err, base.OutcomeOf(err))
		}
	}
	if len(held) == 0 {
		t.Fatal("no write was queued")
	}
	for len(held) > 0 {
		(<-held)(raftfsm.Result{})
	}
}

func TestLeaderAddress(t *testing.T) {
	g := base.GroupID(3)
	f := &fake{topo: &cluster.Topology{Nodes: []cluster.NodeInfo{{ID: "n2", GRPCAddr: "n2:7401"}}},
		read: func(context.Context, *cluster.ReadRequest) (*cluster.ReadReply, error) {
			return nil, &base.Error{Cause: base.ErrNotLeader, Group: &g, LeaderHint: "n2", Ordinal: -1}
		}}
	k := newKit(t, f, Options{})
	_, err := k.state.Read(testContext(t), &keelstatepb.ReadRequest{})
	if d := apierr.DetailOf(err); d.GetLeaderAddress() != "n2:7401" || d.GetLeaderHint() != "n2" || d.GetGroup() != 3 {
		t.Errorf("detail %v", d)
	}
}

// TestAnswersFitOneMessage is SV5: values of the largest size that together do
// not fit, and very many refusals.
func TestAnswersFitOneMessage(t *testing.T) {
	big := make([]byte, state.MaxValueBytes)
	f := &fake{read: func(_ context.Context, req *cluster.ReadRequest) (*cluster.ReadReply, error) {
		r := &cluster.ReadReply{}
		for i := range req.Queries {
			if len(req.Queries) > 100 {
				r.Answers, r.Errs = append(r.Answers, state.Answer{}), append(r.Errs, &base.Error{Cause: base.ErrInvalid, Field: strings.Repeat("f", 250), Hint: strings.Repeat("h", 500), Ordinal: -1})
				continue
			}
			a := state.Answer{Found: true, Value: big}
			if i == 5 {
				a.Value = nil
			}
			r.Answers, r.Errs = append(r.Answers, a), append(r.Errs, nil)
		}
		return r, nil
	}}
	k := newKit(t, f, Options{})
	q := &keelstatepb.Query{Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: []byte("k")}
	res, err := k.state.Read(testContext(t), &keelstatepb.ReadRequest{Queries: slices.Repeat([]*keelstatepb.Query{q}, 6)})
	if err != nil {
		t.Fatal(err)
	}
	for i, a := range res.Answers {
		switch err := apierr.FromDetail(a.Error); {
		case i == 3 || i == 4:
			if !errors.Is(err, base.ErrTooLarge) || a.Error.Ordinal != uint32(i) {
				t.Errorf("answer %d: %v", i, err)
			}
		case err != nil || i < 3 && len(a.Value) != len(big):
			t.Errorf("answer %d: %v", i, err)
		}
	}
	res, err = k.state.Read(testContext(t), &keelstatepb.ReadRequest{Queries: slices.Repeat([]*keelstatepb.Query{q}, maxQueries)})
	if err != nil || len(res.Answers) != maxQueries {
		t.Fatalf("%d answers, %v", len(res.GetAnswers()), err)
	}
	for i, a := range res.Answers {
		if !errors.Is(apierr.FromDetail(a.Error), base.ErrInvalid) {
			t.Fatalf("answer %d: %v", i, a.Error)
		}
	}
}

func TestPagesShareOneMessage(t *testing.T) {
	var sizes []int
	f := &fake{read: func(_ context.Context, req *cluster.ReadRequest) (*cluster.ReadReply, error) {
		for _, q := range req.Queries {
			sizes = append(sizes, q.PageBytes)
		}
		return &cluster.ReadReply{Answers: make([]state.Answer, len(req.Queries)), Errs: make([]error, len(req.Queries))}, nil
	}}
	k := newKit(t, f, Options{})
	page := func(n uint32) *keelstatepb.Query {
		return &keelstatepb.Query{Kind: keelstatepb.QueryKind_QUERY_KIND_PAGE, PageBytes: n}
	}
	get := &keelstatepb.Query{Kind: keelstatepb.QueryKind_QUERY_KIND_GET}
	if _, err := k.state.Read(testContext(t), &keelstatepb.ReadRequest{Queries: []*keelstatepb.Query{page(4 << 20), page(0), get, page(100), page(1 << 31)}}); err != nil {
		t.Fatal(err)
	}
	if want := []int{2 << 20, 1 << 20, 0, 100, 2 << 20}; !slices.Equal(sizes, want) {
		t.Errorf("page sizes %v, want %v", sizes, want)
	}
}

// listScan is a Scan over numbered items.
type listScan struct {
	next, total, page int
	closed            *bool
}

func (s *listScan) Next(context.Context) (items []state.ScanItem, cursor []byte, more bool, err error) {
	for ; s.next < s.total && len(items) < s.page; s.next++ {
		items = append(items, state.ScanItem{Group: 7, Key: fmt.Append(nil, s.next), Namespace: state.Namespace{Set: s.next%2 == 0}})
	}
	if s.next == s.total {
		return items, nil, false, nil
	}
	return items, fmt.Append(nil, s.next), true, nil
}
func (s *listScan) Token() raftfsm.Token { return raftfsm.Token{Sequence: 42} }
func (s *listScan) Close()               { *s.closed = true }

func TestScan(t *testing.T) {
	for _, c := range []struct{ total, page, limit, want, pages int }{
		{10, 4, 0, 10, 3}, {10, 4, 6, 6, 2}, {10, 4, 8, 8, 2}, {10, 4, 100, 10, 3}, {0, 4, 0, 0, 1}, {8, 4, 3, 3, 1},
	} {
		closed := false
		var asked state.ScanQuery
		f := &fake{scan: func(_ context.Context, req *cluster.ScanRequest) (Scan, error) {
			asked = req.Query
			return &listScan{total: c.total, page: c.page, closed: &closed}, nil
		}}
		k := newKit(t, f, Options{})
		s, err := k.state.Scan(testContext(t), &keelstatepb.ScanRequest{State: 3, Range: &keelstatepb.Range{Lo: 1, Hi: 9}, KeysOnly: true,
			FilterNamespace: true, Limit: uint64(c.limit), Cursor: []byte("c"), PageBytes: 77})
		if err != nil {
			t.Fatal(err)
		}
		got, pages := 0, 0
		for {
			p, err := s.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			pages++
			for _, it := range p.Items {
				if string(it.Key) != fmt.Sprint(got) || it.Group != 7 || (it.Namespace != nil) != (got%2 == 0) {
					t.Fatalf("item %d is %v", got, it)
				}
				got++
			}
			if p.Token.Sequence != 42 {
				t.Errorf("token %v", p.Token)
			}
			if p.Cursor != nil && string(p.Cursor) != fmt.Sprint(got) {
				t.Errorf("%+v: cursor %s after %d items", c, p.Cursor, got)
			}
		}
		if got != c.want || pages != c.pages || !closed {
			t.Errorf("%+v: %d items in %d pages, closed %v", c, got, pages, closed)
		}
		if asked.State != 3 || asked.Range.Lo != 1 || asked.Range.Hi != 9 || !asked.KeysOnly || !asked.Filter || asked.Namespace.Set ||
			string(asked.Cursor) != "c" || asked.PageBytes != 77 || asked.Limit != c.limit {
			t.Errorf("asked for %+v", asked)
		}
	}
}

// TestScanOfOneKey: all pages of one key come from one open scan, and so from
// one instant.
func TestScanOfOneKey(t *testing.T) {
	opened, closed := 0, false
	f := &fake{scan: func(_ context.Context, req *cluster.ScanRequest) (Scan, error) {
		q := req.Key
		if q == nil || q.Kind != state.QueryPage || q.State != 3 || string(q.Key) != "k" || string(q.Namespace.Bytes) != "n" || !q.Namespace.Set ||
			!q.KeysOnly || q.PageBytes != 77 || string(q.Cursor) != "c" {
			return nil, base.ErrInternal
		}
		opened++
		return &listScan{total: 8, page: 2, closed: &closed}, nil
	}}
	k := newKit(t, f, Options{})
	scan := func(r *keelstatepb.ScanRequest) (n int, err error) {
		s, err := k.state.Scan(testContext(t), r)
		if err != nil {
			t.Fatal(err)
		}
		for {
			p, err := s.Recv()
			if errors.Is(err, io.EOF) {
				return n, nil
			}
			if err != nil {
				return n, err
			}
			if p.Token.GetSequence() != 42 {
				t.Errorf("token %v", p.Token)
			}
			n += len(p.Items)
		}
	}
	for limit, want := range map[uint64]int{0: 8, 3: 3} {
		opened, closed = 0, false
		n, err := scan(&keelstatepb.ScanRequest{State: 3, FilterKey: true, Key: []byte("k"), FilterNamespace: true, KeysOnly: true,
			Namespace: &keelstatepb.Namespace{Value: []byte("n")}, Limit: limit, PageBytes: 77, Cursor: []byte("c")})
		if err != nil || n != want || opened != 1 || !closed {
			t.Errorf("limit %d: %d items of %d from %d scans, closed %v: %v", limit, n, want, opened, closed, err)
		}
	}
	if _, err := scan(&keelstatepb.ScanRequest{State: 3, FilterKey: true, Key: []byte("k")}); !errors.Is(apierr.FromError(err), base.ErrUnsupported) {
		t.Errorf("without a namespace: %v", err)
	}
}

func TestHealthAndReflection(t *testing.T) {
	k := newKit(t, &fake{}, Options{})
	ctx := testContext(t)
	health := healthpb.NewHealthClient(k.conn)
	for _, want := range []bool{false, true, false} {
		k.server.SetServing(want)
		for _, service := range []string{"", "keelstate.v1.State"} {
			r, err := health.Check(ctx, &healthpb.HealthCheckRequest{Service: service})
			if err != nil || (r.Status == healthpb.HealthCheckResponse_SERVING) != want {
				t.Errorf("service %q: %v %v, want serving %v", service, r, err, want)
			}
		}
	}
	s, err := reflectpb.NewServerReflectionClient(k.conn).ServerReflectionInfo(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&reflectpb.ServerReflectionRequest{MessageRequest: &reflectpb.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	r, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, svc := range r.GetListServicesResponse().GetService() {
		names = append(names, svc.Name)
	}
	for _, want := range []string{"keelstate.v1.State", "keelstate.v1.Cluster", "keelstate.v1.Admin", "grpc.health.v1.Health"} {
		if !slices.Contains(names, want) {
			t.Errorf("reflection does not list %s: %v", want, names)
		}
	}
	if err := s.CloseSend(); err != nil {
		t.Error(err)
	}
	// A health watch does not hold up a drain.
	watch, err := health.Watch(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := k.server.Drain(ctx); err != nil {
		t.Errorf("draining: %v", err)
	}
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	f := &fake{submit: func(_ context.Context, _ cluster.Route, req *raftfsm.Request, done func(raftfsm.Result)) {
		if len(req.Mutations) == 0 {
			done(raftfsm.Result{Err: &base.Error{Cause: base.ErrOverloaded, Ordinal: -1}})
			return
		}
		done(raftfsm.Result{})
	}}
	k := newKit(t, f, Options{Registerer: reg})
	ctx := testContext(t)
	if _, err := k.state.Write(ctx, &keelstatepb.WriteRequest{Mutations: []*keelstatepb.Mutation{put("k", "v")}}); err != nil {
		t.Fatal(err)
	}
	if _, err := k.state.Write(ctx, &keelstatepb.WriteRequest{}); !errors.Is(apierr.FromError(err), base.ErrOverloaded) {
		t.Fatal(err)
	}
	s, err := k.state.WriteStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Send(&keelstatepb.WriteBatch{Requests: []*keelstatepb.WriteRequest{{Tag: 1}, {Tag: 2, Mutations: []*keelstatepb.Mutation{put("k", "v")}}}}), s.CloseSend()); err != nil {
		t.Fatal(err)
	}
	if got, err := collect(t, s); err != nil || len(got) != 2 {
		t.Fatalf("%v %v", got, err)
	}
	for _, method := range []string{"State/Write", "State/WriteStream"} {
		for _, reason := range []string{"ok", "overloaded"} {
			if n := gaugeValue(t, k.server.metrics.requests.WithLabelValues(method, reason)); n != 1 {
				t.Errorf("%s %s: %v", method, reason, n)
			}
		}
	}
	eventually(t, "the stream is counted", func() bool {
		return gaugeValue(t, k.server.metrics.streams.WithLabelValues("State/WriteStream", "ok")) == 1
	})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
	}
	want := []string{"keelstate_api_open_streams", "keelstate_api_panics_total", "keelstate_api_request_seconds", "keelstate_api_requests_total", "keelstate_api_streams_total"}
	if !slices.Equal(names, want) {
		t.Errorf("metrics %v, want %v", names, want)
	}
}
