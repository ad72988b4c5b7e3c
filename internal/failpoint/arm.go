//go:build failpoints

package failpoint

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Arm arms the points of a list (see the package's comment), all or none (FP4).
func Arm(list string) error {
	todo := make(map[*point]*armed)
	for _, one := range strings.Split(list, ";") {
		if one = strings.TrimSpace(one); one == "" {
			continue
		}
		name, spec, found := strings.Cut(one, "=")
		p := points[strings.TrimSpace(name)]
		switch {
		case !found:
			return fmt.Errorf("%q is not name=action", one)
		case p == nil:
			return fmt.Errorf("no failpoint %q; docs/failpoints.md lists them", name)
		}
		a, err := parse(p.Kind, strings.TrimSpace(spec))
		if err != nil {
			return fmt.Errorf("failpoint %s: %w", name, err)
		}
		todo[p] = a
	}
	for p, a := range todo {
		p.armed.Swap(a).release()
	}
	return nil
}

// Disarm makes every point do nothing again, and lets go who is stalled.
func Disarm() {
	for _, p := range points {
		p.armed.Swap(nil).release()
	}
}

// Release lets go who is stalled at a point, now and later.
func Release(name string) error {
	p := points[name]
	if p == nil {
		return fmt.Errorf("no failpoint %q", name)
	}
	p.armed.Load().release()
	return nil
}

// State is what a point has done so far.
type State struct {
	Name string `json:"name"`
	Kind string `json:"kind"`
	// Hits counts arrivals since the process began, armed or not.
	Hits uint64 `json:"hits"`
	// Armed is the action, empty if there is none.
	Armed string `json:"armed,omitempty"`
}

// States lists all points in the order of the registry.
func States() []State {
	var out []State
	for _, r := range Points() {
		p := points[r.Name]
		s := State{Name: p.Name, Kind: p.Kind.String(), Hits: p.hits.Load()}
		if a := p.armed.Load(); a != nil {
			s.Armed = a.spec
		}
		out = append(out, s)
	}
	return out
}

var errnos = map[string]syscall.Errno{
	"EIO": syscall.EIO, "ENOSPC": syscall.ENOSPC, "EROFS": syscall.EROFS, "EDQUOT": syscall.EDQUOT, "EMFILE": syscall.EMFILE,
}

// parse reads an action; nil is off.
func parse(k Kind, spec string) (*armed, error) {
	a := &armed{spec: spec, released: make(chan struct{})}
	rest, err := cutCount(spec, "*", &a.limit)
	if err == nil && strings.Contains(spec, "*") && a.limit == 0 {
		err = errors.New("*M needs M above 0")
	}
	if err == nil {
		rest, err = cutCount(rest, "@", &a.skip)
	}
	if err != nil {
		return nil, err
	}
	action, arg, has := strings.Cut(rest, "(")
	if has && !strings.HasSuffix(arg, ")") {
		return nil, fmt.Errorf("%q has no closing parenthesis", spec)
	}
	a.action, arg = action, strings.TrimSuffix(arg, ")")
	if action == "off" {
		return nil, nil
	}
	if (action == "value") != (k == KindInt) || action == "error" && k != KindErr {
		return nil, fmt.Errorf("it takes no %q: it is %s", action, k)
	}
	switch action {
	case "crash", "panic", "stall":
		if has {
			err = fmt.Errorf("%q takes no argument", action)
		}
	case "error":
		a.err = errors.New("injected " + arg)
		if e, ok := errnos[arg]; ok {
			a.err = e
		} else if arg == "" {
			a.err = syscall.EIO
		}
	case "delay":
		if a.delay, err = time.ParseDuration(arg); err == nil && a.delay < 0 {
			err = errors.New("a delay is not below 0")
		}
	case "value":
		a.value, err = strconv.ParseInt(arg, 10, 64)
	default:
		err = fmt.Errorf("no action %q", action)
	}
	return a, err
}

// cutCount takes a count that follows sep off the end of a spec. What is in
// parentheses is no count.
func cutCount(spec, sep string, n *uint64) (string, error) {
	i := strings.LastIndex(spec, sep)
	if i < 0 || strings.Contains(spec[i:], ")") {
		return spec, nil
	}
	v, err := strconv.ParseUint(spec[i+1:], 10, 32)
	if err != nil {
		return "", fmt.Errorf("%q is no count", spec[i:])
	}
	*n = v
	return spec[:i], nil
}
