# make demo            installs neginf into .venv and runs the quickstart, on whatever hardware there is
# make test            the same, then the tests; ARGS="tests/test_merge.py" goes to pytest
# make kernels-check   compiles every CUDA kernel (needs nvcc, no GPU); fails on any register spill
# make docs            builds the documentation into build/site; fails on a link that leads nowhere
# make lint            checks and formats with the tools of .pre-commit-config.yaml
#
# NEGINF_BACKENDS, NEGINF_HEAD_DIMS and MAX_JOBS mean what setup.py says.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: demo test kernels-check docs lint install clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

SOURCES := $(shell find csrc -type f) setup.py build_tools.py pyproject.toml
# One stamp per choice of back-ends and head_dims: another choice installs again.
INSTALLED := $(VENV)/.neginf+$(NEGINF_BACKENDS)+$(NEGINF_HEAD_DIMS)

# Threads that spin while they wait slow small problems down many times on a busy machine.
export OMP_WAIT_POLICY ?= passive

# Of pip's verbose report: a short line per compiled file, what the build says, what is installed.
PROGRESS := sed -unE -e 's,^ *(\[[0-9]+/[0-9]+\]) .* -c [^ ]*/(csrc/[^ ]+) -o .*,  \1 \2,p; t' \
    -e '/^  (neginf: |\[[0-9]+\/)|^(Collecting|Processing|Successfully)|csrc.*(error|warning): /p'

demo: $(INSTALLED)
	$(BIN)/python examples/quickstart.py

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

# The wheel's headers are all that is needed of CUTLASS, not the packages that it depends on.
kernels-check: | $(BIN)/python
	$(PIP) install -q --no-deps ninja $$($(BIN)/python -c \
	  'import build_tools as t; print("" if t.Cutlass.find() else t.CUTLASS_WHEEL)')
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/check_kernels.py

docs: $(INSTALLED)
	$(PIP) install -q -e '.[docs]'
	$(BIN)/mkdocs build --strict

lint: | $(BIN)/pre-commit
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

install: $(INSTALLED)

clean:
	rm -rf build dist $(VENV) python/neginf/*.so python/*.egg-info

$(BIN)/python:
	@echo "--- making $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(BIN)/pre-commit: | $(BIN)/python
	$(PIP) install -q pre-commit

# By itself, since it must be there before neginf is built against it, and since it is large.
$(VENV)/.torch: | $(BIN)/python
	@echo "--- installing torch (large, a minute or more; an existing one is kept)"
	@$(PIP) install 'torch>=2.11' | $(PROGRESS); echo "--- torch: $$SECONDS s"
	@touch $@

$(INSTALLED): $(SOURCES) | $(VENV)/.torch
	@echo "--- building and installing neginf and what its tests need"
	@$(PIP) install -v -e '.[test]' 2>&1 | tee $(VENV)/install.log | $(PROGRESS) || \
	  { tail -n 80 $(VENV)/install.log; echo "--- the whole report: $(VENV)/install.log"; exit 1; }; \
	  echo "--- neginf: $$SECONDS s"
	@rm -f $(VENV)/.neginf+*
	@touch $@
