package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"

	"github.com/spf13/cobra"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/keygroup"
)

// target is a state and, for most verbs, one key of it.
type target struct {
	app     *app
	client  *keel.Client
	decl    keel.Declaration
	space   *keel.Keyspace
	keyText string
	key     any
	inSpace bool
	name    string // the bytes of the namespace, if inSpace
	userKey string
	hasUK   bool
	hex     bool
	given   func(flag string) bool // on the command line
}

// verb is one data command: KEYSPACE NAME and what follows.
type verb struct {
	use, short, example string
	kinds               []keel.Kind
	min, max            int // of the arguments after NAME; max < 0 is no bound
	keyless, userKey    bool
	run                 func(context.Context, *target, []string) error
	flags               func(*cobra.Command)
}

func (a *app) dataCommand(v verb) *cobra.Command {
	t := &target{app: a}
	args := cobra.MinimumNArgs(2 + v.min)
	if v.max >= 0 {
		args = cobra.RangeArgs(2+v.min, 2+v.max)
	}
	c := &cobra.Command{
		Use: v.use, Short: v.short, Args: args, Example: v.example,
		ValidArgsFunction: a.completeStates,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			t.given = cmd.Flags().Changed
			t.inSpace = t.given("namespace")
			t.hasUK = t.given("user-key")
			if !v.keyless && !t.given("key") {
				return usage(fmt.Errorf("--key: give the key"))
			}
			if v.userKey && !t.hasUK {
				return usage(fmt.Errorf("--user-key: give the user key"))
			}
			if t.inSpace {
				var err error
				if t.name, err = t.namespace("--namespace", t.name); err != nil {
					return err
				}
			}
			if err := t.open(ctx, args[0], args[1], v); err != nil {
				return err
			}
			return v.run(ctx, t, args[2:])
		},
	}
	f := c.Flags()
	f.StringVar(&t.name, "namespace", "", `namespace; without it the void one, which is not the empty one ("")`)
	f.BoolVar(&t.hex, "hex", false, "keys, values and namespaces, in and out, are the hexadecimal of their encodings")
	if !v.keyless {
		f.StringVar(&t.keyText, "key", "", "the key, as text of the keyspace's key type")
	}
	if v.userKey {
		f.StringVar(&t.userKey, "user-key", "", "the user key, as text of its type")
	}
	if v.flags != nil {
		v.flags(c)
	}
	return c
}

// open finds the state and reads the key.
func (t *target) open(ctx context.Context, keyspace, name string, v verb) error {
	var err error
	if t.client, err = t.app.connect(ctx); err != nil {
		return err
	}
	if t.decl, err = t.client.FindState(ctx, keyspace, name); err != nil {
		return err
	}
	if len(v.kinds) > 0 {
		fits := false
		for _, k := range v.kinds {
			fits = fits || k == t.decl.Kind
		}
		if !fits {
			return keel.NewError(keel.ErrWrongKind, keel.OutcomeNotApplied, keyspace+"/"+name, fmt.Sprintf("it is of kind %s", t.decl.Kind))
		}
	}
	t.space = t.client.Keyspace(keyspace, t.decl.KeyType)
	if !v.keyless {
		if t.key, err = t.parse("--key", t.decl.KeyType, t.keyText); err != nil {
			return err
		}
	}
	return nil
}

// parse reads text of a type, or hexadecimal under --hex.
func (t *target) parse(what string, typ keel.Type, text string) (any, error) {
	if !t.hex {
		v, err := keygroup.ParseText(typ, text)
		if err != nil {
			return nil, usage(fmt.Errorf("%s: %w", what, err))
		}
		return v, nil
	}
	b, err := hex.DecodeString(text)
	if err != nil {
		return nil, usage(fmt.Errorf("%s: %w", what, err))
	}
	v, err := keygroup.Decode(typ, b)
	if err != nil {
		return nil, usage(fmt.Errorf("%s: %w", what, err))
	}
	return v, nil
}

func (t *target) parseAll(what string, typ keel.Type, texts []string) ([]any, error) {
	out := make([]any, len(texts))
	for i, s := range texts {
		var err error
		if out[i], err = t.parse(fmt.Sprintf("%s %d", what, i+1), typ, s); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// show is a value for output: native JSON where JSON has it, else text; under
// --hex the hexadecimal of the encoding.
func (t *target) show(typ keel.Type, v any) any {
	if v == nil {
		return nil
	}
	if t.hex {
		b, err := keygroup.Encode(typ, v)
		if err != nil {
			return fmt.Sprint(v)
		}
		return hex.EncodeToString(b)
	}
	switch x := v.(type) {
	case string, bool, int32, int64, json.RawMessage:
		return x
	case float64:
		if !math.IsNaN(x) && !math.IsInf(x, 0) {
			return x
		}
	}
	return keygroup.FormatText(typ, v)
}

// namespace reads the bytes of a namespace: text with \xHH, or under --hex their
// hexadecimal.
func (t *target) namespace(flag, text string) (string, error) {
	if t.hex {
		b, err := hex.DecodeString(text)
		if err != nil {
			return "", usage(fmt.Errorf("%s: %w", flag, err))
		}
		return string(b), nil
	}
	b, err := keygroup.ParseText(keygroup.Bytes, text)
	if err != nil {
		return "", usage(fmt.Errorf("%s: %w", flag, err))
	}
	return string(b.([]byte)), nil
}

// showNamespace is what namespace reads back; nil for the void namespace.
func (t *target) showNamespace(n keel.Namespace) any {
	b, set := n.Bytes()
	switch {
	case !set:
		return nil
	case t.hex:
		return hex.EncodeToString(b)
	}
	return keygroup.FormatText(keygroup.Bytes, b)
}

// written prints what a write did.
func (t *target) written(token keel.Token, err error) error {
	if err != nil {
		return err
	}
	return t.app.printDone("Written", record{{Name: "shard", Value: token.Shard}, {Name: "sequence", Value: token.Sequence},
		{Name: "token", Value: token.String()}})
}

// absent is a read that found nothing; it exits with 3.
func (t *target) absent(what string) error {
	return keel.NewError(keel.ErrNotFound, keel.OutcomeNotApplied, what, "there is nothing for this key")
}
