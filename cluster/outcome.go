package cluster

import (
	"errors"
	"fmt"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// classify maps an error of raft's Apply to the product's sentinels by rule W8:
// only the errors listed as "not applied" are; everything else, known or not,
// leaves the outcome unknown (CL4).
func classify(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return fmt.Errorf("%w: %v", base.ErrNotLeader, err)
	case errors.Is(err, raft.ErrEnqueueTimeout):
		return fmt.Errorf("%w: %v", base.ErrOverloaded, err)
	default:
		return fmt.Errorf("%w: %v", base.ErrOutcomeUnknown, err)
	}
}
