//go:build !failpoints

package main

import (
	"net/http"
	"strings"
)

// armFailpoints refuses what this build cannot do: a test that believes to have
// armed something must not pass.
func armFailpoints(environ []string) error {
	for _, e := range environ {
		if strings.HasPrefix(e, failpointsEnv+"=") {
			return usagef("%s: this build has no failpoints; build with -tags failpoints", failpointsEnv)
		}
	}
	return nil
}

func serveFailpoints(*http.ServeMux) {}
