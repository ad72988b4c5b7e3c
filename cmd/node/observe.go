package main

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc/grpclog"

	"github.com/keelstate/keelstate/cluster"
)

func newLogger(c *config, w io.Writer) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.logLevel}
	if c.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

var bridgeGRPC sync.Once

// bridgeGRPCLog makes gRPC, which has one logger for the whole process, log
// here. What gRPC calls information is about its internals: debug for us.
func bridgeGRPCLog(l *slog.Logger) {
	bridgeGRPC.Do(func() { grpclog.SetLoggerV2(grpcLog{l.With("component", "grpc")}) })
}

type grpcLog struct{ l *slog.Logger }

func (g grpcLog) Info(args ...any)            { g.l.Debug(fmt.Sprint(args...)) }
func (g grpcLog) Infoln(args ...any)          { g.l.Debug(fmt.Sprint(args...)) }
func (g grpcLog) Infof(f string, a ...any)    { g.l.Debug(fmt.Sprintf(f, a...)) }
func (g grpcLog) Warning(args ...any)         { g.l.Warn(fmt.Sprint(args...)) }
func (g grpcLog) Warningln(args ...any)       { g.l.Warn(fmt.Sprint(args...)) }
func (g grpcLog) Warningf(f string, a ...any) { g.l.Warn(fmt.Sprintf(f, a...)) }
func (g grpcLog) Error(args ...any)           { g.l.Error(fmt.Sprint(args...)) }
func (g grpcLog) Errorln(args ...any)         { g.l.Error(fmt.Sprint(args...)) }
func (g grpcLog) Errorf(f string, a ...any)   { g.l.Error(fmt.Sprintf(f, a...)) }
func (g grpcLog) Fatal(args ...any)           { g.l.Error(fmt.Sprint(args...)); os.Exit(exitFatal) }
func (g grpcLog) Fatalln(args ...any)         { g.Fatal(args...) }
func (g grpcLog) Fatalf(f string, a ...any)   { g.Fatal(fmt.Sprintf(f, a...)) }
func (g grpcLog) V(level int) bool            { return level <= 0 }

func newRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// observer serves health, metrics and profiles over HTTP. It serves from before
// the node is opened, which may take long, until after it is closed.
type observer struct {
	node     atomic.Pointer[cluster.Node]
	stopping atomic.Bool
	server   *http.Server
	wg       sync.WaitGroup
}

func startObserver(l net.Listener, reg *prometheus.Registry, c *config, clock *faultClock, log *slog.Logger) *observer {
	o := &observer{}
	mux := http.NewServeMux()
	mux.HandleFunc("/livez", o.live)
	mux.HandleFunc("/readyz", o.ready)
	mux.Handle("/metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{Registry: reg}))
	if c.faultInjection {
		log.Warn("faults can be injected over HTTP: this node is for tests")
		serveFailpoints(mux)
		mux.Handle(clockPath, clock)
	}
	if c.pprof {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	o.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(log.With("component", "http").Handler(), slog.LevelDebug)}
	o.wg.Add(1)
	go func() {
		defer o.wg.Done()
		if err := o.server.Serve(l); err != nil && err != http.ErrServerClosed {
			log.Error("serving HTTP", "error", err)
		}
	}()
	return o
}

func answer(w http.ResponseWriter, ok bool, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	fmt.Fprintln(w, text)
}

// live says whether the process and its disk answer. While the node is opened
// or closed the process is busy, not hung.
func (o *observer) live(w http.ResponseWriter, _ *http.Request) {
	n := o.node.Load()
	if n == nil {
		answer(w, true, "ok")
		return
	}
	if err := n.Live(); err != nil {
		answer(w, false, err.Error())
		return
	}
	answer(w, true, "ok")
}

// ready says whether this node serves what it hosts (CN2).
func (o *observer) ready(w http.ResponseWriter, _ *http.Request) {
	ok, why := o.isReady()
	if ok {
		why = "ok"
	}
	answer(w, ok, why)
}

func (o *observer) isReady() (bool, string) {
	n := o.node.Load()
	switch {
	case o.stopping.Load():
		return false, "the node is stopping"
	case n == nil:
		return false, "the node is starting"
	}
	return n.Ready()
}

func (o *observer) close() error {
	if o.server == nil {
		return nil
	}
	err := o.server.Close()
	o.wg.Wait()
	return err
}
