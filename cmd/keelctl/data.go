package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	keel "github.com/keelstate/keelstate/client"
)

func group(use, short string, subs ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Example: subs[0].Example}
	c.AddCommand(subs...)
	return c
}

func (t *target) openValue(ctx context.Context) (*keel.Value[any], error) {
	v, err := keel.OpenValue(ctx, t.space, t.decl.Name, keel.Dynamic(t.decl.ValueType))
	if err == nil && t.inSpace {
		v = v.In(t.name)
	}
	return v, err
}

func (a *app) valueCommand() *cobra.Command {
	kinds := []keel.Kind{keel.KindValue}
	var ifAbsent bool
	var ifEqual string
	var ifVersion uint64
	return group("value", "Read and write Value states",
		a.dataCommand(verb{use: "get KEYSPACE NAME --key K", short: "Print the value; exit 3 if there is none", kinds: kinds,
			example: "  keelctl value get flights last --key ATL\n  keelctl value get flights last --key ATL --namespace \"\" -o json",
			run: func(ctx context.Context, t *target, _ []string) error {
				v, err := t.openValue(ctx)
				if err != nil {
					return err
				}
				it, err := v.Load(ctx, t.key)
				return printItem(t, it, err)
			}}),
		a.dataCommand(verb{use: "set KEYSPACE NAME VALUE --key K", short: "Set the value", kinds: kinds, min: 1, max: 1,
			example: "  keelctl value set flights last hello --key ATL\n  keelctl value set flights n --key ATL -- -5",
			run: func(ctx context.Context, t *target, args []string) error {
				v, err := t.openValue(ctx)
				if err != nil {
					return err
				}
				x, err := t.parse("VALUE", t.decl.ValueType, args[0])
				if err != nil {
					return err
				}
				return t.written(v.Set(ctx, t.key, x))
			}}),
		a.dataCommand(verb{use: "cas KEYSPACE NAME VALUE --key K", short: "Set the value if a condition holds; exit 4 if it does not", kinds: kinds, min: 1, max: 1,
			example: "  keelctl value cas flights last new --key ATL --if-absent\n  keelctl value cas flights last new --key ATL --if-equal old\n  keelctl value cas flights last new --key ATL --if-version 17",
			flags: func(c *cobra.Command) {
				c.Flags().BoolVar(&ifAbsent, "if-absent", false, "the value must be absent")
				c.Flags().StringVar(&ifEqual, "if-equal", "", "the value must be this one")
				c.Flags().Uint64Var(&ifVersion, "if-version", 0, "the value must have this version")
				c.MarkFlagsOneRequired("if-absent", "if-equal", "if-version")
				c.MarkFlagsMutuallyExclusive("if-absent", "if-equal", "if-version")
			},
			run: func(ctx context.Context, t *target, args []string) error {
				v, err := t.openValue(ctx)
				if err != nil {
					return err
				}
				x, err := t.parse("VALUE", t.decl.ValueType, args[0])
				if err != nil {
					return err
				}
				var pre keel.Precondition
				switch {
				case t.given("if-absent") && !ifAbsent:
					return usage(fmt.Errorf("--if-absent: it takes no false; leave it out"))
				case ifAbsent:
					pre = v.IfAbsent(t.key)
				case t.given("if-version") && ifVersion == 0:
					return usage(fmt.Errorf("--if-version: no value has version 0; --if-absent asks for none"))
				case t.given("if-version"):
					pre = v.IfVersion(t.key, ifVersion)
				default:
					old, err := t.parse("--if-equal", t.decl.ValueType, ifEqual)
					if err != nil {
						return err
					}
					pre = v.IfEqual(t.key, old)
				}
				r, err := t.client.Batch().Add(v.SetOp(t.key, x)).Require(pre).Commit(ctx)
				return t.written(r.Token(), err)
			}}),
		a.dataCommand(verb{use: "clear KEYSPACE NAME --key K", short: "Clear the value", kinds: kinds,
			example: "  keelctl value clear flights last --key ATL",
			run: func(ctx context.Context, t *target, _ []string) error {
				v, err := t.openValue(ctx)
				if err != nil {
					return err
				}
				return t.written(v.Clear(ctx, t.key))
			}}),
	)
}

// printItem prints what a read of one value found.
func printItem(t *target, it keel.Item[any], err error) error {
	if err != nil {
		return err
	}
	if !it.Found {
		return t.absent("key")
	}
	typ := t.decl.ValueType
	if t.decl.Kind == keel.KindAggregating {
		typ = keel.ResultType(t.decl.Function, typ)
	}
	return t.app.printOne("Value", record{{Name: "value", Value: t.show(typ, it.Value)}, {Name: "null", Value: it.Null, Wide: !it.Null},
		{Name: "version", Value: it.Version, Wide: true}, {Name: "token", Value: it.Token.String(), Wide: true}})
}

func (t *target) openList(ctx context.Context) (*keel.List[any], error) {
	l, err := keel.OpenList(ctx, t.space, t.decl.Name, keel.Dynamic(t.decl.ValueType))
	if err == nil && t.inSpace {
		l = l.In(t.name)
	}
	return l, err
}

func (a *app) listCommand() *cobra.Command {
	kinds := []keel.Kind{keel.KindList}
	change := func(use, short, example string, min, max int, do func(context.Context, *target, *keel.List[any], []any) (keel.Token, error)) *cobra.Command {
		return a.dataCommand(verb{use: use, short: short, example: example, kinds: kinds, min: min, max: max,
			run: func(ctx context.Context, t *target, args []string) error {
				l, err := t.openList(ctx)
				if err != nil {
					return err
				}
				xs, err := t.parseAll("VALUE", t.decl.ValueType, args)
				if err != nil {
					return err
				}
				return t.written(do(ctx, t, l, xs))
			}})
	}
	return group("list", "Read and write List states",
		a.dataCommand(verb{use: "get KEYSPACE NAME --key K", short: "Print the elements in order", kinds: kinds,
			example: "  keelctl list get flights late --key ATL\n  keelctl list get flights late --key ATL -o jsonl",
			run: func(ctx context.Context, t *target, _ []string) error {
				l, err := t.openList(ctx)
				if err != nil {
					return err
				}
				out := t.app.list("Element", "value")
				for v, err := range l.All(ctx, t.key) {
					if err != nil {
						return err
					}
					if err := out.Add(record{{Name: "value", Value: t.show(t.decl.ValueType, v)}}); err != nil {
						return err
					}
				}
				return out.End()
			}}),
		change("add KEYSPACE NAME VALUE --key K", "Append one element", "  keelctl list add flights late DL123 --key ATL", 1, 1,
			func(ctx context.Context, t *target, l *keel.List[any], xs []any) (keel.Token, error) {
				return l.AddAll(ctx, t.key, xs...)
			}),
		change("add-all KEYSPACE NAME [VALUE...] --key K", "Append elements in order, all or none", "  keelctl list add-all flights late DL1 DL2 --key ATL", 0, -1,
			func(ctx context.Context, t *target, l *keel.List[any], xs []any) (keel.Token, error) {
				return l.AddAll(ctx, t.key, xs...)
			}),
		change("update KEYSPACE NAME [VALUE...] --key K", "Replace the list; no values clear it", "  keelctl list update flights late DL9 --key ATL", 0, -1,
			func(ctx context.Context, t *target, l *keel.List[any], xs []any) (keel.Token, error) {
				return l.Update(ctx, t.key, xs...)
			}),
		change("clear KEYSPACE NAME --key K", "Clear the list", "  keelctl list clear flights late --key ATL", 0, 0,
			func(ctx context.Context, t *target, l *keel.List[any], _ []any) (keel.Token, error) {
				return l.Clear(ctx, t.key)
			}),
	)
}

func (t *target) openMap(ctx context.Context) (*keel.Map[any, any], error) {
	m, err := keel.OpenMap(ctx, t.space, t.decl.Name, keel.Dynamic(t.decl.UserKeyType), keel.Dynamic(t.decl.ValueType))
	if err == nil && t.inSpace {
		m = m.In(t.name)
	}
	return m, err
}

// mapVerb is a verb on a map; under userKey the flag's value is parsed.
func (a *app) mapVerb(use, short, example string, min, max int, userKey bool, flags func(*cobra.Command),
	do func(context.Context, *target, *keel.Map[any, any], any, []string) error) *cobra.Command {
	return a.dataCommand(verb{use: use, short: short, example: example, kinds: []keel.Kind{keel.KindMap}, min: min, max: max, userKey: userKey, flags: flags,
		run: func(ctx context.Context, t *target, args []string) error {
			m, err := t.openMap(ctx)
			if err != nil {
				return err
			}
			var uk any
			if userKey {
				if uk, err = t.parse("--user-key", t.decl.UserKeyType, t.userKey); err != nil {
					return err
				}
			}
			return do(ctx, t, m, uk, args)
		}})
}

func (a *app) mapCommand() *cobra.Command {
	var null bool
	nullFlag := func(c *cobra.Command) {
		c.Flags().BoolVar(&null, "null", false, "put a present null value; give no VALUE")
	}
	return group("map", "Read and write Map states",
		a.mapVerb("get KEYSPACE NAME --key K --user-key U", "Print an entry's value; exit 3 if it is absent",
			"  keelctl map get flights routes --key ATL --user-key JFK", 0, 0, true, nil,
			func(ctx context.Context, t *target, m *keel.Map[any, any], uk any, _ []string) error {
				it, err := m.Get(ctx, t.key, uk)
				return printItem(t, it, err)
			}),
		a.mapVerb("put KEYSPACE NAME [VALUE] --key K --user-key U", "Put an entry",
			"  keelctl map put flights routes 17 --key ATL --user-key JFK\n  keelctl map put flights routes --null --key ATL --user-key JFK", 0, 1, true, nullFlag,
			func(ctx context.Context, t *target, m *keel.Map[any, any], uk any, args []string) error {
				if null != (len(args) == 0) {
					return usage(fmt.Errorf("give either VALUE or --null"))
				}
				if null {
					return t.written(m.PutNull(ctx, t.key, uk))
				}
				v, err := t.parse("VALUE", t.decl.ValueType, args[0])
				if err != nil {
					return err
				}
				return t.written(m.Put(ctx, t.key, uk, v))
			}),
		a.mapVerb("put-all KEYSPACE NAME [USER-KEY VALUE]... --key K", "Put entries, all or none",
			"  keelctl map put-all flights routes JFK 17 LAX 4 --key ATL", 0, -1, false, nil,
			func(ctx context.Context, t *target, m *keel.Map[any, any], _ any, args []string) error {
				entries, err := t.entries(args)
				if err != nil {
					return err
				}
				return t.written(m.PutAll(ctx, t.key, entries...))
			}),
		a.mapVerb("remove KEYSPACE NAME --key K --user-key U", "Remove an entry",
			"  keelctl map remove flights routes --key ATL --user-key JFK", 0, 0, true, nil,
			func(ctx context.Context, t *target, m *keel.Map[any, any], uk any, _ []string) error {
				return t.written(m.Remove(ctx, t.key, uk))
			}),
		a.mapVerb("contains KEYSPACE NAME --key K --user-key U", "Say whether an entry is present, be it null",
			"  keelctl map contains flights routes --key ATL --user-key JFK", 0, 0, true, nil,
			func(ctx context.Context, t *target, m *keel.Map[any, any], uk any, _ []string) error {
				yes, err := m.Contains(ctx, t.key, uk)
				if err != nil {
					return err
				}
				return t.app.printOne("Contains", record{{Name: "contains", Value: yes}})
			}),
		a.mapWalk("entries", "Print the entries in the order of the user keys", true, true),
		a.mapWalk("keys", "Print the user keys in order", true, false),
		a.mapWalk("values", "Print the values in the order of the user keys", false, true),
		a.mapVerb("is-empty KEYSPACE NAME --key K", "Say whether the map has no entry", "  keelctl map is-empty flights routes --key ATL", 0, 0, false, nil,
			func(ctx context.Context, t *target, m *keel.Map[any, any], _ any, _ []string) error {
				yes, err := m.IsEmpty(ctx, t.key)
				if err != nil {
					return err
				}
				return t.app.printOne("IsEmpty", record{{Name: "isEmpty", Value: yes}})
			}),
		a.mapVerb("clear KEYSPACE NAME --key K", "Clear the map", "  keelctl map clear flights routes --key ATL", 0, 0, false, nil,
			func(ctx context.Context, t *target, m *keel.Map[any, any], _ any, _ []string) error {
				return t.written(m.Clear(ctx, t.key))
			}),
	)
}

// entries reads pairs of user key and value.
func (t *target) entries(args []string) ([]keel.Entry[any, any], error) {
	if len(args)%2 != 0 {
		return nil, usage(fmt.Errorf("give pairs of USER-KEY and VALUE"))
	}
	var out []keel.Entry[any, any]
	for i := 0; i < len(args); i += 2 {
		k, err := t.parse(fmt.Sprintf("USER-KEY %d", i/2+1), t.decl.UserKeyType, args[i])
		if err != nil {
			return nil, err
		}
		v, err := t.parse(fmt.Sprintf("VALUE %d", i/2+1), t.decl.ValueType, args[i+1])
		if err != nil {
			return nil, err
		}
		out = append(out, keel.Entry[any, any]{Key: k, Value: v})
	}
	return out, nil
}

func (a *app) mapWalk(name, short string, keys, values bool) *cobra.Command {
	return a.mapVerb(name+" KEYSPACE NAME --key K", short, "  keelctl map "+name+" flights routes --key ATL -o jsonl", 0, 0, false, nil,
		func(ctx context.Context, t *target, m *keel.Map[any, any], _ any, _ []string) error {
			var columns []string
			if keys {
				columns = append(columns, "userKey")
			}
			if values {
				columns = append(columns, "value")
			}
			out := a.list("Entry", columns...)
			for e, err := range m.Entries(ctx, t.key) {
				if err != nil {
					return err
				}
				var r record
				if keys {
					r = append(r, field{Name: "userKey", Value: t.show(t.decl.UserKeyType, e.Key)})
				}
				if values {
					r = append(r, field{Name: "value", Value: t.show(t.decl.ValueType, e.Value)},
						field{Name: "null", Value: e.Null, Wide: true}, field{Name: "version", Value: e.Version, Wide: true})
				}
				if err := out.Add(r); err != nil {
					return err
				}
			}
			return out.End()
		})
}
