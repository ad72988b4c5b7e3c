package rocks

import (
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/enginetest"
)

func TestConformance(t *testing.T) {
	for _, c := range []struct {
		name string
		o    Options
	}{
		{"defaults", Options{}},
		{"small buffers and prefix filters", Options{
			FamilyBufferBytes:   minBufferBytes,
			MaxSuccessiveMerges: 4,
			FilterOf: func(f engine.FamilyID, o engine.FamilyOptions) FilterMode {
				if o.GroupWidth == 0 {
					return FilterNone
				}
				return FilterPrefix
			},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			enginetest.Run(t, func(t *testing.T) engine.Driver {
				o := c.o
				o.MemoryBytes = 32 << 20
				d, err := NewDriver(o)
				must(t, err)
				return d
			})
		})
	}
}
