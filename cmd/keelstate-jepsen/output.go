package main

import (
	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/internal/cliout"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/report"
)

// record is an item of the output with its keys in order.
type record = cliout.Record

// checkColumns refuses columns that the command never prints: before it runs, for
// an hour perhaps, and not after it.
func (a *app) checkColumns(cmd *cobra.Command) error {
	switch cmd.Name() {
	case "run", "report":
		return cliout.CheckColumns(a.columns, runRecord("", &report.Run{}).Names())
	case "check":
		return cliout.CheckColumns(a.columns, resultRecord(&report.Episode{}, check.Result{}).Names())
	}
	return nil
}

// printer prints as the global flags say.
func (a *app) printer() cliout.Printer {
	return cliout.Printer{Out: a.stdout, Format: a.output, Columns: a.columns}
}

func (a *app) printOne(kind string, r record) error { return a.printer().One(kind, r) }

// printList prints items.
func (a *app) printList(kind string, items []record) error {
	list := a.printer().List(kind)
	for _, r := range items {
		if err := list.Add(r); err != nil {
			return err
		}
	}
	return list.End()
}
