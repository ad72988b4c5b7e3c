//go:build linux

package faultfs

import (
	"errors"
	"net"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"sync"
)

// service is the remote side of Control: JSON-RPC 1.0 over a unix socket, one
// method of the name "Disk.X" for each of Control, with one parameter.
type service struct{ c Control }

// None is the parameter or answer of a method that has none.
type None struct{}

// CrashArgs are the parameters of Disk.Crash.
type CrashArgs struct {
	Mode CrashMode `json:"mode"`
	Seed uint64    `json:"seed"`
}

// FlipArgs are the parameters of Disk.FlipStored.
type FlipArgs struct {
	Path string `json:"path"`
	Flip Flip   `json:"flip"`
}

func (s *service) Inject(r Rule, id *int) (err error)     { *id, err = s.c.Inject(r); return err }
func (s *service) Remove(id int, hits *int) (err error)   { *hits, err = s.c.Remove(id); return err }
func (s *service) ClearFaults(None, *None) error          { return s.c.ClearFaults() }
func (s *service) Hits(id int, hits *int) (err error)     { *hits, err = s.c.Hits(id); return err }
func (s *service) AbortStalled(None, *None) error         { return s.c.AbortStalled() }
func (s *service) SetCapacity(bytes int64, _ *None) error { return s.c.SetCapacity(bytes) }
func (s *service) FlipStored(a FlipArgs, _ *None) error   { return s.c.FlipStored(a.Path, a.Flip) }
func (s *service) Crash(a CrashArgs, r *CrashReport) (err error) {
	*r, err = s.c.Crash(a.Mode, a.Seed)
	return err
}
func (s *service) SyncAll(None, *None) error           { return s.c.SyncAll() }
func (s *service) Stats(_ None, st *Stats) (err error) { *st, err = s.c.Stats(); return err }

// Server serves a Control on a unix socket.
type Server struct {
	listener net.Listener
	wg       sync.WaitGroup

	mu struct {
		sync.Mutex
		closed bool
		conns  map[net.Conn]bool
	}
}

// Listen starts to serve on a socket, which only its owner can open.
func Listen(socket string, c Control) (*Server, error) {
	calls := rpc.NewServer()
	if err := calls.RegisterName("Disk", &service{c}); err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	s := &Server{listener: l}
	s.mu.conns = make(map[net.Conn]bool)
	s.wg.Go(func() { s.accept(calls) })
	return s, nil
}

func (s *Server) accept(calls *rpc.Server) {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return // closed
		}
		s.mu.Lock()
		if s.mu.closed {
			_ = conn.Close()
		}
		s.mu.conns[conn] = true
		s.mu.Unlock()
		s.wg.Go(func() {
			calls.ServeCodec(jsonrpc.NewServerCodec(conn)) // closes conn
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.mu.conns, conn)
		})
	}
}

// Close ends all connections and removes the socket.
func (s *Server) Close() error {
	err := s.listener.Close()
	s.mu.Lock()
	s.mu.closed = true
	for conn := range s.mu.conns {
		_ = conn.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}

// Client is a Control over a socket. Errors have lost their type.
type Client struct{ c *rpc.Client }

// Dial connects to what Listen serves.
func Dial(socket string) (*Client, error) {
	c, err := jsonrpc.Dial("unix", socket)
	if err != nil {
		return nil, err
	}
	return &Client{c}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.c.Close() }

// Inject implements Control.
func (c *Client) Inject(r Rule) (id int, err error) { err = c.c.Call("Disk.Inject", r, &id); return }

// Remove implements Control.
func (c *Client) Remove(id int) (hits int, err error) {
	err = c.c.Call("Disk.Remove", id, &hits)
	return
}

// ClearFaults implements Control.
func (c *Client) ClearFaults() error { return c.c.Call("Disk.ClearFaults", None{}, &None{}) }

// Hits implements Control.
func (c *Client) Hits(id int) (hits int, err error) { err = c.c.Call("Disk.Hits", id, &hits); return }

// AbortStalled implements Control.
func (c *Client) AbortStalled() error { return c.c.Call("Disk.AbortStalled", None{}, &None{}) }

// SetCapacity implements Control.
func (c *Client) SetCapacity(bytes int64) error {
	return c.c.Call("Disk.SetCapacity", bytes, &None{})
}

// FlipStored implements Control.
func (c *Client) FlipStored(path string, flip Flip) error {
	return c.c.Call("Disk.FlipStored", FlipArgs{path, flip}, &None{})
}

// Crash implements Control.
func (c *Client) Crash(mode CrashMode, seed uint64) (r CrashReport, err error) {
	err = c.c.Call("Disk.Crash", CrashArgs{mode, seed}, &r)
	return
}

// SyncAll implements Control.
func (c *Client) SyncAll() error { return c.c.Call("Disk.SyncAll", None{}, &None{}) }

// Stats implements Control.
func (c *Client) Stats() (s Stats, err error) { err = c.c.Call("Disk.Stats", None{}, &s); return }

var (
	_ Control = (*FS)(nil)
	_ Control = (*Client)(nil)
)
