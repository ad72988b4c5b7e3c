package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/check"
)

// Magic and Version are in run.json's first members.
const (
	Magic   = "keelstate-jepsen-run"
	Version = 1
)

// Limits of run.json.
const (
	// MaxRunBytes bounds the file.
	MaxRunBytes = 64 << 20
	// MaxEpisodes bounds the episodes of a run.
	MaxEpisodes = 100_000
)

// The files of a folder.
const (
	RunFile      = "run.json"
	TimelineFile = "timeline.jsonl"
	MetricsFile  = "metrics.jsonl"
	PageFile     = "report.html"
	EpisodesDir  = "episodes"
	NodesDir     = "nodes"
)

// Looked are the results of an episode that no checker of histories makes: what
// only the run could see. Every episode has them.
var Looked = []string{"hashes", "liveness", "final reads", "deaths", "logs"}

// Looked are those that each episode of this run has: by its options there are more.
func (r *Run) Looked() []string {
	looked := slices.Clone(Looked)
	if r.Options["checkpoints"] == "true" {
		looked = append(looked, "checkpoints", "without the store", "restore")
	}
	if r.Options["rollback"] == "true" {
		looked = append(looked, "rollback")
	}
	return looked
}

// Run is what was run, and what came of it.
type Run struct {
	Seed uint64 `json:"seed"`
	// Started is the wall clock at the run's zero, for people; all other times are
	// nanoseconds since then on a monotonic clock.
	Started string `json:"started"`
	// Repeat is the command that does the same again.
	Repeat string `json:"repeat"`
	// Product says what was tested: version, revision, Go, as keelctl tells it.
	Product map[string]string `json:"product,omitempty"`
	// Options are the arguments with their defaults filled in.
	Options map[string]string `json:"options,omitempty"`
	Nodes   int               `json:"nodes"`
	Shards  int               `json:"shards"`
	Net     string            `json:"net"`
	Disk    string            `json:"disk"`
	// Victims are the nodes whose disks may have been damaged.
	Victims []string `json:"victims,omitempty"`
	// Missing lists the faults that could not be injected here, and why.
	Missing  []string  `json:"missing,omitempty"`
	Episodes []Episode `json:"episodes,omitempty"`
	// ElapsedNs is how long the run took.
	ElapsedNs int64 `json:"elapsed_ns"`
	// Done says that the run came to its end: its time was over, or it failed.
	Done    bool          `json:"done"`
	Verdict check.Verdict `json:"verdict"`
	// Text says why the verdict is not a pass.
	Text string `json:"text,omitempty"`
}

// Episode is a stretch of faults, the healing after it, and the verdict.
type Episode struct {
	Number int    `json:"number"`
	Seed   uint64 `json:"seed"`
	Style  string `json:"style"`
	// History is the file, relative to the folder.
	History string `json:"history"`
	// BeginNs to HealedNs is the time with faults; EndNs is when all was judged.
	BeginNs  int64 `json:"begin_ns"`
	HealedNs int64 `json:"healed_ns"`
	EndNs    int64 `json:"end_ns"`
	// Faults counts the injections by kind; Skipped those that were not possible
	// at their time, or that nothing met.
	Faults  map[string]int `json:"faults,omitempty"`
	Skipped int            `json:"skipped"`
	// OK, Failed and Unknown count the operations by outcome.
	OK      int            `json:"ok"`
	Failed  int            `json:"failed"`
	Unknown int            `json:"unknown"`
	Results []check.Result `json:"results"`
	Verdict check.Verdict  `json:"verdict"`
}

// Operations is how many operations an episode had.
func (e *Episode) Operations() int { return e.OK + e.Failed + e.Unknown }

// Judge sets an episode's verdict from its results.
func (e *Episode) Judge() {
	var all []check.Verdict
	for _, r := range e.Results {
		all = append(all, r.Verdict)
	}
	e.Verdict = check.Combine(all...)
}

// Judge sets the run's verdict from its episodes, and Text from the first that
// has it; where none has, Text stays as the harness set it.
func (r *Run) Judge() {
	var all []check.Verdict
	for i := range r.Episodes {
		all = append(all, r.Episodes[i].Verdict)
	}
	r.Verdict = check.Combine(all...)
	if !r.Done && r.Verdict == check.Pass {
		r.Verdict = check.Unknown
	}
	if r.Verdict == check.Pass {
		r.Text = ""
		return
	}
	for i := range r.Episodes {
		e := &r.Episodes[i]
		for _, res := range e.Results {
			if e.Verdict == r.Verdict && res.Verdict == r.Verdict {
				r.Text = fmt.Sprintf("episode %d: %s: %s", e.Number, res.Name, res.Text)
				return
			}
		}
	}
	if r.Text == "" {
		r.Text = "the run did not come to its end"
	}
}

// Workloads are the names of those that the run was asked for.
func (r *Run) Workloads() []string {
	if r.Options["workloads"] == "" {
		return nil
	}
	return strings.Split(r.Options["workloads"], ",")
}

// Totals are sums over episodes.
type Totals struct {
	Episodes, Operations, OK, Failed, Unknown, Injections, Skipped int
	Faults                                                         map[string]int
}

// Totals sums the episodes up.
func (r *Run) Totals() Totals {
	t := Totals{Episodes: len(r.Episodes), Faults: map[string]int{}}
	for i := range r.Episodes {
		e := &r.Episodes[i]
		t.OK, t.Failed, t.Unknown, t.Skipped = t.OK+e.OK, t.Failed+e.Failed, t.Unknown+e.Unknown, t.Skipped+e.Skipped
		for kind, n := range e.Faults {
			t.Faults[kind] += n
			t.Injections += n
		}
	}
	t.Operations = t.OK + t.Failed + t.Unknown
	return t
}

// FaultText lists the injections by kind in one line.
func (t Totals) FaultText() string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(t.Faults)) {
		parts = append(parts, fmt.Sprintf("%s %d", kind, t.Faults[kind]))
	}
	return strings.Join(parts, ", ")
}

// LedgerRow is the run as a row of the table of jepsen/LEDGER.md.
func (r *Run) LedgerRow() string {
	t := r.Totals()
	commit := r.Product["revision"]
	if commit == "" {
		commit = r.Product["version"]
	}
	return fmt.Sprintf("| %.12s | %d | %.1f | %d | %d: %s | %d | %s |", commit, r.Seed, time.Duration(r.ElapsedNs).Minutes(), t.Episodes,
		t.Injections, t.FaultText(), t.Operations, r.Verdict)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// document is run.json: the checksum is of the run's JSON without white space.
type document struct {
	Format  string          `json:"format"`
	Version int64           `json:"version"`
	CRC     string          `json:"crc"`
	Run     json.RawMessage `json:"run"`
}

// Encode is the content of run.json.
func (r *Run) Encode() ([]byte, error) {
	inner, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encoding a run: %w", err)
	}
	b, err := json.MarshalIndent(document{Magic, Version, checksum(inner), inner}, "", " ")
	if err != nil {
		return nil, fmt.Errorf("encoding a run: %w", err)
	}
	if len(b) >= MaxRunBytes {
		return nil, fmt.Errorf("encoding a run of %d bytes: %w", len(b), base.ErrTooLarge)
	}
	return append(b, '\n'), nil
}

func checksum(b []byte) string { return fmt.Sprintf("%08x", crc32.Checksum(b, castagnoli)) }

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), base.ErrCorrupt)
}

// Decode reads the content of run.json (JR4).
func Decode(b []byte) (*Run, error) {
	if len(b) > MaxRunBytes {
		return nil, fmt.Errorf("reading a run of %d bytes: %w", len(b), base.ErrTooLarge)
	}
	var d document
	if err := json.Unmarshal(b, &d); err != nil || d.Format != Magic {
		return nil, fmt.Errorf("reading a run: %w", corrupt("this is not one"))
	}
	if d.Version != Version {
		return nil, fmt.Errorf("reading a run of version %d: %w", d.Version, base.ErrFormatVersion)
	}
	var inner bytes.Buffer
	if err := json.Compact(&inner, d.Run); err != nil || checksum(inner.Bytes()) != d.CRC {
		return nil, fmt.Errorf("reading a run: %w", corrupt("the checksum is wrong"))
	}
	var r Run
	if err := json.Unmarshal(inner.Bytes(), &r); err != nil {
		return nil, fmt.Errorf("reading a run: %w", corrupt("%v", err))
	}
	if len(r.Episodes) > MaxEpisodes {
		return nil, fmt.Errorf("reading a run: %w", corrupt("it has %d episodes", len(r.Episodes)))
	}
	for i := range r.Episodes {
		// A file outside the folder is never opened.
		if h := r.Episodes[i].History; h != "" && !filepath.IsLocal(h) {
			return nil, fmt.Errorf("reading a run: %w", corrupt("the history %q is not in the folder", h))
		}
	}
	return &r, nil
}

// Save replaces run.json in a folder (JR1).
func (r *Run) Save(dir string) error {
	b, err := r.Encode()
	if err != nil {
		return err
	}
	return replace(filepath.Join(dir, RunFile), b)
}

// replace writes a file under another name, syncs it and renames it.
func replace(path string, b []byte) error {
	next := path + ".next"
	f, err := os.Create(next)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// LoadRun reads run.json of a folder; base.ErrNotFound if there is none.
func LoadRun(dir string) (*Run, error) {
	f, err := os.Open(filepath.Join(dir, RunFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s has no %s: %w", dir, RunFile, base.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, MaxRunBytes+1))
	if err != nil {
		return nil, err
	}
	r, err := Decode(b)
	if err == nil && !r.Done && r.Text == "" { // the harness was killed
		r.Judge()
	}
	return r, err
}
