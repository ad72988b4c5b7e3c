//go:build linux

package faultfs

// Options of a mount.
type Options struct {
	// Mountpoint is made if it does not exist.
	Mountpoint string
	// Backing is the directory that the files are really in.
	Backing string
	// Capacity of the disk in bytes; default 64 GiB, whatever is behind it.
	Capacity int64
	// UnsyncedLimit bounds the memory for changes that were not synced, in bytes
	// (FF6); default 512 MiB.
	UnsyncedLimit int64
}

func (o *Options) ensureDefaults() {
	if o.Capacity <= 0 {
		o.Capacity = 64 << 30
	}
	if o.UnsyncedLimit <= 0 {
		o.UnsyncedLimit = 512 << 20
	}
}

// Stats says what a disk holds, in bytes, and counts what it did.
type Stats struct {
	Capacity int64 `json:"capacity"`
	Used     int64 `json:"used"`
	// Unsynced is the memory taken by changes that a crash would undo.
	Unsynced int64 `json:"unsynced"`
	// Rules are in force now.
	Rules int `json:"rules"`
	// Stalled calls wait now, for a stall or a delay.
	Stalled    int   `json:"stalled"`
	Syncs      int64 `json:"syncs"`
	Lies       int64 `json:"lies"`
	Writebacks int64 `json:"writebacks"`
	Crashes    int64 `json:"crashes"`
}
