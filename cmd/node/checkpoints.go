package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/keelstate/keelstate/cluster"
)

// checkpoints says when checkpoints are made and how many are kept.
type checkpoints struct {
	interval, timeout time.Duration
	retain            int
	localLinks        bool
	changelog         bool
	materializeBytes  int64
}

// maxRetain bounds what is kept: every checkpoint costs each node a little memory
// for each object that it uses.
const maxRetain = 1000

func checkpointSettings() []setting {
	return []setting{
		{name: "checkpoint-interval", def: "0", usage: "time between the starts of automatic checkpoints, at least 1s; 0: none; give all nodes the same", set: setCheckpointInterval},
		{name: "checkpoint-retain", def: "3", usage: "how many completed checkpoints are kept, the newest; give all nodes the same", set: setCheckpointRetain},
		{name: "checkpoint-timeout", def: "10m", usage: "how long a checkpoint may take; then it fails, and its objects are deleted", set: setCheckpointTimeout},
		{name: "checkpoint-mode", def: "incremental", usage: "what a checkpoint stores of a shard: incremental: its new files; changelog: its log since an earlier checkpoint; give all nodes the same", set: setCheckpointMode},
		{name: "changelog-materialize-bytes", def: "64MiB", usage: "a checkpoint of mode changelog stores files again when the log since then has more bytes than this and than half of them", set: setMaterializeBytes},
		{name: "checkpoint-local-links", def: "false", isBool: true, usage: "keep on every node what its shards held at each checkpoint, by hard links, so that a rollback of the live cluster fetches nothing; give all nodes the same", set: setCheckpointLocalLinks},
	}
}

func setCheckpointInterval(c *config, v string) error {
	d, err := time.ParseDuration(v)
	if err != nil || d < 0 || d > 0 && d < time.Second {
		return fmt.Errorf("%q is not 0 or a duration of at least 1s, like 10m", v)
	}
	c.checkpoints.interval = d
	return nil
}

func setCheckpointTimeout(c *config, v string) error {
	d, err := time.ParseDuration(v)
	if err != nil || d < time.Second {
		return fmt.Errorf("%q is not a duration of at least 1s, like 10m", v)
	}
	c.checkpoints.timeout = d
	return nil
}

func setCheckpointRetain(c *config, v string) error {
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > maxRetain {
		return fmt.Errorf("%q is not a number from 1 to %d", v, maxRetain)
	}
	c.checkpoints.retain = n
	return nil
}

func setCheckpointMode(c *config, v string) error {
	if v != "incremental" && v != "changelog" {
		return fmt.Errorf("%q is not incremental or changelog", v)
	}
	c.checkpoints.changelog = v == "changelog"
	return nil
}

func setMaterializeBytes(c *config, v string) error {
	n, err := parseBytes(v)
	if err != nil || n < 1 {
		return fmt.Errorf("%q is not a size of at least 1 byte, like 64MiB", v)
	}
	c.checkpoints.materializeBytes = n
	return nil
}

func setCheckpointLocalLinks(c *config, v string) error {
	on, err := strconv.ParseBool(v)
	if err != nil {
		return fmt.Errorf("%q is not true or false", v)
	}
	c.checkpoints.localLinks = on
	return nil
}

// checkCheckpoints refuses an interval that could do nothing.
func (c *config) checkCheckpoints() error {
	if c.checkpoints.interval > 0 && c.objects.uri == "" {
		return usagef("checkpoint-interval %s needs a place for checkpoints: give --object-store too, or leave the interval out", c.checkpoints.interval)
	}
	return nil
}

func (c *checkpoints) apply(o *cluster.Options) {
	o.CheckpointInterval, o.CheckpointRetain, o.CheckpointTimeout = c.interval, c.retain, c.timeout
	o.CheckpointLocalLinks = c.localLinks
	o.CheckpointChangelog, o.ChangelogMaterializeBytes = c.changelog, c.materializeBytes
}
