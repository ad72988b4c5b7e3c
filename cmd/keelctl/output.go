package main

import "github.com/keelstate/keelstate/internal/cliout"

// record is an item of the output with its keys in order.
type (
	record = cliout.Record
	field  = cliout.Field
)

// printer prints as the global flags say.
func (a *app) printer() cliout.Printer {
	return cliout.Printer{Out: a.stdout, Format: a.output, Columns: a.columns}
}

func (a *app) printOne(kind string, r record) error { return a.printer().One(kind, r) }

// printDone prints what a command with an effect did. A failure to print it does
// not undo it (KX5).
func (a *app) printDone(kind string, r record) error {
	if err := a.printOne(kind, r); err != nil {
		return &unprinted{err}
	}
	return nil
}

// list begins a list; columns are shown when there is no item.
func (a *app) list(kind string, columns ...string) *cliout.List {
	return a.printer().List(kind, columns...)
}
