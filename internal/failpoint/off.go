//go:build !failpoints

package failpoint

// Enabled says whether this build has failpoints.
const Enabled = false

// Hit marks a place that can crash, panic, be delayed or stall.
func Hit(string) {}

// Err marks a place that can fail as well.
func Err(string) error { return nil }

// Int is v, or what the point is armed with.
func Int(_ string, v int64) int64 { return v }
