package raftlog

import "github.com/hashicorp/raft"

// cacheOverhead is what a cached entry costs beside its bytes.
const cacheOverhead = 128

// entryCache keeps the newest entries of one group, so that replication to
// followers that keep up reads no disk. Entries are contiguous and end at the
// group's last. It shares the byte slices of the caller of StoreLogs; raft does
// not change them.
type entryCache struct {
	first uint64 // index of logs[0]
	logs  []raft.Log
	bytes int
}

func cacheCost(l *raft.Log) int { return len(l.Data) + len(l.Extensions) + cacheOverhead }

func (c *entryCache) get(i uint64) *raft.Log {
	if len(c.logs) == 0 || i < c.first || i >= c.first+uint64(len(c.logs)) {
		return nil
	}
	return &c.logs[i-c.first]
}

// push adds an entry and drops the oldest ones beyond the budget in bytes.
func (c *entryCache) push(l *raft.Log, budget int) {
	if len(c.logs) > 0 && c.first+uint64(len(c.logs)) != l.Index {
		c.clear()
	}
	if len(c.logs) == 0 {
		c.first = l.Index
	}
	c.logs = append(c.logs, *l)
	c.bytes += cacheCost(l)
	c.trim(budget)
}

func (c *entryCache) trim(budget int) {
	for len(c.logs) > 0 && c.bytes > budget {
		c.dropFront()
	}
}

func (c *entryCache) dropFront() {
	c.bytes -= cacheCost(&c.logs[0])
	c.logs[0] = raft.Log{} // the array lives on; its entries must not
	c.logs = c.logs[1:]
	c.first++
}

// remove forgets [lo, hi], a prefix or suffix of the group.
func (c *entryCache) remove(lo, hi uint64) {
	for len(c.logs) > 0 && c.first >= lo && c.first <= hi {
		c.dropFront()
	}
	for n := len(c.logs); n > 0 && c.first+uint64(n)-1 >= lo && c.first+uint64(n)-1 <= hi; n = len(c.logs) {
		c.bytes -= cacheCost(&c.logs[n-1])
		c.logs[n-1] = raft.Log{}
		c.logs = c.logs[:n-1]
	}
}

func (c *entryCache) clear() { *c = entryCache{} }
