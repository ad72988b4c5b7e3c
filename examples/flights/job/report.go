package job

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"sort"
	"sync"
)

// reportColumns is the header of the report.
const reportColumns = "origin,flights,destinations,delay_max,delay_mean,distance_sum,last_date,late,top_destination"

// daysColumns is the header of the report by day.
const daysColumns = "origin,day,flights"

// WriteReport writes one line for each origin, sorted, from what the store
// holds (FJ6). It asks for parallel origins at once.
func WriteReport(ctx context.Context, w io.Writer, s Source, parallel int) (origins int, err error) {
	names, err := sortedOrigins(ctx, s)
	if err != nil {
		return 0, err
	}
	summaries, err := readSummaries(ctx, s, names, parallel)
	if err != nil {
		return 0, err
	}
	out := bufio.NewWriter(w)
	fmt.Fprintln(out, reportColumns)
	for i, sum := range summaries {
		flights, top := total(sum.Destinations)
		if flights == 0 { // claimed by a run that ended before its first row
			continue
		}
		origins++
		fmt.Fprintf(out, "%s,%d,%d,%d,%.3f,%d,%s,%d,%s\n", names[i], flights, len(sum.Destinations),
			sum.DelayMax, sum.DelayMean, sum.DistanceSum, sum.Last.Date, sum.Late, top)
	}
	return origins, out.Flush()
}

// total is the number of flights and the destination with most of them, of
// equals the lexically smallest.
func total(destinations map[string]int64) (flights int64, top string) {
	for _, d := range slices.Sorted(maps.Keys(destinations)) {
		flights += destinations[d]
		if top == "" || destinations[d] > destinations[top] {
			top = d
		}
	}
	return flights, top
}

func sortedOrigins(ctx context.Context, s Source) ([]string, error) {
	var names []string
	for name, err := range s.Origins(ctx) {
		if err != nil {
			return nil, fmt.Errorf("listing the origins: %w", err)
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

func readSummaries(ctx context.Context, s Source, names []string, parallel int) ([]Summary, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := make([]Summary, len(names))
	work := make(chan int)
	var wg sync.WaitGroup
	for range max(1, min(parallel, len(names))) {
		wg.Go(func() {
			for i := range work {
				var err error
				if out[i], err = s.Summary(ctx, names[i]); err != nil {
					cancel(fmt.Errorf("reading origin %s: %w", names[i], err))
					return
				}
			}
		})
	}
	for i := range names {
		select {
		case work <- i:
		case <-ctx.Done():
		}
	}
	close(work)
	wg.Wait()
	return out, context.Cause(ctx)
}

// WriteDays writes the number of flights by origin and day, sorted.
func WriteDays(ctx context.Context, w io.Writer, s Source) (lines int, err error) {
	var all []DayCount
	for d, err := range s.Days(ctx) {
		if err != nil {
			return 0, fmt.Errorf("scanning the days: %w", err)
		}
		all = append(all, d)
	}
	sort.Slice(all, func(i, j int) bool {
		if all[i].Origin != all[j].Origin {
			return all[i].Origin < all[j].Origin
		}
		return all[i].Day < all[j].Day
	})
	out := bufio.NewWriter(w)
	fmt.Fprintln(out, daysColumns)
	for _, d := range all {
		fmt.Fprintf(out, "%s,%s,%d\n", d.Origin, d.Day, d.Flights)
	}
	return len(all), out.Flush()
}
