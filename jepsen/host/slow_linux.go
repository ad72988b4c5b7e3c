package host

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxHeld bounds the packets that are held; more are dropped, as a router does.
const maxHeld = 20000

// slowLinks delays packets in user space: the kernel has no such queue here. A
// sender's route to a receiver leads into a TUN device that the harness reads;
// after the delay the packet is written to the receiver's device.
type slowLinks struct {
	n    *Network
	wg   sync.WaitGroup
	wake chan struct{} // of one: something was queued
	done chan struct{}

	mu struct {
		sync.Mutex
		tuns   map[string]*os.File // by host
		faults map[int]NetFault
		// links is what holds now from one address to another.
		links map[[2]string]link
		held  packets
		// dropped packets were over maxHeld.
		dropped int
	}
}

type link struct{ delay, jitter time.Duration }

// packet is held until it is due, for the device of a host.
type packet struct {
	due  time.Time
	to   *os.File
	data []byte
}

type packets []packet

func (p packets) Len() int           { return len(p) }
func (p packets) Less(i, j int) bool { return p[i].due.Before(p[j].due) }
func (p packets) Swap(i, j int)      { p[i], p[j] = p[j], p[i] }

// Push implements heap.Interface.
func (p *packets) Push(x any) { *p = append(*p, x.(packet)) }

// Pop implements heap.Interface.
func (p *packets) Pop() any {
	last := (*p)[len(*p)-1]
	*p = (*p)[:len(*p)-1]
	return last
}

func newSlowLinks(n *Network) *slowLinks {
	s := &slowLinks{n: n, wake: make(chan struct{}, 1), done: make(chan struct{})}
	s.mu.tuns, s.mu.faults, s.mu.links = make(map[string]*os.File), make(map[int]NetFault), make(map[[2]string]link)
	s.wg.Go(s.deliver)
	return s
}

// tun makes the device of a host, once; after a failure it is tried anew.
func (s *slowLinks) tun(host string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.tuns[host] != nil {
		return nil
	}
	file, err := s.makeTun(host)
	if err != nil {
		return err
	}
	s.mu.tuns[host] = file
	s.wg.Go(func() { s.receive(file) })
	return nil
}

// makeTun makes a device in the namespace of a host. It is gone when it is closed.
func (s *slowLinks) makeTun(host string) (_ *os.File, err error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	name := s.n.device(host)
	ifr, err := unix.NewIfreq(name)
	if err == nil {
		ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making the device %s: %w", name, err), unix.Close(fd))
	}
	// Only now is it pollable.
	file := os.NewFile(uintptr(fd), name)
	defer func() {
		if err != nil {
			_ = file.Close()
		}
	}()
	if host != Client {
		if err := run("", "ip", "link", "set", "dev", name, "netns", s.n.ns(host)); err != nil {
			return nil, err
		}
	}
	// Packets come in here whose senders are reached elsewhere.
	script := fmt.Sprintf("echo 0 > /proc/sys/net/ipv4/conf/%s/rp_filter && ip link set dev %s up", name, name)
	if host != Client {
		script = "echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter && " + script
	}
	return file, run("", s.n.inside(host, "sh", "-c", script)...)
}

func (n *Network) device(host string) string {
	if host == Client {
		return n.short + "tc"
	}
	return n.short + "t" + host
}

// receive queues what a host sends into its device.
func (s *slowLinks) receive(file *os.File) {
	buf := make([]byte, 1<<16)
	for {
		got, err := file.Read(buf)
		if err != nil {
			return // closed
		}
		if got < 20 || buf[0]>>4 != 4 {
			continue // not IPv4: the kernel's own chatter
		}
		from, to := ipString(buf[12:16]), ipString(buf[16:20])
		s.hold(from, to, append([]byte(nil), buf[:got]...))
	}
}

func ipString(b []byte) string { return fmt.Sprintf("%d.%d.%d.%d", b[0], b[1], b[2], b[3]) }

func (s *slowLinks) hold(from, to string, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var target *os.File
	for host, addr := range s.n.hosts {
		if addr == to {
			target = s.mu.tuns[host]
		}
	}
	if target == nil || len(s.mu.held) >= maxHeld {
		s.mu.dropped++
		return
	}
	l := s.mu.links[[2]string{from, to}] // none any more: what is on its way still arrives
	due := time.Now().Add(l.delay)
	if l.jitter > 0 {
		due = due.Add(rand.N(l.jitter))
	}
	heap.Push(&s.mu.held, packet{due, target, data})
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// deliver writes packets when they are due.
func (s *slowLinks) deliver() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(s.flush(time.Now()))
		select {
		case <-timer.C:
		case <-s.wake:
		case <-s.done:
			return
		}
	}
}

// flush delivers what is due and returns how long the next packet has to wait.
func (s *slowLinks) flush(now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.mu.held) > 0 {
		if wait := s.mu.held[0].due.Sub(now); wait > 0 {
			return wait
		}
		p := heap.Pop(&s.mu.held).(packet)
		_, _ = p.to.Write(p.data) // a lost packet is what networks do
	}
	return time.Hour
}

// add puts a delay in force. The newest delay of a link wins.
func (s *slowLinks) add(id int, f NetFault) error {
	for _, host := range append(append([]string(nil), f.From...), f.To...) {
		if err := s.tun(host); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.mu.faults[id] = f
	s.mu.Unlock()
	return s.route()
}

func (s *slowLinks) remove(id int) error {
	s.mu.Lock()
	delete(s.mu.faults, id)
	s.mu.Unlock()
	return s.route()
}

// route makes the routes what the faults want.
func (s *slowLinks) route() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	want := make(map[[2]string]link)
	for id := 1; id <= s.n.mu.last; id++ {
		f, ok := s.mu.faults[id]
		for _, from := range f.From {
			for _, to := range f.To {
				if ok && from != to {
					want[[2]string{s.n.hosts[from], s.n.hosts[to]}] = link{f.Delay, f.Jitter}
				}
			}
		}
	}
	names := make(map[string]string)
	for host, addr := range s.n.hosts {
		names[addr] = host
	}
	for pair := range want {
		from := names[pair[0]]
		if err := run("", s.n.inside(from, "ip", "route", "replace", pair[1]+"/32", "dev", s.n.device(from), "src", pair[0])...); err != nil {
			return err
		}
	}
	for pair := range s.mu.links {
		if _, kept := want[pair]; kept {
			continue
		}
		from := names[pair[0]]
		if err := run("", s.n.inside(from, "ip", "route", "del", pair[1]+"/32", "dev", s.n.device(from))...); err != nil {
			return err
		}
	}
	s.mu.links = want
	return nil
}

// close removes the devices and waits for the goroutines.
func (s *slowLinks) close() {
	s.mu.Lock()
	for _, file := range s.mu.tuns {
		_ = file.Close() // the device goes with it
	}
	s.mu.Unlock()
	close(s.done)
	s.wg.Wait()
}
