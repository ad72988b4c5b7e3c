package cluster

import (
	"testing"

	"go.uber.org/goleak"
)

// raft leaves futures unanswered that it had taken when it was shut down; the
// goroutine that waits for one then stays (cluster: group.await).
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/keelstate/keelstate/cluster.(*group).await.func1"))
}
