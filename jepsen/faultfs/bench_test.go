//go:build linux

package faultfs

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// BenchmarkSync compares a small write with fdatasync through the mount and on
// the file system behind it.
func BenchmarkSync(b *testing.B) {
	if err := Supported(); err != nil {
		b.Fatal(err)
	}
	dir := b.TempDir()
	fs, err := Mount(Options{Mountpoint: filepath.Join(dir, "mnt"), Backing: filepath.Join(dir, "backing")})
	if err != nil {
		b.Fatal(err)
	}
	defer fs.Close()
	for name, dir := range map[string]string{"mount": fs.Mountpoint(), "direct": dir} {
		b.Run(name, func(b *testing.B) {
			f, err := os.Create(filepath.Join(dir, "f"))
			if err != nil {
				b.Fatal(err)
			}
			defer f.Close()
			for b.Loop() {
				_, err := f.Write(make([]byte, 500))
				if err == nil {
					err = unix.Fdatasync(int(f.Fd()))
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
