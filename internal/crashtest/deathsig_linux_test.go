package crashtest

import "syscall"

// childAttr ends a node with the test's process, however that ends (CR1).
func childAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
