# One command each; the first of them makes .venv. `make` alone lists them.
# ARGS passes options on:  make test ARGS="-k least_squares -x"

# python3.11 if it runs (a pyenv shim may exist and not run), else python3. Override: make test PYTHON=python3.12
PYTHON ?= $(shell python3.11 -c '' >/dev/null 2>&1 && echo python3.11 || echo python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
WHEEL := build/types

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-all chaos lint types bench clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(INSTALLED) ## train an editor on the built-in world and edit its model
	@$(BIN)/malmen quickstart $(ARGS)

# Three processes on two cores: the one with Ray waits most of the time. To debug: make test ARGS="-n 0 --pdb -k NAME"
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder --durations 12 --durations-min 5

test: $(INSTALLED) ## run the tests that take 4 minutes: every law, the slow ones left out
	@$(PYTEST) -m "not slow and not chaos" $(ARGS)

test-all: $(INSTALLED) ## run all tests, those of `make chaos` included
	@$(PYTEST) $(ARGS)

chaos: $(INSTALLED) ## kill every part of training and of the endpoint, and see that nothing is lost
	@$(BIN)/python -m pytest -m chaos $(ARGS)

lint: $(INSTALLED) ## ruff: rules and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

# mypy at the root would follow malmen/ only and be green whatever stands in platform/, tune/ and serve/. So it checks
# the package as a user has it: built as a wheel, installed elsewhere, looked at from there.
types: $(INSTALLED) ## mypy on the built wheel
	@rm -rf build
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target $(WHEEL) .
	@cd $(WHEEL) && "$(CURDIR)/$(BIN)/mypy" --package malmen \
		--config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache"

bench: $(INSTALLED) ## the benchmarks, small
	@$(BIN)/python benchmarks/solve.py --tokens 128 1024
	@$(BIN)/python benchmarks/meta_step.py --model gpt2 --edits 64 --steps 1

clean: ## remove caches and build products (.venv and runs/ stay)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# A change of either file installs again into the same venv, which takes seconds when little has changed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and 1)' || { \
		echo "malmen needs Python 3.11 or newer; $(PYTHON) answers: $$($(PYTHON) --version 2>&1 | tail -1)" >&2; \
		echo "Name one that is: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv: the first time takes a few minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
