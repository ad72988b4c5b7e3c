package check

import (
	"slices"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Bank checks transfers between the accounts of one shard. Every read of all
// accounts has the sum that was there from the start and no negative balance;
// the reads and transfers of a bank are linearizable by the id of the last
// transfer, which each transfer writes beside the balances; and the last
// balances are those of the acknowledged transfers and some of the unknown.
type Bank struct {
	// AllowNegative lets balances be negative.
	AllowNegative bool
}

// Name is "bank".
func (Bank) Name() string { return "bank" }

// Check judges.
func (c Bank) Check(ops []*history.Op, o Options) Result {
	return check("bank", ops, o, func(j *judge) {
		keys, by := byKey(ops)
		parts := make([][]event, len(keys))
		for n, key := range keys {
			if j.late("adding up balances") {
				return
			}
			b := &bank{key: key}
			b.index(j, by[key])
			if b.accounts == 0 {
				j.undecided(key, nil, "the bank was never opened")
				continue
			}
			for _, r := range b.reads {
				b.read(j, r, c.AllowNegative)
			}
			b.final(j)
			parts[n] = b.events()
		}
		if !j.failed() {
			j.linearizable(registerModel(), keys, parts)
		}
	})
}

type bank struct {
	key               string
	accounts, balance int64
	reads             []*history.Op // ok
	transfers         []*history.Op // ok and unknown
	wrong             bool
}

// maxAccounts bounds the accounts of a bank.
const maxAccounts = 1 << 16

func (b *bank) index(j *judge, ops []*history.Op) {
	for _, op := range ops {
		switch {
		case op.F == "open" && len(op.Arg) == 2 && op.Arg[0] > 0 && op.Arg[0] <= maxAccounts:
			b.accounts, b.balance = op.Arg[0], op.Arg[1]
		case op.F == "read":
			if op.Outcome == history.OK {
				b.reads = append(b.reads, op)
			}
		case op.F == "transfer" && len(op.Arg) == 4 && op.Arg[0] > 0:
			if op.Outcome != history.Fail {
				b.transfers = append(b.transfers, op)
			}
		default:
			j.malformed(op)
		}
	}
	for _, op := range b.transfers {
		for _, account := range op.Arg[1:3] {
			if account < 0 || account >= b.accounts {
				j.malformed(op)
				b.wrong = true
			}
		}
	}
}

func (b *bank) read(j *judge, r *history.Op, negative bool) {
	ids := []int64{r.ID}
	if int64(len(r.Result)) != b.accounts+1 {
		j.fail(b.key, ids, "a read has %d balances of %d accounts: %v", len(r.Result)-1, b.accounts, r)
		b.wrong = true
		return
	}
	var sum int64
	for n, v := range r.Result[1:] {
		sum += v
		if v < 0 && !negative {
			j.fail(b.key, ids, "account %d has %d: %v", n, v, r)
		}
	}
	if sum != b.accounts*b.balance {
		j.fail(b.key, ids, "the balances add up to %d and not to %d: %v", sum, b.accounts*b.balance, r)
	}
}

// maxTried bounds the unknown transfers of which final tries all subsets.
const maxTried = 12

// final looks at reads that began after every transfer had ended or was given
// up: some subset of the unknown transfers explains all balances.
func (b *bank) final(j *judge) {
	if b.wrong {
		return
	}
	var last int64
	var open []*history.Op
	acked := make([]int64, b.accounts)
	for k := range acked {
		acked[k] = b.balance
	}
	for _, op := range b.transfers {
		last = max(last, op.Invoke)
		if op.Open() {
			open = append(open, op)
			continue
		}
		last = max(last, op.Return)
		move(acked, op, 1)
	}
	if len(open) > maxTried {
		j.note("the last balances of %s were not compared, for %d unknown transfers", b.key, len(open))
		return
	}
	for _, r := range b.reads {
		if r.Invoke > last && !explained(acked, open, r.Result[1:]) {
			j.fail(b.key, []int64{r.ID}, "the last balances are not those of the acknowledged transfers with any of %d unknown ones, %v: %v", len(open), short(acked), r)
		}
	}
}

func short(v []int64) []int64 { return v[:min(len(v), 16)] }

func move(balances []int64, op *history.Op, times int64) {
	balances[op.Arg[1]] -= times * op.Arg[3]
	balances[op.Arg[2]] += times * op.Arg[3]
}

func explained(balances []int64, open []*history.Op, want []int64) bool {
	if len(open) == 0 {
		return slices.Equal(balances, want)
	}
	if explained(balances, open[1:], want) {
		return true
	}
	move(balances, open[0], 1)
	defer move(balances, open[0], -1)
	return explained(balances, open[1:], want)
}

// events are those of a register that holds the id of the last transfer.
func (b *bank) events() []event {
	events := make([]event, 0, len(b.reads)+len(b.transfers))
	for _, op := range b.transfers {
		events = append(events, event{op: op, call: op.Invoke, ret: op.Return, in: &registerIn{kind: regWrite, unknown: op.Open(), v: op.Arg[0]}})
	}
	for _, op := range b.reads {
		if len(op.Result) == 0 {
			continue
		}
		events = append(events, event{op: op, call: op.Invoke, ret: op.Return, in: &registerIn{kind: regRead, done: op.Result[0] != 0, v: op.Result[0]}})
	}
	return pruneRegister(events)
}
