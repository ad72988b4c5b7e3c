package cluster

import (
	"fmt"
	"os"
	"path/filepath"
)

// IdentityFile is the name of the file that holds a data directory's Identity.
const IdentityFile = "IDENTITY"

// ReadIdentity reads and checks the identity of a data directory without
// changing or locking anything, for offline tools.
func ReadIdentity(dir string) (*Identity, error) {
	path := filepath.Join(dir, IdentityFile)
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading identity: %w", err)
	}
	id, err := parseIdentity(raw)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return id, nil
}
