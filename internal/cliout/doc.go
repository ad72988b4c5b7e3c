// Package cliout prints what the commands say, so that all do it alike: tables for
// people, and JSON, YAML or lines of JSON with keys in order for programs.
//
// It must not know: what is printed, command lines, the product.
//
// Concurrency: a Printer is a value without state; a List has one user.
//
// Invariants:
//
//	CO1  Every JSON object begins with apiVersion and kind; its keys keep their
//	     order, in YAML too. An empty list is [], never null.
//	CO2  Under jsonl each item is printed when it is added.
//	CO3  A column that there is not is refused, never left out.
package cliout
