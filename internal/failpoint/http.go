//go:build failpoints

package failpoint

import (
	"encoding/json"
	"io"
	"net/http"
)

// maxList bounds a list that comes over HTTP.
const maxList = 64 << 10

// ServeHTTP shows and arms the points of this process: GET lists them, POST arms
// the list in its body, or with ?release=NAME lets go who is stalled, DELETE
// disarms all.
func ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var err error
	switch {
	case r.Method == http.MethodGet:
	case r.Method == http.MethodDelete:
		Disarm()
	case r.Method == http.MethodPost && r.URL.Query().Has("release"):
		err = Release(r.URL.Query().Get("release"))
	case r.Method == http.MethodPost:
		var list []byte
		if list, err = io.ReadAll(http.MaxBytesReader(w, r.Body, maxList)); err == nil {
			err = Arm(string(list))
		}
	default:
		w.Header().Set("Allow", "GET, POST, DELETE")
		http.Error(w, "use GET, POST or DELETE", http.StatusMethodNotAllowed)
		return
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(States()) // the caller may be gone
}
