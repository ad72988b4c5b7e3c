package s3

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/keelstate/keelstate/internal/s3server"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
)

const uploadEnv = "KEELSTATE_TEST_UPLOAD_TO"

// uploadIfAsked makes this process one that uploads, says when it is in the middle,
// and waits there to be killed.
func uploadIfAsked() {
	endpoint := os.Getenv(uploadEnv)
	if endpoint == "" {
		return
	}
	s, err := Open(options(&s3server.Server{Endpoint: endpoint}, "killed"))
	if err == nil {
		b := objectstore.Bytes(objectstoretest.Pattern(3 * minPartBytes))
		b.Reader = at{b.Reader, 2*minPartBytes + 1, new(sync.Once), func() {
			fmt.Println("in the middle")
			select {}
		}}
		err = s.Put(context.Background(), "k", b)
	}
	fmt.Fprintln(os.Stderr, "not killed:", err)
	os.Exit(3)
}

// B56: what a killed uploader leaves is no object, and is swept away.
func TestKillOfTheUploader(t *testing.T) {
	server := s3server.Run(t)
	s := open(t, options(server, "killed"))
	const kills = 3
	for range kills {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), uploadEnv+"="+server.Endpoint)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Errorf("the uploader said %q: %v", line, err)
		}
		must(t, cmd.Process.Kill())
		_ = cmd.Wait() // killed
	}
	if got := keys(t, s); len(got) != 0 {
		t.Errorf("there is %v", got)
	}
	if n := sweep(t, s); n != kills {
		t.Errorf("swept %d uploads of %d", n, kills)
	}
	if n := sweep(t, s); n != 0 {
		t.Errorf("%d uploads are still left", n)
	}
	must(t, s.Put(context.Background(), "k", objectstore.Bytes([]byte("again"))))
}
