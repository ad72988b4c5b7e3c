package logbridge

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"
)

// MaxMessage bounds a message, in bytes.
const MaxMessage = 8 << 10

// LevelTrace is the slog level of hclog's Trace.
const LevelTrace = slog.LevelDebug - 4

// logger implements hclog.Logger. A derived logger shares level.
type logger struct {
	slog  *slog.Logger // without the implied arguments' name
	name  string
	args  []any // implied arguments, as given
	level *atomic.Int32
}

// New returns an hclog.Logger that writes to l. l's handler chooses which
// levels pass; SetLevel narrows that.
func New(l *slog.Logger, name string) hclog.Logger {
	return &logger{slog: l, name: name, level: new(atomic.Int32)}
}

func slogLevel(l hclog.Level) slog.Level {
	switch l {
	case hclog.Trace:
		return LevelTrace
	case hclog.Debug:
		return slog.LevelDebug
	case hclog.Warn:
		return slog.LevelWarn
	case hclog.Error:
		return slog.LevelError
	}
	return slog.LevelInfo
}

func (b *logger) enabled(l hclog.Level) bool {
	own := hclog.Level(b.level.Load())
	return own != hclog.Off && l >= own && b.slog.Enabled(context.Background(), slogLevel(l))
}

// Log implements hclog.Logger.
func (b *logger) Log(level hclog.Level, msg string, args ...any) {
	if !b.enabled(level) {
		return
	}
	attrs := make([]any, 0, len(b.args)+len(args)+2)
	if b.name != "" {
		attrs = append(attrs, slog.String("logger", b.name))
	}
	attrs = appendArgs(attrs, b.args)
	attrs = appendArgs(attrs, args)
	b.slog.Log(context.Background(), slogLevel(level), clip(msg), attrs...)
}

// appendArgs turns hclog's alternating keys and values into attributes. A
// value without a key gets the one that hclog uses for it.
func appendArgs(attrs, args []any) []any {
	for i := 0; i < len(args); i += 2 {
		if i+1 == len(args) {
			return append(attrs, slog.Any(hclog.MissingKey, value(args[i])))
		}
		key, ok := args[i].(string)
		if !ok {
			key = fmt.Sprint(args[i])
		}
		attrs = append(attrs, slog.Any(clip(key), value(args[i+1])))
	}
	return attrs
}

// value renders hclog's special values as its own output does.
func value(v any) any {
	switch v := v.(type) {
	case hclog.Format:
		if len(v) == 0 {
			return ""
		}
		return clip(fmt.Sprintf(fmt.Sprint(v[0]), v[1:]...))
	case hclog.Hex:
		return fmt.Sprintf("%#x", int(v))
	case hclog.Octal:
		return fmt.Sprintf("0%o", int(v))
	case hclog.Binary:
		return fmt.Sprintf("0b%b", int(v))
	case hclog.Quote:
		return clip(string(v))
	case string:
		return clip(v)
	}
	return v
}

func clip(s string) string {
	if len(s) <= MaxMessage {
		return s
	}
	return strings.ToValidUTF8(s[:MaxMessage-3], "") + "..."
}

func (b *logger) Trace(msg string, args ...any) { b.Log(hclog.Trace, msg, args...) }
func (b *logger) Debug(msg string, args ...any) { b.Log(hclog.Debug, msg, args...) }
func (b *logger) Info(msg string, args ...any)  { b.Log(hclog.Info, msg, args...) }
func (b *logger) Warn(msg string, args ...any)  { b.Log(hclog.Warn, msg, args...) }
func (b *logger) Error(msg string, args ...any) { b.Log(hclog.Error, msg, args...) }

func (b *logger) IsTrace() bool { return b.enabled(hclog.Trace) }
func (b *logger) IsDebug() bool { return b.enabled(hclog.Debug) }
func (b *logger) IsInfo() bool  { return b.enabled(hclog.Info) }
func (b *logger) IsWarn() bool  { return b.enabled(hclog.Warn) }
func (b *logger) IsError() bool { return b.enabled(hclog.Error) }

// ImpliedArgs implements hclog.Logger.
func (b *logger) ImpliedArgs() []any { return b.args }

// With implements hclog.Logger.
func (b *logger) With(args ...any) hclog.Logger {
	d := *b
	d.args = append(append([]any(nil), b.args...), args...)
	return &d
}

// Name implements hclog.Logger.
func (b *logger) Name() string { return b.name }

// Named implements hclog.Logger.
func (b *logger) Named(name string) hclog.Logger {
	if b.name != "" {
		name = b.name + "." + name
	}
	return b.ResetNamed(name)
}

// ResetNamed implements hclog.Logger.
func (b *logger) ResetNamed(name string) hclog.Logger {
	d := *b
	d.name = name
	return &d
}

// SetLevel implements hclog.Logger.
func (b *logger) SetLevel(l hclog.Level) { b.level.Store(int32(l)) }

// GetLevel implements hclog.Logger.
func (b *logger) GetLevel() hclog.Level { return hclog.Level(b.level.Load()) }

// StandardLogger implements hclog.Logger.
func (b *logger) StandardLogger(o *hclog.StandardLoggerOptions) *log.Logger {
	return log.New(b.StandardWriter(o), "", 0)
}

// StandardWriter implements hclog.Logger. Levels are inferred from prefixes
// like "[WARN]" unless the options force one.
func (b *logger) StandardWriter(o *hclog.StandardLoggerOptions) io.Writer {
	w := &lineWriter{to: b}
	if o != nil {
		w.force = o.ForceLevel
	}
	return w
}

// Standard returns a log.Logger for libraries that prefix their messages with
// a level in brackets, as memberlist does.
func Standard(l *slog.Logger, name string) *log.Logger {
	return New(l, name).StandardLogger(nil)
}

// lineWriter gets one message per Write, as log.Logger promises.
type lineWriter struct {
	to    *logger
	force hclog.Level
}

var prefixes = []struct {
	text  string
	level hclog.Level
}{
	{"[TRACE]", hclog.Trace}, {"[DEBUG]", hclog.Debug}, {"[INFO]", hclog.Info}, {"[WARN]", hclog.Warn},
	{"[WARNING]", hclog.Warn}, {"[ERR]", hclog.Error}, {"[ERROR]", hclog.Error},
}

func (w *lineWriter) Write(p []byte) (int, error) {
	msg, level := string(bytes.TrimSpace(p)), hclog.Info
	for _, x := range prefixes {
		if rest, found := strings.CutPrefix(msg, x.text); found {
			msg, level = strings.TrimSpace(rest), x.level
			break
		}
	}
	if w.force != hclog.NoLevel {
		level = w.force
	}
	w.to.Log(level, msg)
	return len(p), nil
}
