package main

import "syscall"

// childAttributes make a process end with this one, however this one ends, and
// keep an interrupt at the terminal from it: it is stopped in order.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
