package host

import (
	"os/exec"
	"runtime"
)

// launcher starts all processes from one operating-system thread, which lives as
// long as it: the kernel takes the end of the thread that started a process for
// the death of its parent.
type launcher struct {
	jobs chan launch
	done chan struct{}
}

type launch struct {
	cmd    *exec.Cmd
	result chan error // of one
}

func newLauncher() *launcher {
	l := &launcher{jobs: make(chan launch), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for job := range l.jobs {
			job.result <- job.cmd.Start()
		}
	}()
	return l
}

func (l *launcher) start(cmd *exec.Cmd) error {
	job := launch{cmd, make(chan error, 1)}
	l.jobs <- job
	return <-job.result
}

// close ends the thread; the processes must be gone.
func (l *launcher) close() {
	close(l.jobs)
	<-l.done
}
