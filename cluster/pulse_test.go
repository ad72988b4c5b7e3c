package cluster

import (
	"strings"
	"testing"
	"time"
)

func TestPulseNamesWhatHangs(t *testing.T) {
	now := time.Now()
	at := func(age time.Duration) *time.Time { t := now.Add(-age); return &t }
	for _, c := range []struct {
		loop, apply *time.Time
		want        string
	}{
		{nil, nil, ""}, // never looked at
		{at(time.Second), at(2 * time.Second), ""},
		{at(time.Minute), at(time.Second), "main loop"},
		{at(time.Second), at(time.Minute), "state machine"},
	} {
		var p pulse
		p.loop.at.Store(c.loop)
		p.apply.at.Store(c.apply)
		if got := p.hangs(now, liveLimit); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
