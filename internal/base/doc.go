// Package base holds the identifiers and the errors that every other package
// of Keelstate shares. It knows nothing but the standard library.
//
// Invariants:
//
//	BA1  Every sentinel error of the product is defined here, once. Other
//	     packages wrap these with %w or carry them in the structs below; they
//	     never declare a second value for the same condition.
//	BA2  Every error that can reach a client maps to exactly one Reason, and
//	     every Reason documents one Outcome: not applied, applied or unknown.
//	     An error that nothing here recognises has Outcome unknown.
package base
