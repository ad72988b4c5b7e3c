package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/objectstore/metered"
	"github.com/keelstate/keelstate/objectstore/retry"
	"github.com/keelstate/keelstate/objectstore/s3"
)

// objects says where the objects of checkpoints go.
type objects struct {
	uri string // as configured; empty: nowhere
	dir string // of a file store
	s3  s3.Options
	// rebuildFromStore: replicas that are rebuilt read from it what it has.
	rebuildFromStore bool
}

func objectStoreSettings() []setting {
	return []setting{
		{name: "object-store", usage: "where checkpoints go, the same on all nodes: s3://bucket/prefix, or file:///dir, a directory that all nodes share; empty: checkpoints are refused", set: setObjectStore},
		{name: "object-store-endpoint", usage: "service of an s3 store, as https://host:port, or http:// for one without TLS (default: Amazon's)", set: setEndpoint},
		{name: "object-store-region", usage: "region of the bucket (default: the service is asked)", set: text(func(c *config) *string { return &c.objects.s3.Region })},
		{name: "object-store-path-style", def: "auto", usage: "name the bucket in the path of requests, not in the host: true, false, or auto: true except at services that are known to want the other", set: setPathStyle},
		{name: "object-store-ca-file", usage: "PEM file of the authorities that sign the service's certificate (default: the system's)", set: text(func(c *config) *string { return &c.objects.s3.CAFile })},
		{name: "object-store-anonymous", def: "false", isBool: true, usage: "send requests to an s3 store unsigned, without credentials", set: func(c *config, v string) (err error) {
			if c.objects.s3.Anonymous, err = strconv.ParseBool(v); err != nil {
				return fmt.Errorf("%q is not true or false", v)
			}
			return nil
		}},
	}
}

// rebuildSettings say what else the store is for, whatever its kind.
func rebuildSettings() []setting {
	return []setting{
		{name: "rebuild-from", def: "peer", usage: "where a replica that is rebuilt gets the files of its shard: peer (its leader), or store: the object store as far as it has the leader's files, which it has where the leader uploads the shard", set: setRebuildFrom},
	}
}

func setRebuildFrom(c *config, v string) error {
	if v != "peer" && v != "store" {
		return fmt.Errorf("%q is not peer or store", v)
	}
	c.objects.rebuildFromStore = v == "store"
	return nil
}

// storeURI parses the name of a store. What may hold a secret is not repeated.
func storeURI(v string) (*url.URL, error) {
	scheme, rest, ok := strings.Cut(v, "://")
	if !ok {
		if filepath.IsAbs(v) {
			return nil, fmt.Errorf("%q has no scheme: use file://%s", v, v)
		}
		return nil, fmt.Errorf("%q is not s3://bucket/prefix or file:///dir", v)
	}
	if authority, _, _ := strings.Cut(rest, "/"); strings.Contains(authority, "@") {
		return nil, errors.New("credentials do not belong here: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for the node, or use the shared credentials file")
	}
	u, err := url.Parse(v)
	if err != nil || u.RawQuery != "" || u.Fragment != "" || u.ForceQuery {
		return nil, fmt.Errorf("%q is not s3://bucket/prefix or file:///dir, without '?' and '#'", v)
	}
	if scheme != "s3" && scheme != "file" {
		return nil, fmt.Errorf("%q is of no known kind: use s3://bucket/prefix or file:///dir", v)
	}
	return u, nil
}

func setObjectStore(c *config, v string) error {
	c.objects.uri, c.objects.dir, c.objects.s3.Bucket, c.objects.s3.Prefix = v, "", "", ""
	if v == "" {
		return nil
	}
	u, err := storeURI(v)
	if err != nil {
		return err
	}
	if u.Scheme == "file" {
		if u.Host != "" || !filepath.IsAbs(u.Path) || filepath.Clean(u.Path) == "/" {
			return fmt.Errorf("%q: give the directory from the root on, with three slashes: file:///dir", v)
		}
		c.objects.dir = filepath.Clean(u.Path)
		return nil
	}
	c.objects.s3.Bucket, c.objects.s3.Prefix = u.Host, strings.Trim(u.Path, "/")
	if err := s3.CheckBucket(c.objects.s3.Bucket); err != nil {
		return fmt.Errorf("%q: %w", v, err)
	}
	if p := c.objects.s3.Prefix; p != "" {
		if err := objectstore.CheckKey(p); err != nil {
			return fmt.Errorf("%q: the prefix: %w", v, err)
		}
	}
	return nil
}

func setEndpoint(c *config, v string) error {
	scheme, host, ok := strings.Cut(v, "://")
	if !ok {
		scheme, host = "https", v
	}
	host = strings.TrimSuffix(host, "/")
	if strings.Contains(host, "@") {
		return errors.New("use https://host:port, without credentials")
	}
	if v != "" && (scheme != "http" && scheme != "https" || s3.CheckEndpoint(host) != nil) {
		return fmt.Errorf("%q is not https://host:port or http://host:port", v)
	}
	c.objects.s3.Endpoint, c.objects.s3.Insecure = host, scheme == "http"
	return nil
}

func setPathStyle(c *config, v string) error {
	switch v {
	case "auto":
		c.objects.s3.Addressing = s3.AddressAuto
	case "true":
		c.objects.s3.Addressing = s3.AddressPath
	case "false":
		c.objects.s3.Addressing = s3.AddressHost
	default:
		return fmt.Errorf("%q is not true, false or auto", v)
	}
	return nil
}

// validateObjects refuses what only the settings together can show.
func (c *config) validateObjects() error {
	if c.objects.s3.Bucket == "" {
		for _, s := range objectStoreSettings()[1:] {
			if v := c.values[s.name]; v != "" && v != s.def {
				return usagef("%s (%s) is for an s3 store: give --object-store s3://bucket/prefix, or leave it out", s.name, c.origins[s.name])
			}
		}
	}
	if c.objects.s3.Insecure && c.objects.s3.CAFile != "" {
		return usagef("object-store-ca-file is for TLS: let object-store-endpoint begin with https://")
	}
	if c.objects.dir == "" {
		return nil
	}
	data, err := filepath.Abs(c.dataDir)
	if err != nil {
		return usagef("data-dir: %w", err)
	}
	if within(c.objects.dir, data) || within(data, c.objects.dir) {
		return usagef("object-store %s and data-dir %s lie in each other: a checkpoint must outlive the node's directory; give the store one that all nodes share", c.objects.uri, c.dataDir)
	}
	return nil
}

// within says whether a path is dir or below it.
func within(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}

// openObjects makes the configured store. It asks it nothing: the node serves its
// state whether the store is there or not.
func (p *process) openObjects() error {
	o := p.conf.objects
	if o.uri == "" {
		return nil
	}
	var base objectstore.Store
	if o.dir != "" {
		base = file.New(o.dir)
	} else {
		s, err := s3.Open(o.s3)
		if err != nil {
			return usagef("object-store %s, with what object-store-... say of it: %w", o.uri, err)
		}
		base = s
	}
	m, err := metered.NewMetrics(p.registry)
	if err != nil {
		return errors.Join(fmt.Errorf("registering the object store's figures: %w", err), base.Close())
	}
	p.attempts = metered.Wrap(base, m)
	// One budget of repeats for all of the node's shards.
	p.objects = retry.Wrap(p.attempts, retry.Options{Budget: retry.DefaultBudget(), Repeated: m.Repeated})
	return nil
}

const (
	probeTimeout   = 30 * time.Second
	firstReprobe   = time.Minute
	longestReprobe = time.Hour
)

// watchObjects says in the log whether the store does what it must, until it does:
// an operator should hear of a mistake now, not from the first checkpoint.
func (p *process) watchObjects() {
	defer p.loops.Done()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-p.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	for pause := firstReprobe; ; pause = min(2*pause, longestReprobe) {
		err := p.probeObjects(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			p.log.Info("the object store serves", "store", p.conf.objects.uri)
			return
		}
		p.log.Warn("the object store does not serve: checkpoints will fail; state is served all the same", "store", p.conf.objects.uri, "error", err, "again", pause)
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

func (p *process) probeObjects(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return objectstore.Probe(ctx, p.attempts)
}
