package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/client/keeltest/cluster"
)

// completions are the words that a shell would offer after the line.
func completions(on string, line ...string) []string {
	_, stdout, _ := keelctl(on, append([]string{"__complete"}, line...)...)
	var out []string
	for _, text := range strings.Split(stdout, "\n") {
		if word, _, _ := strings.Cut(text, "\t"); word != "" && !strings.HasPrefix(word, ":") {
			out = append(out, word)
		}
	}
	return out
}

// Names that live in the cluster are completed: keyspaces, states, shards, nodes
// and operations, each where it belongs.
func TestLiveNamesAreCompleted(t *testing.T) {
	c := cluster.New(t, cluster.Options{Shards: 2})
	on := c.Endpoints()[1]
	for _, line := range []string{"state declare k v --kind value", "state declare k l --kind list", "state declare other x --kind value"} {
		if code, _, stderr := keelctl(on, strings.Fields(line)...); code != exitDone {
			t.Fatal(stderr)
		}
	}
	nodes := []string{"n1", "n2", "n3"}
	for _, tc := range []struct {
		line string // the last word is the one to complete, - is an empty one
		want []string
	}{
		{"value get -", []string{"k", "other"}}, {"value get o", []string{"other"}}, {"value get k -", []string{"l", "v"}}, {"scan none -", nil},
		{"state drop k -", []string{"l", "v"}}, {"state drop k v -", nil}, {"state list -", []string{"k", "other"}}, {"state list k -", nil},
		{"shard hash -", []string{"1", "2"}}, {"shard hash 1 -", nil}, {"shard snapshot -", []string{"1", "2"}}, {"shard compact -", []string{"1", "2"}},
		{"shard transfer -", []string{"1", "2"}}, {"shard transfer 1 --to -", nodes}, {"shard transfer --to -", nodes}, {"shard transfer 9 --to -", nil}, {"shard transfer 1 --to n2", []string{"n2"}},
		{"shard transfer one --to -", nil}, {"operation show -", []string{"1"}}, {"operation watch -", []string{"1"}}, {"operation watch 1 -", nil},
		{"--timeout 0 shard hash -", []string{"1", "2"}}, {"--output xml shard hash -", nil},
	} {
		words := strings.Fields(tc.line)
		if last := len(words) - 1; words[last] == "-" {
			words[last] = ""
		}
		if got := completions(on, words...); !slices.Equal(sorted(got), tc.want) && len(got)+len(tc.want) > 0 {
			t.Errorf("%s: %q, want %q", tc.line, got, tc.want)
		}
	}
	if got := completions("127.0.0.1:1", "--timeout", "50ms", "shard", "hash", ""); len(got) != 0 {
		t.Errorf("without a cluster: %q", got)
	}
}
