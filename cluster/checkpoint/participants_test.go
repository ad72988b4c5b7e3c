package checkpoint

import (
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// register makes a new session take part.
func (k *kit) register(id string) base.SessionID {
	k.t.Helper()
	s := k.view().NextSessionID()
	k.do(meta.OpenSessionTxn(k.view(), 1, s, 60_000))
	k.do(meta.RegisterTxn(k.view(), 1, id, s))
	return s
}

// The coordinator lets shards pass the barrier when all have acknowledged, also
// under another leader, and their positions get into _metadata (CK6).
func TestCoordinatorWaitsForParticipants(t *testing.T) {
	k := newKit(t)
	a, b := k.register("a"), k.register("b")
	n := k.start().Number
	k.none(time.Second)
	k.do(meta.AcknowledgeTxn(k.view(), 1, n, "a", a, []byte("A")))
	k.c = New()
	k.none(time.Second)
	if c := k.view().Checkpoint(n); c.Phase != meta.CheckpointWaiting {
		t.Fatalf("%+v without b", c)
	}
	k.do(meta.AcknowledgeTxn(k.view(), 1, n, "b", b, nil))
	k.none(0)
	if c := k.view().Checkpoint(n); c.Phase != meta.CheckpointAnnounced {
		t.Fatalf("%+v when all have acknowledged", c)
	}
	k.do(meta.CloseSessionTxn(k.view(), a)) // that does not matter any more
	k.upload(n, 1)
	k.upload(n, 2)
	k.one(0, StoreMetadata)
	m, err := Metadata(k.view(), n)
	if err != nil || len(m.Participants) != 2 || string(m.Participants[0].Bytes) != "A" || m.Participants[1].ID != "b" {
		t.Fatalf("%+v, %v", m, err)
	}
}

// A participant that is lost or late fails the checkpoint by its name (CK6).
func TestParticipantFailsTheCheckpoint(t *testing.T) {
	const lost = `participant "a" is lost: its session has ended, or it has registered again or gone`
	for _, x := range []struct {
		what, want string
		do         func(k *kit, a base.SessionID)
	}{
		{"late", `not done after 1m0s; participant "a" has not acknowledged`, func(k *kit, _ base.SessionID) { k.step(time.Minute) }},
		{"session ended", lost, func(k *kit, a base.SessionID) { k.do(meta.CloseSessionTxn(k.view(), a)) }},
		{"ended behind its acknowledgement", lost, func(k *kit, a base.SessionID) {
			k.do(meta.AcknowledgeTxn(k.view(), 1, 1, "a", a, nil))
			k.do(meta.CloseSessionTxn(k.view(), a))
		}},
		{"registered again", lost, func(k *kit, _ base.SessionID) { k.register("a") }},
		{"unregistered", lost, func(k *kit, a base.SessionID) { k.do(meta.UnregisterTxn(k.view(), "a", a)) }},
	} {
		k := newKit(t)
		a := k.register("a")
		k.start()
		k.none(0)
		x.do(k, a)
		k.step(0)
		t.Log(x.what)
		k.failed(1, x.want)
	}
}
