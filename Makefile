# `make demo` and `make test` need nothing but python3 >= 3.11 with venv, and a package index.
# Versions come from constraints.txt; an environment is made once and reused until its recipe changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
RECIPE := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo doctor test test-all test-reference test-cutlass lint format types layers check clean

help:  ## show these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

demo: $(VENV)/.demo  ## attention in a real small language model, and on a virtual B200
	$(BIN)/attn4 demo

doctor: $(VENV)/.demo  ## what this machine can run, and why not the rest
	$(BIN)/attn4 doctor

test: $(VENV)/.dev  ## the fast selection
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: $(VENV)/.dev  ## every test; those that need a GPU skip without one
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-reference: $(VENV)/.reference  ## kernels of flash-attn-4 on the emulator (installs it; about 15 minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/reference_kernels

test-cutlass: $(VENV)/.dev  ## examples of NVIDIA/cutlass on the emulator; CUTLASS=folder of a checkout
	CUTLASS=$(abspath $(CUTLASS)) $(BIN)/python -m pytest -n 2 --dist worksteal tests/cutlass_examples

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev  ## mypy, strict, on everything but the kernels
	$(BIN)/mypy

layers: $(VENV)/.dev  ## the direction of imports
	$(BIN)/lint-imports

check: test lint types layers  ## all that CI runs

clean:  ## remove the environment and the caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist

$(BIN)/python:
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attn4 needs Python 3.11 or newer")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(RECIPE) | $(BIN)/python
	@echo "installing attn4 for the demo (a few minutes the first time)"
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(RECIPE) | $(BIN)/python
	@echo "installing attn4 for development (a few minutes the first time)"
	$(PIP) -e '.[gpu,bench,demo,dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.reference: $(RECIPE) | $(VENV)/.dev
	@echo "installing flash-attn-4 (about 1 GB with triton)"
	$(PIP) -e '.[gpu,emulator,dev,reference]'
	@touch $@
