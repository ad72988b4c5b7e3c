//go:build linux

package faultfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// takeIn makes a tree of plain files the contents of an empty disk. All of it
// counts as synced.
func (d *disk) takeIn(tree string) error {
	if _, err := os.Lstat(tree); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	dirs := map[string]*node{tree: d.mu.root}
	seen := make(map[uint64]*node) // by the inode number of the tree: hard links
	err := filepath.WalkDir(tree, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == tree {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		sys, ok := info.Sys().(*syscall.Stat_t)
		if !ok || !info.IsDir() && !info.Mode().IsRegular() {
			return fmt.Errorf("%s is neither a file nor a directory", path)
		}
		n := seen[sys.Ino]
		if n == nil {
			n = d.newNode(info.IsDir(), uint32(info.Mode().Perm()))
			n.mtime = info.ModTime()
			if n.isDir {
				dirs[path] = n
			} else if err := d.adopt(n, path, info.Size()); err != nil {
				return err
			}
			seen[sys.Ino] = n
		}
		namePart{dir: dirs[filepath.Dir(path)], name: e.Name()}.set(n)
		return nil
	})
	if err != nil {
		return err
	}
	return os.RemoveAll(tree)
}

// adopt makes a plain file the object of a node.
func (d *disk) adopt(n *node, path string, size int64) error {
	if err := os.Rename(path, d.object(n)); err != nil {
		return err
	}
	file, err := openObject(d.object(n), false)
	if err != nil {
		return err
	}
	n.file, n.size = file, size
	n.alloc.add(0, (size+blockBytes-1)/blockBytes*blockBytes)
	d.used.Add(n.alloc.total())
	return nil
}

// layOut makes plain files of the disk's contents. The objects stay.
func (d *disk) layOut(tree string) error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := os.RemoveAll(tree); err != nil {
		return err
	}
	return d.layOutDir(d.mu.root, tree)
}

func (d *disk) layOutDir(dir *node, to string) error {
	if err := os.MkdirAll(to, os.FileMode(dir.mode&0o777|0o700)); err != nil {
		return err
	}
	for name, n := range dir.entries {
		path := filepath.Join(to, name)
		if n.isDir {
			if err := d.layOutDir(n, path); err != nil {
				return err
			}
			continue
		}
		n.mu.RLock()
		err := errors.Join(os.Link(d.object(n), path), os.Chmod(path, os.FileMode(n.mode&0o777)), os.Chtimes(path, n.mtime, n.mtime))
		n.mu.RUnlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// closeObjects ends the use of the disk and removes the objects: what is still
// wanted has been laid out.
func (d *disk) closeObjects() {
	d.gate.Lock()
	defer d.gate.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, n := range d.files() {
		_ = n.file.Close()
		n.file = nil
	}
	_ = os.RemoveAll(d.objects)
}
