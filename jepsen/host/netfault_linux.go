package host

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// NetFault hits packets from any host of From to any of To; a host's packets to
// itself are never hit. Exactly one of Drop, Reset, Duplicate and Delay is set.
type NetFault struct {
	From, To []string
	// Drop, Reset and Duplicate are the share of packets, above 0, at most 1.
	// Reset answers TCP with a reset; Duplicate needs a node as the sender.
	Drop, Reset, Duplicate float64
	// Delay is added to each packet, and up to Jitter more, which reorders them.
	// These packets pass through the harness.
	Delay, Jitter time.Duration
}

// netFault is a fault in force: the namespaces that have a table for it.
type netFault struct {
	NetFault
	tables []string
}

func (f NetFault) validate(n *Network) error {
	kinds := 0
	for _, share := range []float64{f.Drop, f.Reset, f.Duplicate} {
		if share < 0 || share > 1 {
			return fmt.Errorf("%v is no share of packets", share)
		}
		if share > 0 {
			kinds++
		}
	}
	if f.Delay > 0 {
		kinds++
	}
	if kinds != 1 || f.Delay < 0 || f.Jitter < 0 {
		return errors.New("a fault of the network has exactly one effect")
	}
	for _, host := range slices.Concat(f.From, f.To) {
		if n.hosts[host] == "" {
			return fmt.Errorf("no host is called %q", host)
		}
	}
	if len(f.From) == 0 || len(f.To) == 0 {
		return errors.New("a fault of the network needs hosts on both sides")
	}
	return nil
}

// Inject puts a fault in force and returns its number.
func (n *Network) Inject(f NetFault) (int, error) {
	if err := f.validate(n); err != nil {
		return 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.last++
	id := n.mu.last
	fault := &netFault{NetFault: f}
	n.mu.faults[id] = fault
	err := n.applyLocked(id, fault)
	if err != nil {
		return 0, errors.Join(err, n.removeLocked(id))
	}
	return id, nil
}

func (n *Network) applyLocked(id int, f *netFault) error {
	if f.Delay > 0 {
		if n.mu.slow == nil {
			n.mu.slow = newSlowLinks(n)
		}
		return n.mu.slow.add(id, f.NetFault)
	}
	for host, rules := range n.rules(f.NetFault) {
		script := fmt.Sprintf("table ip keelf%d {\n chain in { type filter hook input priority 0;\n%s\n }\n chain out { type filter hook output priority 0;\n%s\n }\n}\n",
			id, strings.Join(rules.in, "\n"), strings.Join(rules.out, "\n"))
		f.tables = append(f.tables, host)
		if err := run(script, n.inside(host, "nft", "-f", "-")...); err != nil {
			return err
		}
	}
	return nil
}

// chains are the rules of one namespace.
type chains struct{ in, out []string }

// rules lays a fault out over the namespaces of nodes: dropped packets vanish at
// the receiver, so that no sender is told. What goes to the harness, whose
// namespace is the machine's own, is dropped where it leaves.
func (n *Network) rules(f NetFault) map[string]*chains {
	all := make(map[string]*chains)
	at := func(host string) *chains {
		if all[host] == nil {
			all[host] = &chains{}
		}
		return all[host]
	}
	for _, from := range f.From {
		for _, to := range f.To {
			switch {
			case from == to:
			case f.Duplicate > 0:
				if from != Client {
					at(from).out = append(at(from).out, fmt.Sprintf("ip daddr %[1]s %[2]s dup to %[1]s", n.hosts[to], share(f.Duplicate)))
				}
			case to == Client:
				at(from).out = append(at(from).out, fmt.Sprintf("ip daddr %s %s", n.hosts[to], verdict(f)))
			default:
				at(to).in = append(at(to).in, fmt.Sprintf("ip saddr %s %s", n.hosts[from], verdict(f)))
			}
		}
	}
	return all
}

func verdict(f NetFault) string {
	if f.Reset > 0 {
		return "meta l4proto tcp " + share(f.Reset) + " reject with tcp reset"
	}
	return share(f.Drop) + " drop"
}

// share matches a part of the packets.
func share(part float64) string {
	if part >= 1 {
		return ""
	}
	return fmt.Sprintf("numgen random mod 10000 < %d", max(1, int(part*10000)))
}

// Remove ends a fault. Removing it again does nothing (HO5).
func (n *Network) Remove(id int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.removeLocked(id)
}

func (n *Network) removeLocked(id int) error {
	f := n.mu.faults[id]
	if f == nil {
		return nil
	}
	if f.Delay > 0 {
		if err := n.mu.slow.remove(id); err != nil {
			return err
		}
	}
	for len(f.tables) > 0 {
		// Made again before it is deleted, so that it is no error if it never was.
		script := fmt.Sprintf("table ip keelf%[1]d\ndelete table ip keelf%[1]d\n", id)
		if err := run(script, n.inside(f.tables[0], "nft", "-f", "-")...); err != nil {
			return err
		}
		f.tables = f.tables[1:]
	}
	delete(n.mu.faults, id)
	return nil
}

// Limit bounds the bandwidth of a node in both directions, in bits per second;
// 0 ends the limit.
func (n *Network) Limit(host string, bitsPerSecond int64) error {
	if n.hosts[host] == "" || host == Client {
		return fmt.Errorf("no node is called %q", host)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.limitLocked(host, bitsPerSecond)
}

func (n *Network) limitLocked(host string, bitsPerSecond int64) error {
	devices := [][]string{n.inside(host, "tc", "qdisc"), {"tc", "qdisc"}}
	names := []string{"eth0", n.veth(host)}
	if bitsPerSecond <= 0 {
		if !n.mu.limits[host] {
			return nil
		}
		var failed error
		for i, tc := range devices {
			err := run("", append(tc, "del", "dev", names[i], "root")...)
			if err != nil && !strings.Contains(err.Error(), "No such file") && !strings.Contains(err.Error(), "handle of zero") {
				failed = errors.Join(failed, err)
			}
		}
		if failed == nil {
			delete(n.mu.limits, host)
		}
		return failed
	}
	n.mu.limits[host] = true
	for i, tc := range devices {
		if err := run("", append(tc, "replace", "dev", names[i], "root", "tbf", "rate", fmt.Sprintf("%dbit", bitsPerSecond),
			"burst", "16kb", "latency", "200ms")...); err != nil {
			return err
		}
	}
	return nil
}

// Clear ends all faults and limits.
func (n *Network) Clear() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var failed error
	for id := range n.mu.faults {
		failed = errors.Join(failed, n.removeLocked(id))
	}
	for host := range n.mu.limits {
		failed = errors.Join(failed, n.limitLocked(host, 0))
	}
	return failed
}

// Faults is how many faults are in force.
func (n *Network) Faults() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.mu.faults) + len(n.mu.limits)
}
