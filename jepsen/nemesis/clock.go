//go:build linux

package nemesis

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/keelstate/keelstate/jepsen/host"
)

// HTTPClock sets the clock of nodes that were started with --fault-injection,
// over their HTTP address.
type HTTPClock struct {
	client http.Client
}

// NewHTTPClock returns a Clock whose calls take at most limit each.
func NewHTTPClock(limit time.Duration) *HTTPClock {
	// A connection of its own per call: a node is killed, cut off and restarted.
	return &HTTPClock{http.Client{Timeout: limit, Transport: &http.Transport{DisableKeepAlives: true}}}
}

var _ Clock = (*HTTPClock)(nil)

// Set implements Clock. The node counts milliseconds.
func (c *HTTPClock) Set(ctx context.Context, n *host.Node, offset time.Duration, driftPPM int64) error {
	return c.put(ctx, n.HTTP, offset, driftPPM)
}

func (c *HTTPClock) put(ctx context.Context, addr string, offset time.Duration, driftPPM int64) error {
	body, err := json.Marshal(map[string]int64{"offsetMs": offset.Milliseconds(), "driftPPM": driftPPM})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://"+addr+"/debug/fault/clock", bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("setting a clock: %w", err)
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return fmt.Errorf("setting a clock: %w", err)
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("setting the clock of %s: %s: %s", addr, resp.Status, bytes.TrimSpace(said))
	}
	return err
}
