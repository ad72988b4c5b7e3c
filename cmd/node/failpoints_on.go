//go:build failpoints

package main

import (
	"net/http"
	"strings"

	"github.com/keelstate/keelstate/internal/failpoint"
)

// armFailpoints arms what the environment asks for.
func armFailpoints(environ []string) error {
	for _, e := range environ {
		if list, ok := strings.CutPrefix(e, failpointsEnv+"="); ok {
			if err := failpoint.Arm(list); err != nil {
				return usagef("%s: %w", failpointsEnv, err)
			}
		}
	}
	return nil
}

// serveFailpoints lets them be armed from outside.
func serveFailpoints(mux *http.ServeMux) { mux.HandleFunc("/debug/failpoints", failpoint.ServeHTTP) }
