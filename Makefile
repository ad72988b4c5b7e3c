# Keelstate. `make help` lists the targets. On Debian each target first installs
# what the machine lacks (build/deps.sh) and says so.

SHELL := /bin/sh
.DEFAULT_GOAL := help

GO ?= go
# Which RocksDB `make build` and `make bench` link: debian (the distribution's
# shared library, with assertions), release (the static library that
# `make rocksdb-release` made), or auto (release when it is there).
# Tests always use Debian's.
ROCKSDB ?= auto
# Parallel jobs of `make rocksdb-release`.
JOBS ?= 2
# Time for each fuzz target of `make fuzz`.
FUZZTIME ?= 10s
# Arguments of `make stress`.
PKG ?= ./...
RUN ?= .
COUNT ?= 20
# Arguments of `make jepsen` (and, if given, of `make soak`): how long episodes are
# begun, and the seed; one is drawn if it is empty.
DURATION ?= 5m
SEEDS ?= 1-20
KIND ?= mixed
HOURS ?= 1
SEED ?=
# Extra arguments of the scripts behind demo, up, down, status and bench, and of
# `keelstate-jepsen run` behind jepsen and soak.
ARGS ?=

PROTOC_GEN_GO := google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
PROTOC_GEN_GO_GRPC := google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.0

release_dir := $(CURDIR)/.deps/rocksdb-release
release_made := $(wildcard $(release_dir)/stamp)
ifeq ($(ROCKSDB),auto)
  rocksdb := $(if $(release_made),release,debian)
else
  rocksdb := $(ROCKSDB)
endif
ifeq ($(rocksdb),release)
  ifeq ($(release_made),)
    $(if $(filter build bench node,$(MAKECMDGOALS)),$(error ROCKSDB=release needs `make rocksdb-release` first))
  endif
  # The directory holds only librocksdb.a, so that -lrocksdb (in grocksdb and in
  # engine/rocks) links it statically. NDEBUG as in the library itself: the
  # headers must agree with it.
  rocksdb_env := CGO_ENABLED=1 \
    CGO_CFLAGS="-O2 -g -I$(release_dir)/include" \
    CGO_CXXFLAGS="-O2 -g -DNDEBUG -I$(release_dir)/include" \
    CGO_LDFLAGS="-O2 -g -L$(release_dir)/lib"
else ifeq ($(rocksdb),debian)
  rocksdb_env := CGO_ENABLED=1
else
  $(error ROCKSDB must be auto, debian or release, not $(ROCKSDB))
endif

runtests := $(GO) run ./internal/ci/runtests

# What `keelstate-jepsen run` tells the report of the tree that it tests.
jepsen_run = bin/keelstate-jepsen run $(if $(SEED),--seed $(SEED)) --revision "$$(git describe --always --dirty --abbrev=12)"

.PHONY: help deps tools build node keelctl flights harness jepsen soak rocksdb-release test test-long unit race stress chaos mutants \
  meta crash fuzz bench demo up down status lint golangci proto proto-check fmt vet clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: ROCKSDB=auto|debian|release JOBS= FUZZTIME= PKG= RUN= COUNT= ARGS="

deps: ## install what the build needs and the machine lacks
	@build/deps.sh

tools: deps ## build what tests run beside the product, once, into .deps/bin (versitygw; about 90 s of one core)
	@GO="$(GO)" build/tools.sh

build: node keelctl harness flights ## build bin/keelstate-node, keelctl, keelstate-jepsen and the examples

# Every binary is rebuilt by Go, which knows best what is up to date.
node: deps
	@if [ -d cmd/node ]; then \
	  echo "building bin/keelstate-node (RocksDB: $(rocksdb))"; \
	  $(rocksdb_env) $(GO) build -trimpath -o bin/keelstate-node ./cmd/node; fi
keelctl: deps
	@if [ -d cmd/keelctl ]; then \
	  echo "building bin/keelctl"; CGO_ENABLED=0 $(GO) build -trimpath -o bin/keelctl ./cmd/keelctl; fi
flights: deps
	@if [ -d examples/flights ]; then \
	  echo "building bin/flights"; CGO_ENABLED=0 $(GO) build -trimpath -o bin/flights ./examples/flights; fi
harness: deps
	@if [ -d cmd/keelstate-jepsen ]; then \
	  echo "building bin/keelstate-jepsen"; CGO_ENABLED=0 $(GO) build -trimpath -o bin/keelstate-jepsen ./cmd/keelstate-jepsen; fi

rocksdb-release: deps ## build and cache RocksDB without assertions in .deps (about 9 minutes)
	@JOBS=$(JOBS) build/rocksdb-release.sh

test: deps tools ## run all stages and end with "N passed, N failed, N skipped"
	@$(runtests)

test-long: deps tools ## the same, with the race detector everywhere, repetitions and fuzzing
	@$(runtests) -long

unit: deps ## unit tests only
	@$(runtests) -stages unit

race: deps ## the concurrent packages under the race detector
	@$(runtests) -stages race

stress: deps ## repeat tests under the race detector: PKG= RUN= COUNT=
	$(GO) test -race -failfast -count=$(COUNT) -run '$(RUN)' $(PKG)

meta: deps ## random operations against a model
	@$(runtests) -stages meta

crash: deps ## tests that crash or kill what they test
	@$(runtests) -stages crash

chaos: deps ## simulated clusters, and real ones under faults, for some minutes
	@$(runtests) -stages chaos

fuzz: deps ## run each fuzz target for FUZZTIME
	@$(runtests) -stages fuzz -fuzztime $(FUZZTIME)

jepsen: node keelctl harness ## real nodes under faults, judged: DURATION= SEED= ARGS= (docs/jepsen.md)
	@$(jepsen_run) --duration $(DURATION) $(ARGS)

sim: deps ## the cluster in simulated time, an hour for each seed: SEEDS=1-20 KIND=storms|days|mixed|weeks|rollbacks HOURS=1
	$(GO) test ./internal/sim/steps -run 'TestSteps|TestCheckpoints$$|TestRollbacks$$' -count=1 -timeout 0 -v -steps.seeds 50 -steps.checkpoint-seeds 500 -steps.rollback-seeds 100
	$(GO) test ./internal/sim -run TestSimulation -count=1 -timeout 0 -v -sim.kind $(KIND) -sim.seeds $(SEEDS) -sim.hours $(HOURS)

soak: node keelctl harness ## the same for 150 minutes (or DURATION=), in long episodes
	@$(jepsen_run) --duration $(if $(filter file,$(origin DURATION)),150m,$(DURATION)) --episode 3m $(ARGS)

# Each planted bug is built with an overlay and hunted with the simulation, then
# with real processes: -by, -only and more in ARGS (jepsen/mutants).
mutants: deps ## plant bugs and see who finds them: ARGS= (jepsen/mutants/RESULTS.md)
	@$(rocksdb_env) $(GO) run ./jepsen/mutants/run $(ARGS)

bench: deps ## run the benchmarks of docs/benchmarks.md
	@$(rocksdb_env) ROCKSDB_BUILD=$(rocksdb) scripts/bench.sh $(ARGS)

demo: deps ## three nodes, the flights job, a killed leader, the right answer
	@scripts/demo.sh $(ARGS)

up: deps ## start three nodes on loopback for play
	@scripts/up.sh $(ARGS)

down: ## stop them
	@scripts/down.sh $(ARGS)

status: ## show them
	@scripts/status.sh $(ARGS)

lint: deps ## vet, gofmt, layering, dependencies
	@$(runtests) -stages checks

golangci: deps ## golangci-lint, where it is installed (opt-in; not part of make test)
	@command -v golangci-lint >/dev/null || { echo "golangci-lint is not installed; make lint needs nothing" >&2; exit 1; }
	golangci-lint run

# Generated code is committed, so only a change of api/proto needs this.
proto: ## regenerate api/keelstatepb from api/proto
	@build/deps.sh protobuf-compiler
	@GO="$(GO)" build/proto.sh api/keelstatepb $(PROTOC_GEN_GO) $(PROTOC_GEN_GO_GRPC)

proto-check: ## fail if api/keelstatepb is not what api/proto generates
	@build/deps.sh protobuf-compiler
	@GO="$(GO)" build/proto.sh --check api/keelstatepb $(PROTOC_GEN_GO) $(PROTOC_GEN_GO_GRPC)

fmt: ## gofmt all Go files of the repository
	@git ls-files -co --exclude-standard '*.go' | grep -v '\.pb\.go$$' | xargs gofmt -l -w

vet: deps ## go vet
	$(GO) vet ./...

clean: ## remove binaries and the demo's leavings (keeps .deps and a played-with cluster)
	rm -rf bin .demo coverage.out
