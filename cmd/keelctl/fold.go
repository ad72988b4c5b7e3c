package main

import (
	"context"
	"fmt"
	"iter"

	"github.com/spf13/cobra"

	keel "github.com/keelstate/keelstate/client"
)

// folding is what the verbs of Reducing and Aggregating states need of either.
type folding interface {
	Load(ctx context.Context, key any) (keel.Item[any], error)
	AddAll(ctx context.Context, key any, elements ...any) (keel.Token, error)
	Clear(ctx context.Context, key any) (keel.Token, error)
	MergeNamespaces(ctx context.Context, key any, sources ...keel.Namespace) (keel.Token, error)
}

func (t *target) openFold(ctx context.Context) (folding, error) {
	codec := keel.Dynamic(t.decl.ValueType)
	if t.decl.Kind == keel.KindReducing {
		r, err := keel.OpenReducing(ctx, t.space, t.decl.Name, codec)
		if err == nil && t.inSpace {
			r = r.In(t.name)
		}
		return r, err
	}
	g, err := keel.OpenAggregating(ctx, t.space, t.decl.Name, codec, keel.Dynamic(keel.ResultType(t.decl.Function, t.decl.ValueType)))
	if err == nil && t.inSpace {
		g = g.In(t.name)
	}
	return g, err
}

func (a *app) reducingCommand() *cobra.Command {
	return group("reducing", "Read and write Reducing states", a.foldVerbs(keel.KindReducing, "max-delay")...)
}

func (a *app) aggregatingCommand() *cobra.Command {
	return group("aggregating", "Read and write Aggregating states", a.foldVerbs(keel.KindAggregating, "mean-delay")...)
}

func (a *app) foldVerbs(kind keel.Kind, name string) []*cobra.Command {
	kinds := []keel.Kind{kind}
	prefix := "  keelctl " + string(kind)
	return []*cobra.Command{
		a.dataCommand(verb{use: "get KEYSPACE NAME --key K", short: "Print the result; exit 3 if nothing was added", kinds: kinds,
			example: prefix + " get flights " + name + " --key ATL",
			run: func(ctx context.Context, t *target, _ []string) error {
				s, err := t.openFold(ctx)
				if err != nil {
					return err
				}
				it, err := s.Load(ctx, t.key)
				return printItem(t, it, err)
			}}),
		a.dataCommand(verb{use: "add KEYSPACE NAME VALUE... --key K", short: "Fold elements in, in order, all or none", kinds: kinds, min: 1, max: -1,
			example: prefix + " add flights " + name + " 17 4 --key ATL\n" + prefix + " add flights " + name + " --key ATL -- -5",
			run: func(ctx context.Context, t *target, args []string) error {
				s, err := t.openFold(ctx)
				if err != nil {
					return err
				}
				xs, err := t.parseAll("VALUE", t.decl.ValueType, args)
				if err != nil {
					return err
				}
				return t.written(s.AddAll(ctx, t.key, xs...))
			}}),
		a.dataCommand(verb{use: "clear KEYSPACE NAME --key K", short: "Clear the accumulator", kinds: kinds,
			example: prefix + " clear flights " + name + " --key ATL",
			run: func(ctx context.Context, t *target, _ []string) error {
				s, err := t.openFold(ctx)
				if err != nil {
					return err
				}
				return t.written(s.Clear(ctx, t.key))
			}}),
	}
}

func (a *app) mergeCommand() *cobra.Command {
	var sources []string
	var void bool
	return a.dataCommand(verb{use: "merge-namespaces KEYSPACE NAME --key K --namespace TARGET --source S...",
		short:   "Merge namespaces of a key into one, in one atomic step, and remove the sources",
		kinds:   []keel.Kind{keel.KindList, keel.KindReducing, keel.KindAggregating},
		example: "  keelctl merge-namespaces flights mean-delay --key ATL --namespace w1 --source w2 --source w3\n  keelctl merge-namespaces flights late --key ATL --namespace w1 --source-void",
		flags: func(c *cobra.Command) {
			c.Flags().StringArrayVar(&sources, "source", nil, "a namespace to merge; in order, may be given again")
			c.Flags().BoolVar(&void, "source-void", false, "the void namespace is a source, before the others")
		},
		run: func(ctx context.Context, t *target, _ []string) error {
			if !void && len(sources) == 0 {
				return usage(fmt.Errorf("--source: name the namespaces to merge"))
			}
			var from []keel.Namespace
			if void {
				from = append(from, keel.VoidNamespace)
			}
			for _, s := range sources {
				name, err := t.namespace("--source", s)
				if err != nil {
					return err
				}
				from = append(from, keel.NamespaceOf([]byte(name)))
			}
			if t.decl.Kind == keel.KindList {
				l, err := t.openList(ctx)
				if err != nil {
					return err
				}
				return t.written(l.MergeNamespaces(ctx, t.key, from...))
			}
			s, err := t.openFold(ctx)
			if err != nil {
				return err
			}
			return t.written(s.MergeNamespaces(ctx, t.key, from...))
		}})
}

// scanner is what keys and scan need of a state of any kind.
type scanner interface {
	ListKeys(ctx context.Context, o keel.ScanOptions) iter.Seq2[keel.KeyItem, error]
	Scan(ctx context.Context, o keel.ScanOptions) iter.Seq2[keel.ScanItem, error]
}

func (t *target) openAny(ctx context.Context) (scanner, error) {
	switch t.decl.Kind {
	case keel.KindValue:
		return t.openValue(ctx)
	case keel.KindList:
		return t.openList(ctx)
	case keel.KindMap:
		return t.openMap(ctx)
	}
	s, err := t.openFold(ctx)
	if err != nil {
		return nil, err
	}
	return s.(scanner), nil
}

func (t *target) scanOptions(limit uint64) keel.ScanOptions {
	o := keel.ScanOptions{Limit: limit}
	if t.inSpace {
		n := keel.NamespaceOf([]byte(t.name))
		o.Namespace = &n
	}
	return o
}

func (a *app) keysCommand() *cobra.Command {
	var limit uint64
	return a.dataCommand(verb{use: "keys KEYSPACE NAME", short: "List the keys of a state", keyless: true,
		example: "  keelctl keys flights last\n  keelctl keys flights last --limit 10 -o jsonl",
		flags: func(c *cobra.Command) {
			c.Flags().Uint64Var(&limit, "limit", 0, "the largest number of keys, 0 for all")
		},
		run: func(ctx context.Context, t *target, _ []string) error {
			s, err := t.openAny(ctx)
			if err != nil {
				return err
			}
			out := a.list("Key", "key", "namespace")
			for k, err := range s.ListKeys(ctx, t.scanOptions(limit)) {
				if err != nil {
					return err
				}
				if err := out.Add(t.keyRecord(k)); err != nil {
					return err
				}
			}
			return out.End()
		}})
}

func (t *target) keyRecord(k keel.KeyItem) record {
	return record{{Name: "key", Value: t.show(t.decl.KeyType, k.Key)}, {Name: "namespace", Value: t.showNamespace(k.Namespace)},
		{Name: "group", Value: k.Group, Wide: true}, {Name: "shard", Value: k.Shard, Wide: true}}
}

func (a *app) scanCommand() *cobra.Command {
	var limit uint64
	return a.dataCommand(verb{use: "scan KEYSPACE NAME", short: "Print all that a state holds", keyless: true,
		example: "  keelctl scan flights routes\n  keelctl scan flights routes --namespace \"\" --limit 10 -o jsonl",
		flags: func(c *cobra.Command) {
			c.Flags().Uint64Var(&limit, "limit", 0, "the largest number of items, 0 for all")
		},
		run: func(ctx context.Context, t *target, _ []string) error {
			s, err := t.openAny(ctx)
			if err != nil {
				return err
			}
			typ := t.decl.ValueType
			if t.decl.Kind == keel.KindAggregating {
				typ = keel.ResultType(t.decl.Function, typ)
			}
			out := a.list("Item", "key", "namespace", "value")
			for it, err := range s.Scan(ctx, t.scanOptions(limit)) {
				if err != nil {
					return err
				}
				r := t.keyRecord(it.KeyItem)
				if t.decl.Kind == keel.KindMap {
					r = append(r, field{Name: "userKey", Value: t.show(t.decl.UserKeyType, it.UserKey)})
				}
				r = append(r, field{Name: "value", Value: t.show(typ, it.Value)}, field{Name: "null", Value: it.Null, Wide: true},
					field{Name: "version", Value: it.Version, Wide: true})
				if err := out.Add(r); err != nil {
					return err
				}
			}
			return out.End()
		}})
}
