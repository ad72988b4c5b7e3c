package host

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// commandLimit bounds each system command; all of them are quick.
const commandLimit = 20 * time.Second

// run runs a system command, with text on its standard input.
func run(input string, argv ...string) error {
	_, err := output(input, argv...)
	return err
}

// output is run that returns what the command prints.
func output(input string, argv ...string) (string, error) {
	// Undoing must work after the caller's context is done, so there is none.
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &stderr
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(stderr.String()))
	}
	return out.String(), nil
}
