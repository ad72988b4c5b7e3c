package main

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/rocks"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
	"github.com/keelstate/keelstate/snapshot"
)

func newVersionCommand() *cobra.Command {
	return &cobra.Command{Use: "version", Short: "Print the version", Args: noArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		revision := "unknown"
		if info, ok := debug.ReadBuildInfo(); ok {
			for _, s := range info.Settings {
				if s.Key == "vcs.revision" {
					revision = s.Value
				}
			}
		}
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "keelstate-node %s\nrevision %s\n%s %s/%s\nengines: %s, %s\n", cluster.Version, revision,
			runtime.Version(), runtime.GOOS, runtime.GOARCH, rocks.Name, mem.Name)
		return err
	}}
}

// newDebugCommand looks at the files of a stopped node. Nothing here changes a
// file that belongs to a node.
func newDebugCommand(environ []string) *cobra.Command {
	return group("debug", "Look at the files of a stopped node",
		&cobra.Command{Use: "identity DATA-DIR", Short: "Print who a data directory belongs to", Args: exactArgs(1, "a data directory"),
			RunE: func(cmd *cobra.Command, args []string) error {
				id, err := cluster.ReadIdentity(args[0])
				if err != nil {
					return err
				}
				return printJSON(cmd.OutOrStdout(), id)
			}},
		group("raftlog", "Look at a Raft log",
			&cobra.Command{Use: "dump DATA-DIR", Short: "Print every record", Args: exactArgs(1, "a data directory"),
				RunE: func(cmd *cobra.Command, args []string) error {
					dir, err := raftlogDir(args[0])
					if err != nil {
						return err
					}
					return raftlog.Dump(cmd.OutOrStdout(), vfs.OS, dir)
				}},
			&cobra.Command{Use: "verify DATA-DIR", Short: "Check every checksum", Args: exactArgs(1, "a data directory"),
				RunE: func(cmd *cobra.Command, args []string) error {
					dir, err := raftlogDir(args[0])
					if err != nil {
						return err
					}
					report, err := raftlog.Verify(vfs.OS, dir)
					return errors.Join(printJSON(cmd.OutOrStdout(), report), err)
				}},
		),
		group("manifest", "Look at the manifest of a shard's snapshot",
			&cobra.Command{Use: "dump FILE", Short: "Print a manifest", Args: exactArgs(1, "a manifest file"),
				RunE: func(cmd *cobra.Command, args []string) error {
					m, err := readManifest(args[0])
					if err != nil {
						return err
					}
					return printJSON(cmd.OutOrStdout(), manifestView(m))
				}},
			&cobra.Command{Use: "verify FILE FILES-DIR", Short: "Check the files that a manifest lists", Args: exactArgs(2, "a manifest file and the directory of its files"),
				RunE: func(cmd *cobra.Command, args []string) error {
					m, err := readManifest(args[0])
					if err != nil {
						return err
					}
					ctx := cmd.Context()
					if err := snapshot.Verify(ctx, args[1], m.FetchManifest()); err != nil {
						return err
					}
					_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d files, %d bytes: ok\n", len(m.Files), m.Bytes())
					return err
				}},
		),
		newDebugCheckpointCommand(environ),
		group("store", "Look at a replica's store",
			&cobra.Command{Use: "marker STORE-DIR", Short: "Print which engine a store belongs to", Args: exactArgs(1, "a store directory"),
				RunE: func(cmd *cobra.Command, args []string) error {
					m, err := engine.ReadMarker(args[0])
					if err != nil {
						return err
					}
					return printJSON(cmd.OutOrStdout(), map[string]any{"engine": m.Engine, "layout": m.Layout})
				}},
			&cobra.Command{Use: "verify STORE-DIR", Short: "Read every file and check its checksums", Args: exactArgs(1, "a store directory"),
				RunE: func(cmd *cobra.Command, args []string) error { return verifyStore(cmd.OutOrStdout(), args[0]) }},
		),
	)
}

// raftlogDir finds the log in a data directory; the log's own directory does
// as well.
func raftlogDir(dir string) (string, error) {
	for _, d := range []string{filepath.Join(dir, "raftlog"), dir} {
		if st, err := os.Stat(d); err == nil && st.IsDir() {
			return d, nil
		}
	}
	return "", fmt.Errorf("%s is no directory: %w", dir, base.ErrNotFound)
}

// maxManifestBytes bounds what is read as a manifest.
const maxManifestBytes = 256 << 20

func readManifest(path string) (*snapshot.Manifest, error) {
	raw, err := readBounded(path, maxManifestBytes)
	if err != nil {
		return nil, err
	}
	m, err := snapshot.Decode(raw)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return m, nil
}

// manifestView is a manifest with hexadecimal hashes.
func manifestView(m *snapshot.Manifest) any {
	type fileView struct {
		Name   string
		Size   int64
		SHA256 string
		Object string `json:",omitempty"`
		Offset int64  `json:",omitempty"`
		Length int64  `json:",omitempty"`
	}
	files := make([]fileView, len(m.Files))
	for i, f := range m.Files {
		files[i] = fileView{f.Name, f.Size, hex.EncodeToString(f.SHA256[:]), f.Object, f.Offset, f.Length}
	}
	head := *m
	head.Files, head.Changelog = nil, nil
	return struct {
		Manifest  snapshot.Manifest
		Bytes     int64
		Files     []fileView
		Changelog *changelogView `json:",omitempty"`
	}{head, m.Bytes(), files, viewChangelog(m.Changelog)}
}

// changelogView is a changelog with hexadecimal hashes.
type changelogView struct {
	Base     snapshot.Cut
	Digest   string
	Segments []segmentView
}

type segmentView struct {
	First, Last uint64
	Size        int64
	SHA256      string
	Object      string `json:",omitempty"`
}

func viewChangelog(c *snapshot.Changelog) *changelogView {
	if c == nil {
		return nil
	}
	v := &changelogView{Base: c.Base, Digest: hex.EncodeToString(c.Digest[:])}
	for _, s := range c.Segments {
		v.Segments = append(v.Segments, segmentView{s.First, s.Last, s.Size, hex.EncodeToString(s.SHA256[:]), s.Object})
	}
	return v
}

func verifyStore(w io.Writer, dir string) (err error) {
	m, err := engine.ReadMarker(dir)
	if err != nil {
		return err
	}
	driver, err := newDriver(&config{engine: m.Engine, memory: minMemory})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, driver.Close()) }()
	if err := driver.Verify(dir); err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s store: ok\n", m.Engine)
	return err
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
