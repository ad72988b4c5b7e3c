package s3server

import (
	"net"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A service whose port is taken while it is stopped starts once the port is free.
func TestStartOutlivesATakenPort(t *testing.T) {
	s := Run(t)
	s.Stop()
	taken, err := net.Listen("tcp", s.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	freed := make(chan struct{})
	go func() {
		defer close(freed)
		defer taken.Close()
		for range 20 { // looks for an answer, of which none is the service's
			conn, err := taken.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	s.Start()
	<-freed
	if err := s.health(); err != nil {
		t.Error(err)
	}
}
