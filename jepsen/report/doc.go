// Package report is what a run of the chaos harness leaves behind: a folder with
// run.json (what was run and the verdicts), timeline.jsonl (faults, deaths,
// phases), metrics.jsonl (samples of the nodes' metrics), the histories of the
// episodes, the nodes' logs, and report.html, made from the others
// (docs/formats/jepsen-run.md).
//
// It must not know: the product, hosts, faults and their schedules, how an
// operation is judged. It takes verdicts as package check gives them.
//
// Concurrency: a Writer of lines may be used by any number of goroutines.
// Everything else is plain data or done by one.
//
// Invariants:
//
//	JR1  run.json is replaced as a whole, so that a reader finds the old or the
//	     new one; it is written at the start of a run and after every episode.
//	JR2  What is in the folder is enough to judge and to draw the run again.
//	JR3  The page needs no network and no script: plots are inline SVG.
//	JR4  A reader bounds files, lines and counts before it allocates; a version
//	     that it does not know is base.ErrFormatVersion, all else that is wrong
//	     base.ErrCorrupt. Lines that end early are a prefix.
//	JR5  A run that did not pass says with which command it is repeated.
package report
