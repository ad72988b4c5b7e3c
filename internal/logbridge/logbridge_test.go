package logbridge

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
)

func newBuffer(level slog.Level) (*slog.Logger, *bytes.Buffer) {
	b := new(bytes.Buffer)
	h := slog.NewTextHandler(b, &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})
	return slog.New(h), b
}

func TestMessages(t *testing.T) {
	s, out := newBuffer(LevelTrace)
	l := New(s, "raft").With("group", "S1")
	for _, c := range []struct {
		log  func()
		want string
	}{
		{func() { l.Trace("m") }, "level=DEBUG-4 msg=m logger=raft group=S1\n"},
		{func() { l.Debug("m", "k", 1) }, "level=DEBUG msg=m logger=raft group=S1 k=1\n"},
		{func() { l.Info("m", "odd") }, "level=INFO msg=m logger=raft group=S1 EXTRA_VALUE_AT_END=odd\n"},
		{func() { l.Warn("m", 7, "v") }, "level=WARN msg=m logger=raft group=S1 7=v\n"},
		{func() { l.Error("m", "f", hclog.Fmt("%d-%d", 1, 2)) }, "level=ERROR msg=m logger=raft group=S1 f=1-2\n"},
		{func() { l.Named("x").Info("m", "h", hclog.Hex(255)) }, "level=INFO msg=m logger=raft.x group=S1 h=0xff\n"},
		{func() { l.ResetNamed("y").Info("m", "b", hclog.Binary(5), "o", hclog.Octal(8)) }, "level=INFO msg=m logger=y group=S1 b=0b101 o=010\n"},
		{func() { l.StandardLogger(nil).Print("[WARN] hello") }, "level=WARN msg=hello logger=raft group=S1\n"},
		{func() { l.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Error}).Print("[INFO] hello") }, "level=ERROR msg=hello logger=raft group=S1\n"},
		{func() { Standard(s, "gossip").Print("[ERR] no prefix kept") }, "level=ERROR msg=\"no prefix kept\" logger=gossip\n"},
		{func() { Standard(s, "").Print("plain") }, "level=INFO msg=plain\n"},
	} {
		out.Reset()
		c.log()
		if got := out.String(); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
	if got := l.ImpliedArgs(); len(got) != 2 || got[0] != "group" {
		t.Errorf("implied arguments %v", got)
	}
	if l.Name() != "raft" || l.With().Named("a").Name() != "raft.a" {
		t.Error("names")
	}
}

// TestLevels is LB2: the bridge's level and the handler's both count, and the
// bridge's is shared by derived loggers.
func TestLevels(t *testing.T) {
	s, out := newBuffer(slog.LevelInfo)
	l := New(s, "")
	l.SetLevel(hclog.Warn)
	d := l.Named("d")
	d.Info("dropped by the bridge")
	l.SetLevel(hclog.Trace)
	d.Debug("dropped by the handler")
	if out.Len() != 0 {
		t.Fatalf("got %q", out)
	}
	if d.IsDebug() || !d.IsInfo() || d.IsTrace() || !d.IsWarn() || !d.IsError() || d.GetLevel() != hclog.Trace {
		t.Fatal("enabled levels")
	}
	if d.Info("passes"); out.Len() == 0 {
		t.Fatal("dropped")
	}
	out.Reset()
	l.SetLevel(hclog.Off)
	if d.Error("off"); out.Len() != 0 {
		t.Fatal("a message passed a logger that is off")
	}
	if s.Enabled(context.Background(), slog.LevelDebug) {
		t.Fatal("test is broken")
	}
}

// TestBound is LB1.
func TestBound(t *testing.T) {
	s, out := newBuffer(slog.LevelInfo)
	New(s, "").Info(strings.Repeat("é", MaxMessage), "k", strings.Repeat("v", 2*MaxMessage), "q", hclog.Quote(strings.Repeat("v", 2*MaxMessage)))
	if out.Len() > 4*MaxMessage {
		t.Fatalf("%d bytes", out.Len())
	}
}
