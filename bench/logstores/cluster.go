package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

const nodes = 3

// nullFSM drops what it is given: the log is what is measured.
type nullFSM struct{}

func (nullFSM) Apply(*raft.Log) any                 { return nil }
func (nullFSM) Snapshot() (raft.FSMSnapshot, error) { return nil, errors.New("no snapshots here") }
func (nullFSM) Restore(r io.ReadCloser) error       { return r.Close() }

// result is one measurement: committed entries per second, and entries that one
// fsync of a node served.
type result struct {
	rate    float64
	perSync string
}

// measure runs one combination.
func measure(o options, kind string, groups, size int) (res result, err error) {
	dir, err := os.MkdirTemp(o.dir, "logstores-*")
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var stores [nodes]nodeStore
	for n := range stores {
		s, err := openStore(kind, fmt.Sprintf("%s/n%d", dir, n), groups)
		if err != nil {
			return res, err
		}
		defer s.close()
		stores[n] = s
	}
	leaders := make([]*raft.Raft, groups)
	var all []*raft.Raft
	defer func() {
		for _, r := range all {
			_ = r.Shutdown().Error()
		}
	}()
	for g := range leaders {
		members, err := startGroup(o, stores[:], g)
		all = append(all, members...)
		if err != nil {
			return res, err
		}
		leaders[g] = members[g%nodes]
	}
	for g, r := range leaders {
		select {
		case <-r.LeaderCh():
		case <-time.After(deadline):
			return res, fmt.Errorf("group %d has no leader", g)
		}
	}
	rate, syncs, err := load(o, leaders, size, stores[:])
	res = result{rate: rate, perSync: "-"}
	if syncs > 0 {
		res.perSync = fmt.Sprintf("%.0f", rate*o.seconds*nodes/float64(syncs))
	}
	return res, err
}

// startGroup starts the replicas of one group; node g%nodes will lead.
func startGroup(o options, stores []nodeStore, g int) ([]*raft.Raft, error) {
	var servers []raft.Server
	var transports []*raft.InmemTransport
	for n := range stores {
		addr := raft.ServerAddress(fmt.Sprintf("g%d-n%d", g, n))
		_, t := raft.NewInmemTransport(addr)
		transports = append(transports, t)
		servers = append(servers, raft.Server{ID: raft.ServerID(addr), Address: addr})
	}
	for _, a := range transports {
		for _, b := range transports {
			a.Connect(b.LocalAddr(), b)
		}
	}
	var members []*raft.Raft
	for n, s := range stores {
		conf := raft.DefaultConfig()
		conf.LocalID = servers[n].ID
		conf.Logger = o.logger()
		conf.BatchApplyCh = true
		conf.SnapshotThreshold = 1 << 40
		conf.HeartbeatTimeout, conf.ElectionTimeout, conf.LeaderLeaseTimeout = 15*time.Second, 15*time.Second, 15*time.Second
		if n == g%nodes {
			conf.HeartbeatTimeout, conf.ElectionTimeout, conf.LeaderLeaseTimeout = time.Second, time.Second, time.Second
		}
		logs, stable := s.group(g)
		snaps := raft.NewInmemSnapshotStore()
		if err := raft.BootstrapCluster(conf, logs, stable, snaps, transports[n], raft.Configuration{Servers: servers}); err != nil {
			return members, err
		}
		r, err := raft.NewRaft(conf, nullFSM{}, logs, stable, snaps, transports[n])
		if err != nil {
			return members, err
		}
		members = append(members, r)
	}
	return members, nil
}

// load proposes from all proposers, and counts after the warm-up.
func load(o options, leaders []*raft.Raft, size int, stores []nodeStore) (rate float64, syncs int64, err error) {
	var count atomic.Int64
	var failed atomic.Pointer[error]
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for p := range o.proposers {
		r := leaders[p%len(leaders)]
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := r.Apply(make([]byte, size), deadline).Error(); err != nil {
					failed.Store(&err)
					return
				}
				count.Add(1)
			}
		}()
	}
	total := func() (n int64) {
		for _, s := range stores {
			n += s.syncs()
		}
		return n
	}
	time.Sleep(time.Second)
	before, syncsBefore, start := count.Load(), total(), time.Now()
	time.Sleep(time.Duration(o.seconds * float64(time.Second)))
	after, took := count.Load(), time.Since(start)
	syncs = total() - syncsBefore
	close(stop)
	wg.Wait()
	if e := failed.Load(); e != nil {
		return 0, 0, fmt.Errorf("proposing: %w", *e)
	}
	return float64(after-before) / took.Seconds(), syncs, nil
}
