//go:build linux

package faultfs

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// modelNode is a file or directory in the simplest terms: what it is now and
// what it was when it was last synced, as whole copies.
type modelNode struct {
	now, synced        []byte
	names, syncedNames map[string]*modelNode // of a directory
}

func newModelDir() *modelNode {
	return &modelNode{names: map[string]*modelNode{}, syncedNames: map[string]*modelNode{}}
}

// model is a tree of depth two: the root with files and the directories d0, d1.
type model struct {
	root  *modelNode
	dirs  map[string]*modelNode // by path, "" is the root
	moved map[string]bool       // directories with a pending move between them
}

// machine runs the disk and the model side by side.
type machine struct {
	t *rapid.T
	d *disk
	m *model
}

var (
	modelDirs  = []string{"", "d0", "d1"}
	modelNames = []string{"a", "b", "c"}
)

func newMachine(t *rapid.T, objects string) *machine {
	d, err := newDisk(objects, 1<<40, 1<<40)
	if err != nil {
		t.Fatal(err)
	}
	x := &machine{t: t, d: d, m: &model{root: newModelDir(), dirs: map[string]*modelNode{}, moved: map[string]bool{}}}
	x.m.dirs[""] = x.m.root
	for _, dir := range modelDirs[1:] {
		if _, err := d.create(x.dir(""), dir, true, 0o755); err != nil {
			t.Fatal(err)
		}
		n := newModelDir()
		x.m.dirs[dir] = n
		x.m.root.names[dir], x.m.root.syncedNames[dir] = n, n
	}
	d.syncDir(x.dir(""))
	for i, dir := range modelDirs {
		n, err := d.create(x.dir(dir), "a", false, 0o644)
		if err == nil {
			err = d.write(n, bytes.Repeat([]byte{byte(i + 1)}, 1800), 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		d.syncFile(n)
		d.syncDir(x.dir(dir))
		m := &modelNode{now: contents(t, n), synced: contents(t, n)}
		x.m.dirs[dir].names["a"], x.m.dirs[dir].syncedNames["a"] = m, m
	}
	return x
}

func (x *machine) dir(path string) *node {
	n, err := x.d.find(path)
	if err != nil {
		x.t.Fatal(err)
	}
	return n
}

// pick draws a directory and a name in it.
func (x *machine) pick(what string) (dir, name string) {
	return rapid.SampledFrom(modelDirs).Draw(x.t, what+" dir"), rapid.SampledFrom(modelNames).Draw(x.t, what+" name")
}

// file draws a file that exists.
func (x *machine) file(t *rapid.T) (*node, *modelNode) {
	dir, name := x.pick("file")
	m := x.m.dirs[dir].names[name]
	if m == nil {
		t.Skip("no such file")
	}
	n, err := x.d.find(dir + "/" + name)
	if err != nil {
		x.t.Fatal(err)
	}
	return n, m
}

func (x *machine) create(*rapid.T) {
	dir, name := x.pick("create")
	_, err := x.d.create(x.dir(dir), name, false, 0o644)
	if exists := x.m.dirs[dir].names[name] != nil; exists != (err != nil) {
		x.t.Fatalf("creating %s/%s: %v", dir, name, err)
	} else if !exists {
		x.m.dirs[dir].names[name] = &modelNode{}
	}
}

func (x *machine) write(t *rapid.T) {
	n, m := x.file(t)
	off := rapid.Int64Range(0, 2000).Draw(x.t, "offset")
	data := bytes.Repeat([]byte{byte(rapid.IntRange(1, 255).Draw(x.t, "byte"))}, rapid.IntRange(1, 1500).Draw(x.t, "length"))
	if err := x.d.write(n, data, off); err != nil {
		x.t.Fatal(err)
	}
	now := append(slices.Clone(m.now), make([]byte, max(0, int(off)+len(data)-len(m.now)))...)
	copy(now[off:], data)
	m.now = now
}

func (x *machine) truncate(t *rapid.T) {
	n, m := x.file(t)
	size := rapid.IntRange(0, 2500).Draw(x.t, "size")
	if err := x.d.truncate(n, int64(size)); err != nil {
		x.t.Fatal(err)
	}
	now := make([]byte, size)
	copy(now, m.now)
	m.now = now
}

func (x *machine) punch(t *rapid.T) {
	n, m := x.file(t)
	off := rapid.IntRange(0, 2500).Draw(x.t, "offset")
	length := rapid.IntRange(1, 1500).Draw(x.t, "length")
	if err := x.d.allocate(n, int64(off), int64(length), 0x03); err != nil {
		x.t.Fatal(err)
	}
	now := slices.Clone(m.now)
	for i := off; i < min(off+length, len(now)); i++ {
		now[i] = 0
	}
	m.now = now
}

func (x *machine) link(t *rapid.T) {
	n, m := x.file(t)
	dir, name := x.pick("link")
	err := x.d.link(n, x.dir(dir), name)
	if exists := x.m.dirs[dir].names[name] != nil; exists != (err != nil) {
		x.t.Fatalf("linking: %v", err)
	} else if !exists {
		x.m.dirs[dir].names[name] = m
	}
}

func (x *machine) remove(*rapid.T) {
	dir, name := x.pick("remove")
	err := x.d.remove(x.dir(dir), name, false)
	if exists := x.m.dirs[dir].names[name] != nil; exists != (err == nil) {
		x.t.Fatalf("removing: %v", err)
	}
	delete(x.m.dirs[dir].names, name)
}

func (x *machine) rename(*rapid.T) {
	from, oldName := x.pick("from")
	to, newName := x.pick("to")
	m := x.m.dirs[from].names[oldName]
	err := x.d.rename(x.dir(from), oldName, x.dir(to), newName, false)
	if (m != nil) != (err == nil) {
		x.t.Fatalf("renaming: %v", err)
	}
	if m == nil || x.m.dirs[to].names[newName] == m {
		return // two names of one file: nothing happens
	}
	delete(x.m.dirs[from].names, oldName)
	x.m.dirs[to].names[newName] = m
	if from != to {
		x.m.moved[min(from, to)+"|"+max(from, to)] = true
	}
}

func (x *machine) syncFile(t *rapid.T) {
	n, m := x.file(t)
	x.d.syncFile(n)
	m.synced = m.now
}

// syncDir makes a directory durable, and those that it shares a move with (FF3).
func (x *machine) syncDir(*rapid.T) {
	dir := rapid.SampledFrom(modelDirs).Draw(x.t, "sync dir")
	x.d.syncDir(x.dir(dir))
	reach := map[string]bool{dir: true}
	for range modelDirs {
		for pair := range x.m.moved {
			a, b, _ := strings.Cut(pair, "|")
			if reach[a] || reach[b] {
				reach[a], reach[b] = true, true
			}
		}
	}
	for d := range reach {
		x.m.dirs[d].syncedNames = maps.Clone(x.m.dirs[d].names)
	}
	maps.DeleteFunc(x.m.moved, func(pair string, _ bool) bool {
		a, _, _ := strings.Cut(pair, "|")
		return reach[a]
	})
}

// crash rolls both back in mode DropAll (FF1, FF2).
func (x *machine) crash(*rapid.T) {
	if _, err := x.d.crash(DropAll, 1, func() {}); err != nil {
		x.t.Fatal(err)
	}
	for _, m := range x.m.dirs {
		m.names = maps.Clone(m.syncedNames)
	}
	for _, dir := range x.m.dirs {
		for _, m := range dir.names {
			m.now = m.synced
		}
	}
	clear(x.m.moved)
}

// check compares everything that can be seen.
func (x *machine) check(*rapid.T) {
	var used int64
	counted := map[*node]bool{}
	for path, m := range x.m.dirs {
		dir := x.dir(path)
		if len(dir.entries) != len(m.names) {
			x.t.Fatalf("%q has %d entries, want %d", path, len(dir.entries), len(m.names))
		}
		for name, want := range m.names {
			n := dir.entries[name]
			if n == nil {
				x.t.Fatalf("%s/%s is missing", path, name)
			}
			if n.isDir {
				continue
			}
			got := contents(x.t, n)
			if !bytes.Equal(got, want.now) {
				x.t.Fatalf("%s/%s has %d bytes %x, want %d bytes %x", path, name, len(got), got, len(want.now), want.now)
			}
			if !counted[n] {
				counted[n] = true
				used += n.alloc.total()
			}
		}
	}
	if got := x.d.used.Load(); got != used {
		x.t.Fatalf("%d bytes in use, want %d", got, used)
	}
}

func contents(t *rapid.T, n *node) []byte {
	b, err := io.ReadAll(io.NewSectionReader(n.file, 0, 1<<40))
	if err != nil || int64(len(b)) != n.size {
		t.Fatalf("reading object %d of %d bytes: %d bytes, %v", n.ino, n.size, len(b), err)
	}
	return b
}

// TestModel compares the disk with the model through random changes, syncs and
// crashes.
func TestModel(t *testing.T) {
	base := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		objects, err := os.MkdirTemp(base, "objects")
		if err != nil {
			t.Fatal(err)
		}
		x := newMachine(t, objects)
		defer x.d.closeObjects()
		t.Repeat(map[string]func(*rapid.T){
			"create": x.create, "write": x.write, "truncate": x.truncate, "punch": x.punch, "link": x.link, "remove": x.remove,
			"rename": x.rename, "sync file": x.syncFile, "sync dir": x.syncDir, "crash": x.crash, "": x.check,
		})
	})
}

// TestModelOfParts: in the other modes a crash leaves every synced byte that was
// not overwritten, every synced name that was not changed, nothing that never
// was, and the same for the same seed (FF1, FF2).
func TestModelOfParts(t *testing.T) {
	base := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		mode := rapid.SampledFrom([]CrashMode{KeepPrefix, KeepSubset}).Draw(t, "mode")
		seed := rapid.Uint64().Draw(t, "seed")
		var prints []string
		steps := rapid.SliceOfN(rapid.IntRange(0, 1<<30), 1, 40).Draw(t, "steps")
		for range 2 {
			objects, err := os.MkdirTemp(base, "objects")
			if err != nil {
				t.Fatal(err)
			}
			d, err := newDisk(objects, 1<<40, 1<<40)
			if err != nil {
				t.Fatal(err)
			}
			allowed := play(t, d, steps)
			if _, err := d.crash(mode, seed, func() {}); err != nil {
				t.Fatal(err)
			}
			prints = append(prints, judge(t, d, allowed))
			d.closeObjects()
		}
		if prints[0] != prints[1] {
			t.Fatalf("one seed, two outcomes:\n%s\n%s", prints[0], prints[1])
		}
	})
}

// permitted is what each byte of each file may be, by inode number, and which
// files may be at each name (0: none).
type permitted struct {
	bytes map[uint64][]map[byte]bool
	names map[string]map[uint64]bool
}

// play makes a fixed base, syncs it, and changes it as the steps say.
func play(t *rapid.T, d *disk, steps []int) *permitted {
	p := &permitted{map[uint64][]map[byte]bool{}, map[string]map[uint64]bool{}}
	fail := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3 {
		n, err := d.create(d.mu.root, fmt.Sprint("f", i), false, 0o644)
		fail(err)
		fail(d.write(n, bytes.Repeat([]byte{byte(i + 1)}, 3000), 0))
		p.note(t, n)
	}
	d.syncAll()
	p.noteNames(d)
	for i, s := range steps {
		from, to := fmt.Sprint("f", s%5), fmt.Sprint("f", s/5%5)
		n := d.mu.root.entries[from]
		if n == nil {
			_, err := d.create(d.mu.root, from, false, 0o644)
			fail(err)
			p.note(t, d.mu.root.entries[from])
		} else {
			switch s / 25 % 4 {
			case 0, 1:
				fail(d.write(n, bytes.Repeat([]byte{byte(i + 10)}, s/100%2000+1), int64(s/200000%3000)))
				p.note(t, n)
			case 2:
				fail(d.rename(d.mu.root, from, d.mu.root, to, false))
			case 3:
				fail(d.remove(d.mu.root, from, false))
			}
		}
		p.noteNames(d)
	}
	return p
}

// note permits what a file is now.
func (p *permitted) note(t *rapid.T, n *node) {
	b := contents(t, n)
	for len(p.bytes[n.ino]) < len(b) {
		p.bytes[n.ino] = append(p.bytes[n.ino], map[byte]bool{})
	}
	for i, c := range b {
		p.bytes[n.ino][i][c] = true
	}
	// The end of a torn write may be missing, and zeros stand where an earlier
	// write was lost.
	if n.ino > 4 {
		for i := range b {
			p.bytes[n.ino][i][0] = true
		}
	} else {
		for i := 3000; i < len(b); i++ {
			p.bytes[n.ino][i][0] = true
		}
	}
}

func (p *permitted) noteNames(d *disk) {
	for i := range 5 {
		name := fmt.Sprint("f", i)
		if p.names[name] == nil {
			p.names[name] = map[uint64]bool{}
		}
		var ino uint64
		if n := d.mu.root.entries[name]; n != nil {
			ino = n.ino
		}
		p.names[name][ino] = true
	}
}

// judge checks what a crash left, and returns it as text.
func judge(t *rapid.T, d *disk, p *permitted) string {
	var print strings.Builder
	for i := range 5 {
		name := fmt.Sprint("f", i)
		n := d.mu.root.entries[name]
		if n == nil {
			if !p.names[name][0] {
				t.Fatalf("%s was always there, and is gone", name)
			}
			continue
		}
		if !p.names[name][n.ino] {
			t.Fatalf("%s is object %d, which it never was", name, n.ino)
		}
		b := contents(t, n)
		if n.ino <= 4 && len(b) < 3000 {
			t.Fatalf("%s lost synced bytes: %d are left", name, len(b))
		}
		for i, c := range b {
			if i >= len(p.bytes[n.ino]) || !p.bytes[n.ino][i][c] {
				t.Fatalf("%s has %d at %d, which it never had", name, c, i)
			}
		}
		fmt.Fprintf(&print, "%s %d %x\n", name, n.ino, b)
	}
	return print.String()
}

// TestSpans checks the arithmetic of space against a bitmap.
func TestSpans(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s spans
		var bits [64]bool
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			lo := rapid.IntRange(0, 63).Draw(t, "lo")
			hi := rapid.IntRange(lo, 64).Draw(t, "hi")
			add := rapid.Bool().Draw(t, "add")
			var want int64
			for i := lo; i < hi; i++ {
				if bits[i] != add {
					want++
				}
			}
			if add {
				if got := s.missing(int64(lo), int64(hi)); got != want {
					t.Fatalf("missing %d, want %d", got, want)
				}
			}
			var got int64
			if add {
				got = s.add(int64(lo), int64(hi))
			} else {
				got = s.cut(int64(lo), int64(hi))
			}
			if got != want {
				t.Fatalf("changed %d, want %d", got, want)
			}
			for i := lo; i < hi; i++ {
				bits[i] = add
			}
			var total int64
			for i, bit := range bits {
				if bit {
					total++
				}
				if in := slices.ContainsFunc(s, func(r span) bool { return r.lo <= int64(i) && int64(i) < r.hi }); in != bit {
					t.Fatalf("%d is in %v: %v", i, s, in)
				}
			}
			if s.total() != total {
				t.Fatalf("total %d, want %d", s.total(), total)
			}
		}
	})
}

// TestModelOfDirectories: whole directories move, and come back.
func TestModelOfDirectories(t *testing.T) {
	for seed := range uint64(200) {
		for _, mode := range []CrashMode{DropAll, KeepPrefix, KeepSubset} {
			d, err := newDisk(t.TempDir(), 1<<40, 1<<40)
			must(t, err)
			root := d.mu.root
			a, err := d.create(root, "a", true, 0o755)
			must(t, err)
			b, err := d.create(root, "b", true, 0o755)
			must(t, err)
			f, err := d.create(a, "f", false, 0o644)
			must(t, err)
			must(t, d.write(f, []byte("data"), 0))
			d.syncAll()
			must(t, d.rename(root, "a", b, "a", false))
			must(t, d.rename(b, "a", root, "z", false))
			must(t, d.rename(root, "b", a, "b", false))
			must(t, d.rename(a, "f", b, "g", false))
			if err := d.rename(root, "z", b, "cycle", false); err == nil {
				t.Fatal("a directory moved into itself")
			}
			_, err = d.crash(mode, seed, func() {})
			must(t, err)
			found, dirs := 0, 0
			var walk func(*node)
			walk = func(n *node) {
				for _, c := range n.entries {
					if c.isDir {
						dirs++
						walk(c)
					} else if found++; c.ino != f.ino || c.size != 4 {
						t.Fatalf("another file: %d", c.ino)
					}
				}
			}
			walk(root)
			if found != 1 || dirs != 2 {
				t.Fatalf("seed %d, %s: %d files and %d directories", seed, mode, found, dirs)
			}
			if mode == DropAll && (root.entries["a"] != a || a.entries["f"] != f || root.entries["b"] != b) {
				t.Fatal("not what was synced")
			}
			d.closeObjects()
		}
	}
}
