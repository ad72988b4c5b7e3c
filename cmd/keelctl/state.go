package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	keel "github.com/keelstate/keelstate/client"
)

func (a *app) stateCommand() *cobra.Command {
	c := &cobra.Command{Use: "state", Short: "Declare, list and drop states", Example: "  keelctl state list"}
	c.AddCommand(a.stateDeclare(), a.stateList(), a.stateDrop())
	return c
}

func declarationRecord(d keel.Declaration) record {
	typ := func(t keel.Type) any {
		if !t.IsValid() {
			return nil
		}
		return t.String()
	}
	function := any(d.Function)
	if d.Function == "" {
		function = nil
	}
	return record{{Name: "id", Value: d.ID}, {Name: "keyspace", Value: d.Keyspace}, {Name: "name", Value: d.Name},
		{Name: "stateKind", Value: string(d.Kind)}, {Name: "keyType", Value: typ(d.KeyType)}, {Name: "userKeyType", Value: typ(d.UserKeyType)},
		{Name: "valueType", Value: typ(d.ValueType)}, {Name: "function", Value: function},
		{Name: "codecVersion", Value: d.CodecVersion, Wide: true}}
}

func (a *app) stateDeclare() *cobra.Command {
	var kind, keyType, userKeyType, valueType, function, ttl string
	c := &cobra.Command{
		Use: "declare KEYSPACE NAME --kind KIND", Short: "Declare a state; declaring an equal one again does nothing", Args: cobra.ExactArgs(2),
		Example: `  keelctl state declare flights last --kind value --key-type string --value-type json
  keelctl state declare flights routes --kind map --user-key-type string --value-type int64
  keelctl state declare flights max-delay --kind reducing --function max --value-type int64
  keelctl state declare flights mean-delay --kind aggregating --function mean --value-type int64`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("ttl") {
				return keel.NewError(keel.ErrUnsupported, keel.OutcomeNotApplied, "ttl", "time to live is not yet supported")
			}
			d := keel.Declaration{Keyspace: args[0], Name: args[1], Kind: keel.Kind(kind), Function: function}
			for _, t := range []struct {
				to         *keel.Type
				flag, text string
			}{{&d.KeyType, "key-type", keyType}, {&d.UserKeyType, "user-key-type", userKeyType}, {&d.ValueType, "value-type", valueType}} {
				if t.flag == "user-key-type" && d.Kind != keel.KindMap && !cmd.Flags().Changed(t.flag) {
					continue
				}
				var err error
				if *t.to, err = keel.ParseType(t.text); err != nil {
					return usage(fmt.Errorf("--%s: %w", t.flag, err))
				}
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			client, err := a.connect(ctx)
			if err != nil {
				return err
			}
			got, created, err := client.Declare(ctx, d)
			if err != nil {
				return err
			}
			return a.printDone("State", append(declarationRecord(got), field{Name: "created", Value: created}))
		},
	}
	f := c.Flags()
	f.StringVar(&kind, "kind", "", "value, list, map, reducing or aggregating")
	f.StringVar(&keyType, "key-type", "string", "string, int32, int64, bool, bytes or tuple(...); one per keyspace")
	f.StringVar(&userKeyType, "user-key-type", "string", "type of the user keys, maps only")
	f.StringVar(&valueType, "value-type", "string", "string, int32, int64, bool, bytes, float64 or json")
	f.StringVar(&function, "function", "", "function of a reducing or aggregating state, such as sum or quantiles(0.5,0.99)")
	f.StringVar(&ttl, "ttl", "", "time to live; not yet supported")
	return c
}

func (a *app) stateList() *cobra.Command {
	return &cobra.Command{
		Use: "list [KEYSPACE]", Short: "List the declared states", Args: cobra.MaximumNArgs(1),
		Example: "  keelctl state list\n  keelctl state list flights -o json", ValidArgsFunction: a.completeKeyspaces,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			client, err := a.connect(ctx)
			if err != nil {
				return err
			}
			states, err := client.States(ctx, strings.Join(args, ""))
			if err != nil {
				return err
			}
			out := a.list("State", "id", "keyspace", "name", "stateKind", "keyType", "valueType")
			for _, d := range states {
				if err := out.Add(declarationRecord(d)); err != nil {
					return err
				}
			}
			return out.End()
		},
	}
}

// version is set by the linker.
var version = "devel"

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version of this binary", Args: cobra.NoArgs, Example: "  keelctl version -o json",
		RunE: func(*cobra.Command, []string) error {
			revision := ""
			if info, ok := debug.ReadBuildInfo(); ok {
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" {
						revision = s.Value
					}
				}
			}
			return a.printOne("Version", record{{Name: "version", Value: version}, {Name: "revision", Value: revision},
				{Name: "go", Value: runtime.Version()}, {Name: "platform", Value: runtime.GOOS + "/" + runtime.GOARCH}})
		},
	}
}

func (a *app) configCommand() *cobra.Command {
	c := &cobra.Command{Use: "config", Short: "Inspect the configuration of keelctl", Example: "  keelctl config explain"}
	c.AddCommand(&cobra.Command{
		Use: "explain", Short: "Print each setting, its value and where it came from", Args: cobra.NoArgs,
		Example: "  keelctl config explain\n  KEELSTATE_ENDPOINTS=10.0.0.1:7401 keelctl config explain -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := a.list("Setting", "setting", "value", "origin")
			for _, s := range settings {
				value := cmd.Flags().Lookup(s.flag).Value.String()
				if err := out.Add(record{{Name: "setting", Value: s.name}, {Name: "value", Value: strings.Trim(value, "[]")},
					{Name: "origin", Value: a.origin(cmd, s)}}); err != nil {
					return err
				}
			}
			return out.End()
		},
	})
	return c
}
