package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

// tick is the unit of /proc/PID/stat: USER_HZ is 100 on every Linux that Go runs
// on.
const tick = 10 * time.Millisecond

// watchCPU measures the processor time that processes and this one use between
// begin and end. The function that it returns waits for the end, or for ctx's,
// and gives both.
func watchCPU(ctx context.Context, pids []int, begin, end time.Time) func() (nodes, own time.Duration) {
	type use struct{ nodes, own time.Duration }
	done := make(chan use, 1)
	go func() {
		if wait(ctx, time.Until(begin)) != nil {
			done <- use{}
			return
		}
		nodes, own := processorTime(pids), ownTime()
		if wait(ctx, time.Until(end)) != nil {
			done <- use{}
			return
		}
		done <- use{processorTime(pids) - nodes, ownTime() - own}
	}()
	return func() (time.Duration, time.Duration) {
		u := <-done
		return u.nodes, u.own
	}
}

// processorTime is the sum of what the processes have used so far; one that is
// gone counts as nothing.
func processorTime(pids []int) time.Duration {
	sum := time.Duration(0)
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err == nil {
			sum += statTime(b)
		}
	}
	return sum
}

// statTime reads user and system time, the 14th and 15th field; the second one,
// in parentheses, may hold anything.
func statTime(stat []byte) time.Duration {
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseInt(string(fields[11]), 10, 64)
	system, _ := strconv.ParseInt(string(fields[12]), 10, 64)
	return time.Duration(user+system) * tick
}

func ownTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
