package mem

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/enginetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	enginetest.Run(t, func(*testing.T) engine.Driver { return NewDriver() })
}
