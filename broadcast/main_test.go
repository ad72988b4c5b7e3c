package broadcast

import (
	"flag"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// rewrite makes the golden tests write their files; the diff is reviewed.
var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func mustTxn(t testing.TB, txn Txn) []byte {
	t.Helper()
	b, err := EncodeTxn(txn)
	if err != nil {
		t.Fatalf("EncodeTxn: %v", err)
	}
	return b
}

// golden compares got with the golden file, or writes it under -rewrite.
func golden(t *testing.T, path string, got []byte) []byte {
	t.Helper()
	if *rewrite {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("%s differs from what this build writes (-rewrite, and review the diff)", path)
	}
	return want
}
