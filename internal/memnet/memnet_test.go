package memnet

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

func connect(t testing.TB, n *Network) (client, server net.Conn) {
	t.Helper()
	l, err := n.Host("b").Listen("b:1")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if client, err = n.Host("a").Dial(context.Background(), "b:1"); err != nil {
		t.Fatal(err)
	}
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	return client, server
}

// TestHeldBytesArriveInOrder is MN1 and MN2.
func TestHeldBytesArriveInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		c, s := connect(t, n)
		n.Block("a", "b")
		if _, err := c.Write([]byte("one")); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("two")); err != nil {
			t.Fatal(err)
		}
		s.SetReadDeadline(time.Now().Add(time.Second))
		buf := make([]byte, 16)
		if _, err := s.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("read through a blocked direction: %v", err)
		}
		if got := n.Held("a", "b"); got != 6 {
			t.Fatalf("held %d bytes, want 6", got)
		}
		// The other direction still works.
		if _, err := s.Write([]byte("back")); err != nil {
			t.Fatal(err)
		}
		if k, err := c.Read(buf); err != nil || string(buf[:k]) != "back" {
			t.Fatalf("read %q, %v", buf[:k], err)
		}
		n.Unblock("a", "b")
		s.SetReadDeadline(time.Time{})
		if _, err := io.ReadFull(s, buf[:6]); err != nil || string(buf[:6]) != "onetwo" {
			t.Fatalf("read %q, %v", buf[:6], err)
		}
	})
}

// TestWindow is MN3.
func TestWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		n.SetWindow(4)
		c, s := connect(t, n)
		c.SetWriteDeadline(time.Now().Add(time.Second))
		k, err := c.Write([]byte("123456"))
		if k != 4 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("wrote %d, %v", k, err)
		}
		c.SetWriteDeadline(time.Time{})
		done := make(chan error, 1)
		go func() { _, err := c.Write([]byte("56")); done <- err }()
		synctest.Wait()
		buf := make([]byte, 6)
		if _, err := io.ReadFull(s, buf); err != nil || string(buf) != "123456" {
			t.Fatalf("read %q, %v", buf, err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

// TestDial is MN4.
func TestDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		if _, err := n.Host("a").Dial(context.Background(), "b:1"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("dial to nobody: %v", err)
		}
		l, err := n.Host("b").Listen("b:1")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.Host("b").Listen("b:1"); !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatalf("second listen: %v", err)
		}
		n.Block("b", "a")
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		start := time.Now()
		if _, err := n.Host("a").Dial(ctx, "b:1"); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("dial into a partition: %v", err)
		}
		if d := time.Since(start); d != time.Second {
			t.Fatalf("dial waited %v", d)
		}
		n.HealAll()
		c, err := n.Host("a").Dial(context.Background(), "b:1")
		if err != nil {
			t.Fatal(err)
		}
		l.Close() // before Accept: the dialer is reset
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("read: %v", err)
		}
	})
}

func TestDelayAndCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(7)
		c, s := connect(t, n)
		n.SetDelay("a", "b", 100*time.Millisecond, 50*time.Millisecond)
		start := time.Now()
		c.Write([]byte("x"))
		if _, err := io.ReadFull(s, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d < 100*time.Millisecond || d >= 150*time.Millisecond {
			t.Fatalf("arrived after %v", d)
		}
		n.Cut("b", "a")
		if _, err := c.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("write after a cut: %v", err)
		}
		if _, err := s.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("read after a cut: %v", err)
		}
		if n.Conns("a", "b") != 0 {
			t.Fatal("a cut connection still counts")
		}
	})
}

func TestCrashAndClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(7)
		c, s := connect(t, n)
		c.Write([]byte("last"))
		c.Close()
		got, err := io.ReadAll(s)
		if err != nil || string(got) != "last" {
			t.Fatalf("read %q, %v", got, err)
		}
		if _, err := s.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("write to a closed peer: %v", err)
		}
		l, _ := n.Host("b").Listen("b:2")
		c, err = n.Host("a").Dial(context.Background(), "b:2")
		if err != nil {
			t.Fatal(err)
		}
		n.Crash("b")
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Fatalf("accept after a crash: %v", err)
		}
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("read after a crash: %v", err)
		}
	})
}

// TestStreamProperty: whatever the sizes, the delays and the blocking, the
// bytes arrive as they were written (MN1).
func TestStreamProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := New(rapid.Uint64().Draw(rt, "seed"))
		n.SetWindow(rapid.IntRange(1, 64).Draw(rt, "window"))
		c, s := connect(t, n)
		want := rapid.SliceOfN(rapid.Byte(), 0, 500).Draw(rt, "bytes")
		n.SetDelay("a", "b", 0, time.Duration(rapid.IntRange(0, 20).Draw(rt, "jitter"))*time.Microsecond)
		cuts := rapid.SliceOfN(rapid.IntRange(1, 40), 1, 8).Draw(rt, "pieces")
		go func() {
			for i, rest := 0, want; len(rest) > 0; i++ {
				k := min(cuts[i%len(cuts)], len(rest))
				if _, err := c.Write(rest[:k]); err != nil {
					return
				}
				rest = rest[k:]
			}
			c.Close()
		}()
		got, err := io.ReadAll(s)
		if err != nil || string(got) != string(want) {
			rt.Fatalf("read %d bytes of %d, %v", len(got), len(want), err)
		}
		s.Close()
		if n.Conns("a", "b") != 0 {
			rt.Fatal("closed connections still count")
		}
	})
}
