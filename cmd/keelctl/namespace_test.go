package main

import (
	"encoding/hex"
	"encoding/json"
	"testing"

	"github.com/keelstate/keelstate/client/keeltest/cluster"
	"github.com/keelstate/keelstate/keygroup"
)

// A namespace is bytes: whatever they are, what scan and keys print reaches the
// same namespace, as text and under --hex.
func TestNamespacesOfAnyBytes(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1})
	on := c.Endpoints()[0]
	must := func(args ...string) string {
		t.Helper()
		code, stdout, stderr := keelctl(on, args...)
		if code != exitDone {
			t.Fatalf("%q: exit %d, %s", args, code, stderr)
		}
		return stdout
	}
	must("state", "declare", "k", "r", "--kind", "reducing", "--function", "sum", "--value-type", "int64")
	b, err := keygroup.Encode(keygroup.Int64, int64(1))
	if err != nil {
		t.Fatal(err)
	}
	one := hex.EncodeToString(b)
	if b, err = keygroup.Encode(keygroup.String, "x"); err != nil {
		t.Fatal(err)
	}
	names := map[string]string{"": "", "w1": "w1", "\xff\x00": `\xff\x00`, `a\b`: `a\\b`, "é\n": `é\x0a`}
	var sources []string
	for raw, text := range names {
		inHex := hex.EncodeToString([]byte(raw))
		must("reducing", "add", "k", "r", "1", "--key", "x", "--namespace", text)
		must("reducing", "add", "k", "r", one, "--key", hex.EncodeToString(b), "--namespace", inHex, "--hex")
		for flag, want := range map[string]string{"--hex=false": text, "--hex": inHex} {
			for _, verb := range []string{"keys", "scan"} {
				var list struct{ Items []struct{ Namespace *string } }
				if err := json.Unmarshal([]byte(must(verb, "k", "r", "--namespace", want, flag, "-o", "json")), &list); err != nil {
					t.Fatal(err)
				}
				if len(list.Items) != 1 || list.Items[0].Namespace == nil || *list.Items[0].Namespace != want {
					t.Errorf("%s %s of namespace %q: %+v, want %q", verb, flag, raw, list, want)
				}
			}
		}
		if raw != "" {
			sources = append(sources, "--source", text)
		}
	}
	must(append([]string{"merge-namespaces", "k", "r", "--key", "x", "--namespace", ""}, sources...)...)
	var got struct{ Value int64 }
	if err := json.Unmarshal([]byte(must("reducing", "get", "k", "r", "--key", "x", "--namespace", "", "-o", "json")), &got); err != nil || got.Value != 2*int64(len(names)) {
		t.Errorf("merged: %+v, %v", got, err)
	}
	for _, bad := range [][]string{{"--namespace", `\`}, {"--namespace", "zz", "--hex"}} {
		if code, _, _ := keelctl(on, append([]string{"keys", "k", "r"}, bad...)...); code != exitUsage {
			t.Errorf("%q: exit %d", bad, code)
		}
	}
}
