package main

import (
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"slices"
	"sort"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
)

const envPrefix = "KEELSTATE_"

// setting is one thing that can be configured: a flag, a key of the file and an
// environment variable. All values travel as text and are parsed in one place.
type setting struct {
	name, def, usage string
	isBool           bool
	// set parses the text into the configuration.
	set func(*config, string) error
}

func (s *setting) env() string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(s.name, "-", "_"))
}

// config is a complete, parsed configuration.
type config struct {
	nodeID                                                       string
	dataDir, pidFile                                             string
	grpcAddr, raftAddr, gossipAddr, httpAddr                     string
	advertiseHost                                                string
	advertiseGRPC, advertiseRaft, advertiseGossip, advertiseHTTP string
	join                                                         []string
	engine                                                       string
	memory                                                       int64
	zone                                                         string
	logLevel                                                     slog.Level
	logFormat                                                    string
	pprof, faultInjection                                        bool
	drainTimeout                                                 time.Duration
	scrubInterval                                                time.Duration // 0: off
	logSize                                                      int64
	objects                                                      objects
	checkpoints                                                  checkpoints
	// quick shortens what a node that is alone need not wait for.
	quick bool

	// values and origins are what each setting was set to, and where.
	values, origins map[string]string
	// ignored are environment variables with our prefix that are no settings.
	ignored []string
}

func text(f func(*config) *string) func(*config, string) error {
	return func(c *config, v string) error { *f(c) = v; return nil }
}

// address parses host:port with a numeric port; empty is allowed where empty
// means "derive it" or "off".
func address(f func(*config) *string, optional bool) func(*config, string) error {
	return func(c *config, v string) error {
		if v != "" || !optional {
			if _, _, err := splitAddress(v); err != nil {
				return err
			}
		}
		*f(c) = v
		return nil
	}
}

func splitAddress(v string) (string, int, error) {
	host, p, err := net.SplitHostPort(v)
	if err != nil {
		return "", 0, fmt.Errorf("%q is not host:port", v)
	}
	port, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("%q has no port from 0 to 65535", v)
	}
	return host, int(port), nil
}

// nodeSettings are the settings of a node, in the order of the help.
func nodeSettings() []setting {
	return slices.Concat([]setting{
		{name: "node-id", usage: "name of this node, bound to its data directory (required)", set: text(func(c *config) *string { return &c.nodeID })},
		{name: "data-dir", usage: "directory of this node's own (required)", set: text(func(c *config) *string { return &c.dataDir })},
		{name: "grpc-addr", def: "127.0.0.1:7401", usage: "listen here for clients", set: address(func(c *config) *string { return &c.grpcAddr }, false)},
		{name: "raft-addr", def: "127.0.0.1:7411", usage: "listen here for other nodes", set: address(func(c *config) *string { return &c.raftAddr }, false)},
		{name: "gossip-addr", def: "127.0.0.1:7421", usage: "listen here for gossip, on UDP and TCP; empty: no gossip", set: address(func(c *config) *string { return &c.gossipAddr }, true)},
		{name: "http-addr", def: "127.0.0.1:7431", usage: "listen here for health and metrics; empty: no HTTP", set: address(func(c *config) *string { return &c.httpAddr }, true)},
		{name: "advertise-host", usage: "host that others reach this node at; needed when listening on all interfaces", set: text(func(c *config) *string { return &c.advertiseHost })},
		{name: "advertise-grpc-addr", usage: "address that clients use (default: from advertise-host and grpc-addr)", set: address(func(c *config) *string { return &c.advertiseGRPC }, true)},
		{name: "advertise-raft-addr", usage: "address that other nodes use", set: address(func(c *config) *string { return &c.advertiseRaft }, true)},
		{name: "advertise-gossip-addr", usage: "address that others gossip with", set: address(func(c *config) *string { return &c.advertiseGossip }, true)},
		{name: "advertise-http-addr", usage: "address that operators use", set: address(func(c *config) *string { return &c.advertiseHTTP }, true)},
		{name: "join", usage: "gossip addresses of other nodes, separated by commas; admits nobody", set: setJoin},
		{name: "zone", usage: "where this node is; replicas are spread over zones", set: text(func(c *config) *string { return &c.zone })},
		{name: "pid-file", usage: "write the process id here while running", set: text(func(c *config) *string { return &c.pidFile })},
		{name: "drain-timeout", def: "30s", usage: "how long a stop waits for offices and calls to be handed over", set: setDrainTimeout},
		{name: "scrub-interval", def: "24h", usage: "how often each replica reads and checks all of its files, at most 16 MiB/s; 0: never by itself", set: setScrubInterval},
		{name: "log-size", def: "64MiB", usage: "size of a shard's Raft log at which its store is flushed and the log cut; a restart applies at most that again", set: setLogSize},
	}, objectStoreSettings(), rebuildSettings(), checkpointSettings(), commonSettings("rocks", "1GiB", "info"))
}

// commonSettings are shared with the throw-away node.
func commonSettings(engine, memory, level string) []setting {
	return []setting{
		{name: "engine", def: engine, usage: "storage engine: rocks or mem; the same on all nodes, never changed", set: setEngine},
		{name: "memory", def: memory, usage: "memory budget, as 1GiB or 512MiB", set: setMemory},
		{name: "log-level", def: level, usage: "debug, info, warn or error", set: setLogLevel},
		{name: "log-format", def: "text", usage: "text or json", set: setLogFormat},
		{name: "pprof", def: "false", isBool: true, usage: "serve /debug/pprof over HTTP", set: func(c *config, v string) (err error) {
			if c.pprof, err = strconv.ParseBool(v); err != nil {
				return fmt.Errorf("%q is not true or false", v)
			}
			return nil
		}},
		{name: "fault-injection", def: "false", isBool: true, usage: "let faults be injected over HTTP; for tests, never in use", set: func(c *config, v string) (err error) {
			if c.faultInjection, err = strconv.ParseBool(v); err != nil {
				return fmt.Errorf("%q is not true or false", v)
			}
			return nil
		}},
	}
}

func setJoin(c *config, v string) error {
	c.join = nil
	for _, a := range strings.Split(v, ",") {
		if a = strings.TrimSpace(a); a == "" {
			continue
		}
		if _, _, err := splitAddress(a); err != nil {
			return err
		}
		c.join = append(c.join, a)
	}
	return nil
}

func setDrainTimeout(c *config, v string) error {
	d, err := time.ParseDuration(v)
	if err != nil || d <= 0 {
		return fmt.Errorf("%q is not a duration like 30s", v)
	}
	c.drainTimeout = d
	return nil
}

func setScrubInterval(c *config, v string) error {
	d, err := time.ParseDuration(v)
	if err != nil || d < 0 || d > 0 && d < time.Second {
		return fmt.Errorf("%q is not 0 or a duration of at least 1s, like 24h", v)
	}
	c.scrubInterval = d
	return nil
}

const (
	defaultLogSize = 64 << 20
	minLogSize     = 1 << 20
	maxLogSize     = 16 << 30
)

func setLogSize(c *config, v string) error {
	n, err := parseBytes(v)
	if err != nil {
		return err
	}
	if n < minLogSize || n > maxLogSize {
		return fmt.Errorf("%q is not between 1MiB and 16GiB", v)
	}
	c.logSize = n
	return nil
}

func setEngine(c *config, v string) error {
	if v != "rocks" && v != "mem" {
		return fmt.Errorf("%q is not rocks or mem", v)
	}
	c.engine = v
	return nil
}

const minMemory = 64 << 20

func setMemory(c *config, v string) error {
	n, err := parseBytes(v)
	if err != nil {
		return err
	}
	if n < minMemory {
		return fmt.Errorf("%q is below the minimum of 64MiB", v)
	}
	c.memory = n
	return nil
}

// parseBytes reads a size with a binary unit: B, KiB, MiB, GiB, TiB. A bare
// number would be a guess between bytes and megabytes, so it is refused.
func parseBytes(v string) (int64, error) {
	for i, unit := range []string{"KiB", "MiB", "GiB", "TiB", "B"} {
		digits, ok := strings.CutSuffix(v, unit)
		if !ok {
			continue
		}
		shift := 10 * (i + 1)
		if unit == "B" {
			shift = 0
		}
		n, err := strconv.ParseUint(strings.TrimSpace(digits), 10, 63)
		if err != nil || n > math.MaxInt64>>shift {
			break
		}
		return int64(n) << shift, nil
	}
	return 0, fmt.Errorf("%q is not a size like 1GiB or 512MiB", v)
}

func setLogLevel(c *config, v string) error {
	switch v {
	case "debug", "info", "warn", "error":
		return c.logLevel.UnmarshalText([]byte(v))
	}
	return fmt.Errorf("%q is not debug, info, warn or error", v)
}

func setLogFormat(c *config, v string) error {
	if v != "text" && v != "json" {
		return fmt.Errorf("%q is not text or json", v)
	}
	c.logFormat = v
	return nil
}

// register adds the settings as flags, and --config.
func register(flags *pflag.FlagSet, settings []setting) {
	flags.SortFlags = false
	for _, s := range settings {
		if s.isBool {
			flags.Bool(s.name, s.def == "true", s.usage)
		} else {
			flags.String(s.name, s.def, s.usage)
		}
	}
	flags.String("config", "", "YAML file with the same settings as keys")
}

// loadConfig gathers the settings from flags, environment, file and defaults
// (CN1). Errors name the setting and where its value came from.
func loadConfig(flags *pflag.FlagSet, environ []string, settings []setting) (*config, error) {
	c := &config{values: map[string]string{}, origins: map[string]string{}}
	known := map[string]*setting{}
	for i := range settings {
		known[settings[i].name] = &settings[i]
	}
	fromEnv, path, err := c.loadEnv(environ, settings)
	if err != nil {
		return nil, err
	}
	if f := flags.Lookup("config"); f != nil && f.Changed {
		path = f.Value.String()
	}
	fromFile := koanf.New("\x00")
	if path != "" {
		if fromFile, err = loadFile(path, known); err != nil {
			return nil, err
		}
	}
	for i := range settings {
		s := &settings[i]
		value, origin := s.def, "default"
		switch {
		case flags.Changed(s.name):
			value, origin = flags.Lookup(s.name).Value.String(), "flag --"+s.name
		case fromEnv.Exists(s.name):
			value, origin = fromEnv.String(s.name), "environment "+s.env()
		case fromFile.Exists(s.name):
			origin = "file " + path
			if value, err = scalar(fromFile.Get(s.name)); err != nil {
				return nil, usagef("%s (%s): %w", s.name, origin, err)
			}
		}
		c.values[s.name], c.origins[s.name] = value, origin
		if value == "" && origin == "default" {
			continue
		}
		if err := s.set(c, value); err != nil {
			return nil, usagef("%s (%s): %w", s.name, origin, err)
		}
	}
	return c, nil
}

// loadEnv reads our variables. Others with our prefix are remembered, not
// refused: container platforms add some of their own (KEELSTATE_PORT_...).
func (c *config) loadEnv(environ []string, settings []setting) (*koanf.Koanf, string, error) {
	names := map[string]string{}
	for i := range settings {
		names[settings[i].env()] = settings[i].name
	}
	path := ""
	k := koanf.New("\x00")
	err := k.Load(env.Provider("\x00", env.Opt{
		Prefix:      envPrefix,
		EnvironFunc: func() []string { return environ },
		TransformFunc: func(name, value string) (string, any) {
			if name == envPrefix+"CONFIG" {
				path = value
			} else if names[name] == "" {
				c.ignored = append(c.ignored, name)
			}
			return names[name], value
		},
	}), nil)
	sort.Strings(c.ignored)
	return k, path, err
}

func loadFile(path string, known map[string]*setting) (*koanf.Koanf, error) {
	k := koanf.New("\x00") // keys have no levels: a nested one is unknown as a whole
	if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
		return nil, usagef("config (%s): %w", path, err)
	}
	var unknown []string
	for key := range k.Raw() {
		if known[key] == nil {
			unknown = append(unknown, key)
		}
	}
	if len(unknown) > 0 {
		sort.Strings(unknown)
		return nil, usagef("config (%s): unknown keys: %s; `keelstate-node config explain` lists the known ones", path, strings.Join(unknown, ", "))
	}
	return k, nil
}

// scalar is the text of a YAML value: one thing, or a list of things.
func scalar(v any) (string, error) {
	switch v := v.(type) {
	case string:
		return v, nil
	case bool, int, int64, uint64:
		return fmt.Sprint(v), nil
	case nil:
		return "", nil
	case []any:
		parts := make([]string, len(v))
		for i, e := range v {
			s, err := scalar(e)
			if err != nil {
				return "", err
			}
			parts[i] = s
		}
		return strings.Join(parts, ","), nil
	default:
		return "", fmt.Errorf("use a text, a number, true, false or a list, not %T", v)
	}
}

// validate refuses what only all settings together can show.
func (c *config) validate() error {
	if c.nodeID == "" {
		return usagef("node-id is required: give --node-id, a name that no other node has")
	}
	if err := cluster.ValidateNodeID(base.NodeID(c.nodeID)); err != nil {
		return usageError{err}
	}
	if c.dataDir == "" {
		return usagef("data-dir is required: give --data-dir, a directory of this node's own")
	}
	if c.gossipAddr == "" && len(c.join) > 0 {
		return usagef("join needs gossip, which an empty gossip-addr turns off")
	}
	for _, a := range []struct {
		name, listen string
		advertised   *string
	}{
		{"grpc-addr", c.grpcAddr, &c.advertiseGRPC}, {"raft-addr", c.raftAddr, &c.advertiseRaft},
		{"gossip-addr", c.gossipAddr, &c.advertiseGossip}, {"http-addr", c.httpAddr, &c.advertiseHTTP},
	} {
		if a.listen == "" || *a.advertised != "" {
			continue
		}
		host, port, err := splitAddress(a.listen)
		if err != nil {
			return usagef("%s: %w", a.name, err)
		}
		if c.advertiseHost != "" {
			if port == 0 {
				return usagef("%s %s: advertise-host needs a fixed port", a.name, a.listen)
			}
			*a.advertised = net.JoinHostPort(c.advertiseHost, strconv.Itoa(port))
			continue
		}
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			return usagef("%s %s listens on all interfaces: say how others reach this node, with --advertise-host or --advertise-%s", a.name, a.listen, a.name)
		}
	}
	if err := c.validateObjects(); err != nil {
		return err
	}
	return c.checkCheckpoints()
}

func newConfigCommand(environ []string) *cobra.Command {
	explain := &cobra.Command{
		Use:   "explain",
		Short: "Print every setting, its value and where it comes from",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := loadConfig(cmd.Flags(), environ, nodeSettings())
			if err != nil {
				return err
			}
			return c.explain(cmd.OutOrStdout())
		},
	}
	register(explain.Flags(), nodeSettings())
	return group("config", "Look at the configuration", explain)
}

func (c *config) explain(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SETTING\tVALUE\tORIGIN")
	for _, s := range nodeSettings() {
		fmt.Fprintf(t, "%s\t%s\t%s\n", s.name, c.values[s.name], c.origins[s.name])
	}
	for _, name := range c.ignored {
		fmt.Fprintf(t, "(%s)\t\tenvironment, ignored: no setting of a node\n", name)
	}
	return t.Flush()
}
