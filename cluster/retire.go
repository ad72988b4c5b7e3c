package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/keelstate/keelstate/internal/failpoint"
)

// retire ends a replica that was replaced or moved away, for good: first a
// durable tombstone in the log, then the files are put aside until the replica
// that replaces it is ready (removeReplaced).
func (r *replica) retire() error {
	if err := r.close(); err != nil {
		r.node.logger.Warn("closing a replica that goes", "group", r.id.String(), "error", err)
	}
	failpoint.Hit("cluster.retire.before-tombstone")
	if err := r.node.log.Tombstone(r.id); err != nil {
		return err
	}
	failpoint.Hit("cluster.retire.before-rename")
	if err := os.Rename(r.dir, r.dir+replacedSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("putting the files of %s aside: %w", r.replica, err)
	}
	return nil
}

// replacedSuffix marks the files of a generation that was replaced.
const replacedSuffix = ".replaced"

// removeReplaced removes the files of older generations, now that this one is
// ready.
func (r *replica) removeReplaced() (gone bool) {
	parent := filepath.Dir(r.dir)
	names, err := dirNames(parent)
	if err != nil {
		r.logger.Warn("looking for replaced files", "error", err)
		return false
	}
	gone = true
	for _, n := range names {
		gen, err := strconv.ParseUint(strings.TrimSuffix(n, replacedSuffix), 10, 64)
		if err != nil || gen >= r.generation {
			continue
		}
		r.logger.Info("removing the files of a replaced replica", "generation", gen)
		failpoint.Hit("cluster.retire.before-remove")
		if err := r.node.remover.remove(filepath.Join(parent, n)); err != nil {
			r.logger.Warn("removing replaced files", "error", err)
			gone = false
		}
	}
	return gone
}
