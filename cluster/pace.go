package cluster

import "time"

// pace decides when a shard's next entry is worth its cost, which is much the
// same for one request as for hundreds: an fsync on every replica and the
// wake-ups on the way. The rule is Nagle's (RFC 896): what arrives while nothing
// is in flight goes at once; what arrives beside an entry in flight is gathered
// until it is worth as much as that. Clients that wait for their answers come
// back together when an entry lands: then the next entry waits for them a
// little, in proportion to what an entry takes.
//
// It is a value under its owner's lock.
type pace struct {
	entries  int           // in flight
	requests int           // in the entries in flight
	expected int           // requests that landed last and those queued then
	commit   time.Duration // moving average of an entry's time in flight
}

func (p *pace) full() bool { return p.entries >= maxEntriesInFlight }

// ready says whether a queue of requests, and their bytes, should depart.
func (p *pace) ready(queued, bytes int) bool {
	return queued > 0 && !p.full() && (queued >= p.enough() || bytes >= worthwhileBytes)
}

// enough is how many requests are worth an entry now.
func (p *pace) enough() int { return max(p.requests, 1) }

// linger is how long the first entry of a burst waits until as many requests are
// queued as are expected.
func (p *pace) linger(queued int) time.Duration {
	if p.entries > 0 || queued >= p.expected {
		return 0
	}
	return min(p.commit/8, maxLinger)
}

func (p *pace) depart(requests int) {
	p.entries++
	p.requests += requests
}

// land takes back what depart counted, when so many requests are queued; took is
// 0 for an entry that was never proposed.
func (p *pace) land(requests, queued int, took time.Duration) {
	p.entries--
	p.requests -= requests
	p.expected = requests + queued
	if took > 0 {
		p.commit += (took - p.commit) / 8
	}
}
