package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/objectstore/retry"
	"github.com/keelstate/keelstate/objectstore/s3"
	"github.com/keelstate/keelstate/snapshot"
)

// newDebugCheckpointCommand looks at a checkpoint without a cluster.
func newDebugCheckpointCommand(environ []string) *cobra.Command {
	var full bool
	verify := &cobra.Command{
		Use: "verify KEY", Short: "Look at every object of a checkpoint in the object store",
		Long: "Look at every object of a checkpoint and name each that is missing, short, foreign or damaged.\n" +
			"KEY is that of its _metadata: CLUSTER/checkpoints/NUMBER/_metadata. The object store is the one of a node's settings.",
		Args: exactArgs(1, "the key of a checkpoint's _metadata"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := loadConfig(cmd.Flags(), environ, nodeSettings())
			if err != nil {
				return err
			}
			return verifyCheckpoint(cmd, c.objects, args[0], full)
		},
	}
	register(verify.Flags(), objectStoreSettings())
	verify.Flags().BoolVar(&full, "full", false, "read and hash every object, not only manifests")
	return group("checkpoint", "Look at a checkpoint of a cluster",
		&cobra.Command{Use: "dump FILE", Short: "Print a _metadata or the manifest of a shard", Args: exactArgs(1, "a copy of a _metadata or manifest"),
			RunE: func(cmd *cobra.Command, args []string) error {
				raw, err := readBounded(args[0], snapshot.MaxCheckpointBytes)
				if err != nil {
					return err
				}
				if err := snapshot.Dump(cmd.OutOrStdout(), raw); err != nil {
					return fmt.Errorf("reading %s: %w", args[0], err)
				}
				return nil
			}},
		verify,
	)
}

// readBounded reads a file of at most so many bytes.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	if int64(len(raw)) > limit {
		return nil, fmt.Errorf("%s: over %d bytes: %w", path, limit, base.ErrTooLarge)
	}
	return raw, nil
}

// openToLook opens a configured store; a directory that is not there stays so.
func openToLook(o objects) (objectstore.Store, error) {
	if o.uri == "" {
		return nil, usagef("object-store is required: give --object-store, as to a node")
	}
	if o.dir == "" {
		s, err := s3.Open(o.s3)
		if err != nil {
			return nil, usagef("object-store %s, with what object-store-... say of it: %w", o.uri, err)
		}
		return retry.Wrap(s, retry.Options{}), nil
	}
	if st, err := os.Stat(o.dir); err != nil || !st.IsDir() {
		return nil, errors.Join(fmt.Errorf("%s is no directory: %w", o.dir, base.ErrNotFound), err)
	}
	return file.Open(o.dir)
}

func verifyCheckpoint(cmd *cobra.Command, o objects, key string, full bool) (err error) {
	store, err := openToLook(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	v, err := snapshot.VerifyCheckpoint(cmd.Context(), store, key, snapshot.VerifyOptions{Full: full})
	if v == nil {
		return err
	}
	return errors.Join(printJSON(cmd.OutOrStdout(), verificationView(v)), err)
}

// verificationView leaves out what dump prints.
func verificationView(v *snapshot.Verification) any {
	type badView struct {
		Key   string
		Fault snapshot.Fault
		Why   string
		Shard string `json:",omitempty"`
	}
	bad := make([]badView, len(v.Bad))
	for i, b := range v.Bad {
		bad[i] = badView{Key: b.Key, Fault: b.Fault, Why: b.Why}
		if b.Shard != base.SystemGroup {
			bad[i].Shard = b.Shard.String()
		}
	}
	return struct {
		Key              string
		Full             bool
		Objects, Files   int
		Segments         int
		Bytes, ReadBytes int64
		Bad              []badView
	}{v.Key, v.Full, v.Objects, v.Files, v.Segments, v.Bytes, v.ReadBytes, bad}
}
