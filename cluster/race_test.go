//go:build race

package cluster_test

// The race detector sees nothing of RocksDB: under it the tests that run on both
// engines run on mem alone, and their plain run on both.
func init() { engines = engines[:1] }
