package crashtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	keel "github.com/keelstate/keelstate/client"
)

// callLimit is short, so that faults leave outcomes unknown.
const callLimit = 2 * time.Second

// states are all the states that the workloads use.
type states struct {
	client  *keel.Client
	probe   *keel.Value[int64]
	regs    *keel.Value[string]
	list    *keel.List[string]
	sum     *keel.Reducing[int64]
	table   *keel.Map[string, int64]
	bValue  *keel.Value[int64]
	bMap    *keel.Map[string, int64]
	bList   *keel.List[int64]
	bMax    *keel.Reducing[int64]
	counter *keel.Aggregating[int64, int64]
}

func declare(t *testing.T, cl *keel.Client) *states {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	k, s := cl.Keyspace("crash", keel.String.Type()), &states{client: cl}
	var errs [10]error
	s.probe, errs[0] = keel.DeclareValue(ctx, k, "probe", keel.Int64)
	s.regs, errs[1] = keel.DeclareValue(ctx, k, "regs", keel.String)
	s.list, errs[2] = keel.DeclareList(ctx, k, "list", keel.String)
	s.sum, errs[3] = keel.DeclareReducing(ctx, k, "sum", "sum", keel.Int64)
	s.table, errs[4] = keel.DeclareMap(ctx, k, "table", keel.String, keel.Int64)
	s.bValue, errs[5] = keel.DeclareValue(ctx, k, "b-value", keel.Int64)
	s.bMap, errs[6] = keel.DeclareMap(ctx, k, "b-map", keel.String, keel.Int64)
	s.bList, errs[7] = keel.DeclareList(ctx, k, "b-list", keel.Int64)
	s.bMax, errs[8] = keel.DeclareReducing(ctx, k, "b-max", "max", keel.Int64)
	s.counter, errs[9] = keel.DeclareAggregating(ctx, k, "count", "count", keel.Int64, keel.Int64)
	for _, err := range errs {
		if err != nil {
			t.Fatalf("declaring: %v", err)
		}
	}
	return s
}

// load is all workloads at once.
type load struct {
	t     *testing.T
	begin time.Time
	stop  chan struct{}
	wg    sync.WaitGroup

	acked, unknown, refused atomic.Int64

	mu   sync.Mutex
	ops  map[string][]porcupine.Operation // by register
	apps []appended
	sums map[string]*bounds
	puts map[string]*lastPut
	last map[string]int64 // batches acknowledged, by key
}

type appended struct {
	key, element string
	call, ret    time.Duration
	outcome      keel.Outcome
}

// bounds of a sum or a count.
type bounds struct{ sum, sumOpen, count, countOpen int64 }

// lastPut is the newest acknowledged value of a map entry, and the newest tried.
type lastPut struct{ acked, tried int64 }

func startLoad(t *testing.T, c *nodes, seed uint64) *load {
	l := &load{t: t, begin: time.Now(), stop: make(chan struct{}), ops: make(map[string][]porcupine.Operation),
		sums: make(map[string]*bounds), puts: make(map[string]*lastPut), last: make(map[string]int64)}
	for i := range 3 {
		s := declare(t, c.client())
		works := []func(int, *states, *rand.Rand){l.registers, l.registers, l.appends, l.fold, l.put, l.batches}
		for j, work := range works {
			l.wg.Add(1)
			go func() {
				defer l.wg.Done()
				work(i*len(works)+j, s, rand.New(rand.NewPCG(seed, uint64(i*len(works)+j)+2)))
			}()
		}
	}
	return l
}

func (l *load) stopped() bool {
	select {
	case <-l.stop:
		return true
	default:
		return false
	}
}

// end stops all workloads and waits for their last calls.
func (l *load) end() {
	close(l.stop)
	l.wg.Wait()
	l.t.Logf("%d calls acknowledged, %d unknown, %d refused in %.1f s", l.acked.Load(), l.unknown.Load(), l.refused.Load(), time.Since(l.begin).Seconds())
}

// call makes one call and counts its outcome.
func (l *load) call(f func(context.Context) error) (keel.Outcome, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	err := f(ctx)
	o := outcome(err)
	switch o {
	case keel.OutcomeApplied:
		l.acked.Add(1)
	case keel.OutcomeUnknown:
		l.unknown.Add(1)
	default:
		l.refused.Add(1)
		pause(ctx, 5*time.Millisecond)
	}
	return o, err
}

type regInput struct {
	op       byte // 'r', 'w', 'c'
	old, new string
}

type regOutput struct {
	value   string // of a read; "" is absent
	set     bool   // of a compare-and-set
	unknown bool
}

// registerModel is one register: reads, writes and compare-and-set.
var registerModel = porcupine.Model{
	Init: func() any { return "" },
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(string), input.(regInput), output.(regOutput)
		switch {
		case in.op == 'r':
			return out.value == s, s
		case in.op == 'w':
			return true, in.new
		case out.unknown && s == in.old:
			return true, in.new
		case out.unknown:
			return true, s
		default:
			set := s == in.old
			if set {
				s = in.new
			}
			return out.set == set, s
		}
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

// registers uses registers that change every few seconds, so that each has a
// short history.
func (l *load) registers(worker int, s *states, r *rand.Rand) {
	seen := make(map[string]string)
	for n := 0; !l.stopped(); n++ {
		key := fmt.Sprintf("reg-%d-%d", time.Since(l.begin)/(3*time.Second), r.IntN(6))
		in := regInput{op: "rrwcc"[r.IntN(5)], new: fmt.Sprintf("%d.%d", worker, n)}
		if in.op == 'c' {
			if in.old = seen[key]; in.old == "" {
				in.op = 'r'
			}
		}
		var out regOutput
		call := time.Since(l.begin)
		o, _ := l.call(func(ctx context.Context) (err error) {
			switch in.op {
			case 'r':
				out.value, _, err = s.regs.Get(ctx, key)
			case 'w':
				_, err = s.regs.Set(ctx, key, in.new)
			default:
				out.set, _, err = s.regs.CompareAndSet(ctx, key, in.new, s.regs.IfEqual(key, in.old))
			}
			return err
		})
		ret := time.Since(l.begin)
		if o == keel.OutcomeNotApplied || o == keel.OutcomeUnknown && in.op == 'r' {
			continue
		}
		if o == keel.OutcomeUnknown { // CR2
			out, ret = regOutput{unknown: true}, time.Duration(1<<62)
		}
		if in.op == 'r' {
			seen[key] = out.value
		}
		l.mu.Lock()
		l.ops[key] = append(l.ops[key], porcupine.Operation{ClientId: worker, Input: in, Output: out, Call: int64(call), Return: int64(ret)})
		l.mu.Unlock()
	}
}

// appends keeps several appends on their way, each of a unique element.
func (l *load) appends(worker int, s *states, r *rand.Rand) {
	type open struct {
		a      appended
		p      *keel.Pending
		cancel context.CancelFunc
	}
	settle := func(o open) {
		defer o.cancel()
		o.a.outcome, _ = l.call(func(ctx context.Context) error { _, err := o.p.Wait(ctx); return err })
		o.a.ret = time.Since(l.begin)
		l.mu.Lock()
		l.apps = append(l.apps, o.a)
		l.mu.Unlock()
	}
	var under []open
	for n := 0; !l.stopped(); n++ {
		a := appended{key: fmt.Sprintf("list-%d", r.IntN(5)), element: fmt.Sprintf("%02d.%08d", worker, n), call: time.Since(l.begin)}
		ctx, cancel := context.WithTimeout(context.Background(), callLimit)
		under = append(under, open{a, s.client.Batch().Add(s.list.AddOp(a.key, a.element)).Start(ctx), cancel})
		if len(under) >= 8 {
			settle(under[0])
			under = under[1:]
		}
	}
	for _, o := range under {
		settle(o)
	}
}

// fold adds to a sum and to a count in calls of their own.
func (l *load) fold(_ int, s *states, r *rand.Rand) {
	for !l.stopped() {
		key, add := fmt.Sprintf("sum-%d", r.IntN(5)), 1+r.Int64N(1000)
		so, _ := l.call(func(ctx context.Context) error { _, err := s.sum.Add(ctx, key, add); return err })
		co, _ := l.call(func(ctx context.Context) error { _, err := s.counter.Add(ctx, key, add); return err })
		l.mu.Lock()
		b := l.sums[key]
		if b == nil {
			b = &bounds{}
			l.sums[key] = b
		}
		switch so {
		case keel.OutcomeApplied:
			b.sum += add
		case keel.OutcomeUnknown:
			b.sumOpen += add
		}
		switch co {
		case keel.OutcomeApplied:
			b.count++
		case keel.OutcomeUnknown:
			b.countOpen++
		}
		l.mu.Unlock()
	}
}

// put writes rising values into map entries that only this worker writes.
func (l *load) put(worker int, s *states, r *rand.Rand) {
	for n := int64(1); !l.stopped(); n++ {
		key, user := fmt.Sprintf("table-%d", r.IntN(3)), fmt.Sprintf("%d-%d", worker, r.IntN(40))
		o, _ := l.call(func(ctx context.Context) error { _, err := s.table.Put(ctx, key, user, n); return err })
		if o == keel.OutcomeNotApplied {
			continue
		}
		l.mu.Lock()
		p := l.puts[key+"/"+user]
		if p == nil {
			p = &lastPut{}
			l.puts[key+"/"+user] = p
		}
		p.tried = n
		if o == keel.OutcomeApplied {
			p.acked = n
		}
		l.mu.Unlock()
	}
}

// batches writes one number into four states in one atomic batch and, when that
// is acknowledged, reads it back: this worker alone writes the key, and a write
// that was open takes effect before the next of its session (B09).
func (l *load) batches(worker int, s *states, _ *rand.Rand) {
	key := fmt.Sprintf("batch-%d", worker)
	for n := int64(1); !l.stopped(); n++ {
		o, _ := l.call(func(ctx context.Context) error {
			_, err := s.client.Batch().Atomic().Add(s.bValue.SetOp(key, n), s.bMap.PutOp(key, "n", n),
				s.bList.UpdateOp(key, n), s.bMax.AddOp(key, n)).Commit(ctx)
			return err
		})
		got, err := readBatch(s, key)
		if err != nil {
			continue
		}
		low := int64(0)
		l.mu.Lock()
		if o == keel.OutcomeApplied {
			l.last[key] = n
		}
		low = l.last[key]
		l.mu.Unlock()
		if got[0] != got[1] || got[0] != got[2] || got[0] < low || got[0] > n {
			l.t.Errorf("%s: value, map, max = %v after %d was acknowledged and %d sent", key, got, low, n)
			return
		}
	}
}

// readBatch reads the parts of a batch that can be read at one instant.
func readBatch(s *states, key string) (got [3]int64, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	b := s.client.ReadBatch()
	v, m, x := s.bValue.Queue(b, key), s.bMap.Queue(b, key, "n"), s.bMax.Queue(b, key)
	if err = b.Do(ctx); err != nil {
		return got, err
	}
	for i, f := range []*keel.Future[int64]{v, m, x} {
		item, err := f.Get()
		if err != nil {
			return got, err
		}
		got[i] = item.Value
	}
	return got, nil
}

// judge compares what the cluster holds with what was acknowledged.
func (l *load) judge(s *states) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), 120*time.Second)
	defer cancel()
	l.judgeRegisters(ctx, s)
	l.judgeLists(ctx, s)
	for key, b := range l.sums {
		sum, _, err1 := s.sum.Get(ctx, key)
		count, _, err2 := s.counter.Get(ctx, key)
		if err1 != nil || err2 != nil || sum < b.sum || sum > b.sum+b.sumOpen || count < b.count || count > b.count+b.countOpen {
			l.t.Errorf("%s: sum %d (%v), count %d (%v), want %+v", key, sum, err1, count, err2, *b)
		}
	}
	for i := range 3 {
		key := fmt.Sprintf("table-%d", i)
		held := make(map[string]int64)
		for e, err := range s.table.Entries(ctx, key) {
			if err != nil {
				l.t.Fatal(err)
			}
			held[key+"/"+e.Key] = e.Value
		}
		for entry, p := range l.puts {
			if v := held[entry]; entry[:len(key)] == key && (v < p.acked || v > p.tried) {
				l.t.Errorf("%s is %d, %d was acknowledged, %d tried", entry, v, p.acked, p.tried)
			}
		}
	}
	for key := range l.last {
		got, err := readBatch(s, key)
		list, err2 := s.bList.Get(ctx, key)
		if err != nil || err2 != nil || len(list) != 1 || list[0] != got[0] || got[1] != got[0] || got[2] != got[0] || got[0] < l.last[key] {
			l.t.Errorf("%s: %v (%v), list %v (%v), acknowledged %d", key, got, err, list, err2, l.last[key])
		}
	}
}

func (l *load) judgeRegisters(ctx context.Context, s *states) {
	checked := 0
	for key, ops := range l.ops {
		v, _, err := s.regs.Get(ctx, key)
		if err != nil {
			l.t.Fatal(err)
		}
		now := int64(time.Since(l.begin))
		ops = append(ops, porcupine.Operation{ClientId: 1000, Input: regInput{op: 'r'}, Output: regOutput{value: v}, Call: now, Return: now + 1})
		switch porcupine.CheckOperationsTimeout(registerModel, ops, 10*time.Second) {
		case porcupine.Illegal:
			slices.SortFunc(ops, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
			l.t.Errorf("%s is not linearizable:", key)
			for _, o := range ops {
				l.t.Logf("%8.3f %8.3f client %d %+v -> %+v", float64(o.Call)/1e9, float64(o.Return)/1e9, o.ClientId, o.Input, o.Output)
			}
		case porcupine.Unknown:
			l.t.Logf("%s: too long to check (%d operations)", key, len(ops))
		default:
			checked++
		}
	}
	if checked == 0 {
		l.t.Error("no register could be checked")
	}
	l.t.Logf("%d of %d registers checked", checked, len(l.ops))
}

// judgeLists: every acknowledged element once, an unknown one at most once, a
// refused one never; each worker's in order; and nothing stands after what
// began only when it had been acknowledged.
func (l *load) judgeLists(ctx context.Context, s *states) {
	byElement, held := make(map[string]appended), make(map[string]int)
	for _, a := range l.apps {
		byElement[a.element] = a
	}
	for i := range 5 {
		key := fmt.Sprintf("list-%d", i)
		elements, err := s.list.Get(ctx, key)
		if err != nil {
			l.t.Fatal(err)
		}
		newest, earliest := make(map[string]string), time.Duration(1<<62)
		for _, e := range elements {
			held[e]++
			if e <= newest[e[:2]] {
				l.t.Errorf("%s: %s after %s", key, e, newest[e[:2]])
			}
			newest[e[:2]] = e
		}
		for _, e := range slices.Backward(elements) {
			a, ok := byElement[e]
			if !ok || a.key != key || a.outcome == keel.OutcomeNotApplied {
				l.t.Errorf("%s holds %s, which is %+v", key, e, a)
			}
			if earliest < a.call {
				l.t.Errorf("%s: %s, begun at %v, stands before one acknowledged at %v", key, e, a.call, earliest)
			}
			if a.outcome == keel.OutcomeApplied {
				earliest = min(earliest, a.ret)
			}
		}
	}
	for e, a := range byElement {
		if n := held[e]; n > 1 || n == 0 && a.outcome == keel.OutcomeApplied {
			l.t.Errorf("%+v is held %d times", a, n)
		}
	}
	l.t.Logf("%d appends judged", len(l.apps))
}
