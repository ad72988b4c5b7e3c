package steps

import "time"

// Report is what a run showed.
type Report struct {
	Seed      uint64
	Sum       string // hash of the trace
	Simulated time.Duration
	Txns      int // transactions of the metadata
	Writes    int // requests that were proposed at the shard
	Placed    int
	Problems  []string
}

// Run simulates d of virtual time; dir is for the machines' stores and must be
// empty. lines, if not nil, gets the trace.
func Run(seed uint64, d time.Duration, dir string, lines func(string)) (*Report, error) {
	l := NewLoop(seed)
	l.Lines = lines
	m := newMetadata(l)
	if err := m.found(); err != nil {
		return nil, err
	}
	s, err := newShard(l, m, dir)
	if err != nil {
		return nil, err
	}
	defer s.close()
	s.advance(0, len(s.log))
	m.live()
	s.live()
	p := &placement{loop: l}
	p.live()
	var clients []*client
	for n := range 4 {
		clients = append(clients, newClient(s, n))
		clients[n].live(d - min(d/4, 5*time.Second))
	}
	l.Run(d)
	m.settle()
	s.settle()
	for _, c := range clients {
		c.check()
	}
	return &Report{Seed: seed, Sum: l.Sum(), Simulated: l.Now(), Txns: m.txns, Writes: s.writes, Placed: p.placed, Problems: l.Problems()}, nil
}
