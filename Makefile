# SPDX-License-Identifier: Apache-2.0
#
# `make help` lists the targets. Go and make are enough for build, test, lint and demo; generate needs clang and llvm
# of the one version below, race needs a C compiler.

# The committed BPF objects are byte for byte what this clang makes of bpf/ (Debian 12's clang). Another version makes
# other bytes, so `make generate` refuses it.
CLANG_VERSION := 14.0.6

GO      ?= go
CLANG   ?= $(shell command -v clang-14 || echo clang)
STRIP   ?= $(shell command -v llvm-strip-14 || echo llvm-strip)
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)

# Packages that are tested at once. Two, since some of them measure nothing but still want a core.
JOBS ?= 2

# The version comes from LDFLAGS alone: stamping would refuse a tree that belongs to another user.
export GOFLAGS := $(strip $(GOFLAGS) -buildvcs=false)

# The end-to-end tests run these binaries, as a user would.
export SHUNT_BIN    := $(CURDIR)/bin/shunt
export SHUNTSIM_BIN := $(CURDIR)/bin/shuntsim

E2E  := ./pkg/e2e/...
UNIT  = $(shell $(GO) list ./... | grep -v /pkg/e2e)
RACE  = $(shell $(GO) list ./pkg/... | grep -v -e /pkg/e2e -e /pkg/house)

.DEFAULT_GOAL := help
.PHONY: help build generate test race e2e bench bench-routing bench-datapath soak lint demo clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the static binaries bin/shunt and bin/shuntsim
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

generate: ## rebuild every generated file (needs clang and llvm-strip of the one version)
	@v=$$($(CLANG) --version 2>/dev/null | sed -n 's/.*clang version \([0-9.]*\).*/\1/p'); \
	if [ "$$v" != "$(CLANG_VERSION)" ]; then \
		echo "make generate: needs clang $(CLANG_VERSION), found $${v:-none} ($(CLANG)); Debian 12: apt-get install clang llvm" >&2; exit 1; fi
	@command -v $(STRIP) >/dev/null || { echo "make generate: needs $(STRIP); Debian 12: apt-get install llvm" >&2; exit 1; }
	BPF2GO_CC=$(CLANG) BPF2GO_STRIP=$(STRIP) $(GO) generate ./...

test: build ## run go vet and every test that this machine allows; says what was left out and why
	$(GO) vet ./...
	$(GO) run ./scripts/testsum -count=1 -vet=off -p $(JOBS) $(UNIT) -- -count=1 -vet=off -p 1 -timeout 20m $(E2E)

race: ## run the packages' tests but e2e under the race detector (needs a C compiler)
	@command -v $${CC:-gcc} >/dev/null || { echo "make race: the race detector needs a C compiler; Debian: apt-get install gcc libc6-dev" >&2; exit 1; }
	CGO_ENABLED=1 $(GO) run ./scripts/testsum -race -count=1 -vet=off -p $(JOBS) -timeout 20m $(RACE)

e2e: build ## run the end-to-end tests only, talking
	$(GO) test -count=1 -v -timeout 20m $(E2E)

# Published trace files in TRACES; without it the traffic is generated.
TRACES   ?=
POLICIES ?= round_robin,least_requests,least_tokens,session,prefix,llm-d,sglang,dynamo,aibrix,oracle,least_cost

bench-routing: build ## compare routing policies on traces (TRACES=DIR), and write bin/routing.html
	bin/shuntsim replay $(if $(TRACES),--traces $(TRACES)) --policies $(POLICIES) --backends 8 --load 0.7,0.85 --html bin/routing.html

bench: ## run the benchmarks
	$(GO) test -run '^$$' -bench . -benchmem -p 1 ./pkg/...

bench-datapath: ## time the kernel program by itself, each row against an empty one in the same run (needs root)
	$(GO) test -run '^$$' -bench '^BenchmarkDatapath$$' -benchtime 15x -timeout 20m ./pkg/datapath

bench-tokens: ## print what counting tokens costs, beside tiktoken-go in the same run
	@$(GO) test -run '^$$' -bench '^BenchmarkTable$$' -benchtime 1x -timeout 10m ./pkg/tokens/bpe | grep -v -e '^BenchmarkTable' -e '^PASS' -e '^goos' -e '^goarch' -e '^pkg'

soak: build ## run the long tests at full length: 40 minutes or so
	SHUNT_SOAK=1 $(GO) run ./scripts/testsum -count=1 -p 1 -timeout 3h -run 'Soak' ./pkg/...

lint: ## run golangci-lint if it is installed, else go vet and staticcheck
	@if command -v golangci-lint >/dev/null; then set -x; golangci-lint run ./...; \
	else set -x; $(GO) vet ./... && $(GO) tool staticcheck ./...; fi

demo: build ## show the whole main job on this machine: count, route, pin, steer
	bin/shuntsim demo --shunt bin/shunt

clean: ## remove what build made
	rm -rf bin .cache
