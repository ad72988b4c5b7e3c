package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/internal/cliout"
)

const (
	operationColumns   = "id operation phase done error startedMs updatedMs stuck fetchBytes fetchedBytes fetches"
	checkpointColumns  = "number phase automatic savepoint created seconds fullBytes newBytes objects error uri files newFiles requests syncMs asyncMs createdMs endedMs incarnation keyGroups mode"
	participantColumns = "participant alive registered checkpoint bytes restored session registeredMs restoredCluster"
	writtenColumns     = "shard sequence token"
	valueColumns       = "value null version token"
	keyColumns         = "key namespace group shard"
	stateColumns       = "id keyspace name stateKind keyType userKeyType valueType function codecVersion"
)

// columns are the keys of what each command prints, by its path without the
// root. They are known before the command does anything, so that a wrong
// --columns is refused before a write and not after it (KX5).
var columns = map[string]string{
	"cluster init":        "cluster operation phase problem resumed stuck checkpoint from number created keyGroups engine incarnation objects bytes fetchBytes fetchedBytes fetches shards",
	"cluster status":      "cluster healthy problems revision incarnation keyGroups shards nodes unreachable",
	"node list":           "id state alive grpc raft http zone",
	"shard list":          "id lo hi leader replicas epoch birth",
	"shard hash":          "shard node index content ops clockMs agree error",
	"shard scrub":         "shard node replica bytes seconds findings error",
	"shard transfer":      "shard leader",
	"shard snapshot":      "shard index bytes",
	"shard compact":       "shard bytesBefore bytesAfter",
	"savepoint create":    checkpointColumns + " shards participants",
	"checkpoint create":   checkpointColumns + " shards participants",
	"checkpoint list":     checkpointColumns,
	"checkpoint show":     checkpointColumns + " shards participants",
	"checkpoint verify":   "number sound objects bytes files findings",
	"checkpoint delete":   "number",
	"checkpoint rollback": "number operation phase incarnation error bytes fetchBytes fetchedBytes shards lacked",
	"participant list":    participantColumns,
	"participant remove":  participantColumns,
	"operation list":      operationColumns,
	"operation show":      operationColumns,
	"operation watch":     operationColumns,
	"state declare":       stateColumns + " created",
	"state list":          stateColumns,
	"state drop":          "keyspace name id stateKind shards keys more",
	"value get":           valueColumns,
	"value set":           writtenColumns,
	"value cas":           writtenColumns,
	"value clear":         writtenColumns,
	"list get":            "value",
	"list add":            writtenColumns,
	"list add-all":        writtenColumns,
	"list update":         writtenColumns,
	"list clear":          writtenColumns,
	"map get":             valueColumns,
	"map put":             writtenColumns,
	"map put-all":         writtenColumns,
	"map remove":          writtenColumns,
	"map contains":        "contains",
	"map entries":         "userKey value null version",
	"map keys":            "userKey",
	"map values":          "value null version",
	"map is-empty":        "isEmpty",
	"map clear":           writtenColumns,
	"reducing get":        valueColumns,
	"reducing add":        writtenColumns,
	"reducing clear":      writtenColumns,
	"aggregating get":     valueColumns,
	"aggregating add":     writtenColumns,
	"aggregating clear":   writtenColumns,
	"merge-namespaces":    writtenColumns,
	"keys":                keyColumns,
	"scan":                keyColumns + " userKey value null version",
	"version":             "version revision go platform",
	"config explain":      "setting value origin",
}

// checkColumns refuses columns that the command never prints.
func (a *app) checkColumns(cmd *cobra.Command) error {
	path := strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
	list, prints := columns[path]
	if !prints {
		return nil // a group or a generated command: prose
	}
	return cliout.CheckColumns(a.columns, strings.Fields(list))
}
