package server

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/raftfsm"
)

// A client that vanishes without closing its connection is noticed.
func TestSilentConnectionIsClosed(t *testing.T) {
	s, err := New(&fake{}, Options{KeepAlive: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	defer func() { s.Stop(); <-served }()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	const settings, ping = 4, 6 // types of HTTP/2 frames
	preface := append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 0, 0, 0, settings, 0, 0, 0, 0, 0)
	if _, err := conn.Write(preface); err != nil {
		t.Fatal(err)
	}
	pings, streams := 0, uint32(0)
	for { // reads all, answers nothing
		kind, payload, err := readFrame(conn)
		if err != nil {
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				t.Fatal("the connection is still open")
			}
			break
		}
		switch kind {
		case ping:
			pings++
		case settings:
			for ; len(payload) >= 6; payload = payload[6:] {
				if binary.BigEndian.Uint16(payload) == 3 { // the most streams at once
					streams = binary.BigEndian.Uint32(payload[2:])
				}
			}
		}
	}
	if streams != 1024 {
		t.Errorf("the server allows %d streams, 0 being any number", streams)
	}
	if pings == 0 {
		t.Error("the server closed the connection without asking")
	}
}

// readFrame reads one HTTP/2 frame.
func readFrame(r io.Reader) (kind byte, payload []byte, err error) {
	var head [9]byte // length (3), type, flags, stream (4)
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	payload = make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
	_, err = io.ReadFull(r, payload)
	return head[3], payload, err
}

// endlessScan has large pages for ever.
type endlessScan struct {
	asked  *atomic.Int32 // for pages
	closed *atomic.Bool
}

func (s endlessScan) Next(context.Context) ([]state.ScanItem, []byte, bool, error) {
	s.asked.Add(1)
	return []state.ScanItem{{Key: make([]byte, 1<<20)}}, []byte("c"), true, nil
}
func (s endlessScan) Token() raftfsm.Token { return raftfsm.Token{} }
func (s endlessScan) Close()               { s.closed.Store(true) }

// A client that takes no pages does not keep the instant of its scan for ever,
// and may resume behind those that were sent: all but the last that was asked for.
func TestScanWithoutProgressEnds(t *testing.T) {
	var asked atomic.Int32
	var closed atomic.Bool
	f := &fake{scan: func(context.Context, *cluster.ScanRequest) (Scan, error) { return endlessScan{&asked, &closed}, nil }}
	k := newKit(t, f, Options{ScanIdle: 50 * time.Millisecond})
	s, err := k.state.Scan(testContext(t), &keelstatepb.ScanRequest{State: 3})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the scan is closed", closed.Load)
	pages := 0
	var p *keelstatepb.ScanPage
	for p, err = s.Recv(); err == nil; p, err = s.Recv() {
		if pages++; string(p.Cursor) != "c" {
			t.Fatalf("a page without a cursor")
		}
	}
	// On a busy machine the first page may be the one that is given up.
	if n := int(asked.Load()); n == 0 || pages < n-1 || status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("after %d pages of %d that were asked for: %v", pages, n, err)
	}
}
