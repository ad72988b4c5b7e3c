package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	keel "github.com/keelstate/keelstate/client"
)

// filled is what fill wrote.
type filled struct {
	Keys       int     `json:"keys"`
	ValueBytes int     `json:"value_bytes"`
	Seconds    float64 `json:"seconds"`
}

// fillKey is the key of a value that fill wrote.
func fillKey(i int) string { return fmt.Sprintf("fill-%09d", i) }

func fillCommand() *cobra.Command {
	var c common
	var total, batchBytes int64
	var valueBytes, writers int
	cmd := &cobra.Command{Use: "fill", Short: "Write a given amount of state", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if total < 1 || valueBytes < 1 || writers < 1 || batchBytes < 1 {
				return errors.New("bytes, value-bytes, batch-bytes and writers must be positive")
			}
			f := filled{Keys: int((total + int64(valueBytes) - 1) / int64(valueBytes)), ValueBytes: valueBytes}
			load := loadAverage()
			if err := f.run(cmd.Context(), &c, writers, max(int(batchBytes)/valueBytes, 1)); err != nil {
				return err
			}
			fmt.Printf("filled %d keys of %d bytes in %.1f s, %.1f MB/s\n", f.Keys, f.ValueBytes, f.Seconds,
				float64(f.Keys)*float64(f.ValueBytes)/1e6/f.Seconds)
			return c.save(record{What: "fill", At: time.Now().UTC(), LoadAvg: load, Fill: &f})
		}}
	c.register(cmd)
	f := cmd.Flags()
	f.Int64Var(&total, "bytes", 1<<30, "bytes of values in all")
	f.IntVar(&valueBytes, "value-bytes", 10<<10, "size of a value; they do not compress")
	f.Int64Var(&batchBytes, "batch-bytes", 1<<20, "bytes of values in one call")
	f.IntVar(&writers, "writers", 4, "calls outstanding")
	return cmd
}

func (f *filled) run(ctx context.Context, c *common, writers, per int) error {
	client, err := c.open(ctx)
	if err != nil {
		return err
	}
	state, err := values(ctx, client)
	if err != nil {
		return errors.Join(err, closeClient(client))
	}
	start := time.Now()
	errs := make(chan error, writers)
	var next atomic.Int64
	for w := range writers {
		go func() { errs <- f.write(ctx, client, state, &next, per, uint64(w)) }()
	}
	for range writers {
		err = errors.Join(err, <-errs)
	}
	f.Seconds = time.Since(start).Seconds()
	return errors.Join(err, closeClient(client))
}

func (f *filled) write(ctx context.Context, client *keel.Client, state *keel.Value[[]byte], next *atomic.Int64, per int, seed uint64) error {
	r := rand.NewChaCha8([32]byte{byte(seed)})
	for {
		lo := int(next.Add(int64(per))) - per
		if lo >= f.Keys {
			return nil
		}
		b := client.Batch()
		for i := lo; i < min(lo+per, f.Keys); i++ {
			value := make([]byte, f.ValueBytes)
			_, _ = r.Read(value) // never fails
			b.Add(state.SetOp(fillKey(i), value))
		}
		if _, err := b.Commit(ctx); err != nil {
			return fmt.Errorf("filling from key %d: %w", lo, err)
		}
	}
}
