package host

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Ctl runs keelctl against all nodes and returns its standard output.
func (f *Fleet) Ctl(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, f.opts.CtlBinary, append([]string{"--endpoints", strings.Join(f.Endpoints(), ",")}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return out.Bytes(), fmt.Errorf("keelctl %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out.Bytes(), nil
}

// Found makes the started nodes a cluster.
func (f *Fleet) Found(ctx context.Context, shards int) error { return f.found(ctx, shards) }

// Restore makes the started nodes a cluster that begins with a checkpoint.
func (f *Fleet) Restore(ctx context.Context, shards int, uri string) error {
	return f.found(ctx, shards, "--restore", uri)
}

func (f *Fleet) found(ctx context.Context, shards int, more ...string) error {
	var members []string
	for _, n := range f.Nodes {
		members = append(members, n.ID+"="+n.Raft)
	}
	_, err := f.Ctl(ctx, append([]string{"cluster", "init", "--nodes", strings.Join(members, ","), "--shards", strconv.Itoa(shards), "--timeout", "90s"}, more...)...)
	if err != nil {
		return err
	}
	return f.WaitHealthy(ctx)
}

// WaitHealthy waits until the cluster says that it is healthy, at most 90 s.
func (f *Fleet) WaitHealthy(ctx context.Context) error {
	_, err := f.Ctl(ctx, "cluster", "status", "--exit-when-healthy", "--wait", "90s", "--timeout", "100s")
	return err
}

// Shard is what keelctl lists of one.
type Shard struct {
	ID int `json:"id"`
	// Leader is empty if the node that was asked knows none.
	Leader string `json:"leader"`
	// Replicas are the ids of its replicas.
	Replicas []string `json:"replicas"`
}

// Shards are all shards of the cluster, as the nodes that answer see them.
func (f *Fleet) Shards(ctx context.Context) ([]Shard, error) {
	var all []Shard
	out, err := f.Ctl(ctx, "shard", "list", "-o", "json", "--timeout", "3s")
	if err == nil {
		err = items(out, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("listing the shards: %w", err)
	}
	return all, nil
}

// Leaders are the leaders of the shards that have one, by shard.
func (f *Fleet) Leaders(ctx context.Context) (map[int]string, error) {
	all, err := f.Shards(ctx)
	if err != nil {
		return nil, err
	}
	leaders := make(map[int]string)
	for _, s := range all {
		if s.Leader != "" {
			leaders[s.ID] = s.Leader
		}
	}
	return leaders, nil
}

// ReplicaHash is what a replica has at an index of its shard's log.
type ReplicaHash struct {
	Shard int    `json:"shard"`
	Node  string `json:"node"`
	Index uint64 `json:"index"`
	// Content is the hash of its state, Ops that of what sessions have done.
	Content string `json:"content"`
	Ops     string `json:"ops"`
}

// AllShards is in the place of one shard.
const AllShards = 0

// Hashes makes the replicas of a shard, or of AllShards, compute their hashes, and
// returns those of the replicas that answered within limit. It also returns an
// error where one did not, or where some differ.
func (f *Fleet) Hashes(ctx context.Context, shard int, limit time.Duration) ([]ReplicaHash, error) {
	args := []string{"shard", "hash"}
	if shard != AllShards {
		args = append(args, strconv.Itoa(shard))
	}
	// The exit code tells of replicas that are down or differ; the output more.
	out, ctlErr := f.Ctl(ctx, append(args, "-o", "json", "--timeout", limit.String())...)
	if len(out) == 0 {
		return nil, ctlErr
	}
	var all []struct {
		ReplicaHash
		Error string `json:"error"`
	}
	if err := items(out, &all); err != nil {
		return nil, errors.Join(fmt.Errorf("reading the hashes: %w", err), ctlErr)
	}
	var answered []ReplicaHash
	for _, h := range all {
		if h.Error == "" && h.Content != "" {
			answered = append(answered, h.ReplicaHash)
		}
	}
	return answered, ctlErr
}

// CheckpointCompleted is the phase of a checkpoint that is whole and retained.
const CheckpointCompleted = "completed"

// Checkpoint is what keelctl says of one.
type Checkpoint struct {
	Number uint64 `json:"number"`
	Phase  string `json:"phase"`
	URI    string `json:"uri"`
	Error  string `json:"error"`
}

// CreateCheckpoint has a checkpoint made, and follows it until it has completed. A
// cluster that is making one refuses.
func (f *Fleet) CreateCheckpoint(ctx context.Context, limit time.Duration) (Checkpoint, error) {
	return f.create(ctx, limit)
}

// CreateSavepoint has a savepoint made, which is kept until it is deleted, and
// follows it as CreateCheckpoint does.
func (f *Fleet) CreateSavepoint(ctx context.Context, limit time.Duration) (Checkpoint, error) {
	return f.create(ctx, limit, "--savepoint")
}

func (f *Fleet) create(ctx context.Context, limit time.Duration, more ...string) (c Checkpoint, err error) {
	out, err := f.Ctl(ctx, append([]string{"checkpoint", "create", "-o", "json", "--wait", limit.String()}, more...)...)
	if err == nil {
		err = json.Unmarshal(out, &c)
	}
	return c, err
}

// DeleteSavepoint deletes one.
func (f *Fleet) DeleteSavepoint(ctx context.Context, number uint64) error {
	_, err := f.Ctl(ctx, "checkpoint", "delete", strconv.FormatUint(number, 10), "--savepoint", "--yes", "--timeout", "10s")
	return err
}

// RollBack takes the cluster back to a checkpoint or savepoint, and follows it to its
// end. When ctx ends the rollback goes on, and the same call follows it again.
func (f *Fleet) RollBack(ctx context.Context, number uint64) error {
	_, err := f.Ctl(ctx, "checkpoint", "rollback", strconv.FormatUint(number, 10), "--yes", "-o", "json")
	return err
}

// Checkpoints lists those that the cluster knows, whatever their phase.
func (f *Fleet) Checkpoints(ctx context.Context) (all []Checkpoint, err error) {
	out, err := f.Ctl(ctx, "checkpoint", "list", "-o", "json", "--timeout", "5s")
	if err == nil {
		err = items(out, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("listing the checkpoints: %w", err)
	}
	return all, nil
}

// Verification is what reading a whole checkpoint showed.
type Verification struct {
	Sound   bool  `json:"sound"`
	Objects int64 `json:"objects"`
	Bytes   int64 `json:"bytes"`
}

// ErrUnsound says that a checkpoint was read, and is not what it should be.
var ErrUnsound = errors.New("it is not sound")

// VerifyCheckpoint has every object of a checkpoint read. It is ErrUnsound, with
// what is wrong, if one is bad; another error if it could not be read.
func (f *Fleet) VerifyCheckpoint(ctx context.Context, number uint64, limit time.Duration) (v Verification, err error) {
	// The exit code tells of an unsound one, and the output more.
	out, ctlErr := f.Ctl(ctx, "checkpoint", "verify", strconv.FormatUint(number, 10), "-o", "json", "--timeout", limit.String())
	if len(out) == 0 {
		return v, errors.Join(ctlErr, ctx.Err())
	}
	if err := json.Unmarshal(out, &v); err != nil {
		return v, errors.Join(fmt.Errorf("reading the verification of checkpoint %d: %w", number, err), ctlErr)
	}
	if !v.Sound {
		return v, fmt.Errorf("%w: %w", ErrUnsound, cmp.Or(ctlErr, errors.New("keelctl does not say why")))
	}
	return v, ctlErr
}

// items reads a list that keelctl printed.
func items[T any](out []byte, all *[]T) error {
	var list struct {
		Items []T `json:"items"`
	}
	err := json.Unmarshal(out, &list)
	*all = list.Items
	return err
}
