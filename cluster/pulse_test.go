package cluster

import (
	"strings"
	"testing"
	"time"
)

func TestPulseNamesWhatHangs(t *testing.T) {
	now := time.Now()
	at := func(age time.Duration) int64 { return now.Add(-age).UnixNano() }
	for _, c := range []struct {
		loop, apply int64
		want        string
	}{
		{0, 0, ""}, // never looked at
		{at(time.Second), at(2 * time.Second), ""},
		{at(time.Minute), at(time.Second), "main loop"},
		{at(time.Second), at(time.Minute), "state machine"},
	} {
		var p pulse
		p.loop.Store(c.loop)
		p.apply.Store(c.apply)
		if got := p.hangs(now, liveLimit); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
