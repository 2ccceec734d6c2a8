# Every target works on a fresh checkout: `setup` makes the virtual environment the others use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Installs the CPU build of torch unless told otherwise, e.g. `make setup TORCH=torch==2.13.0+cu130`.
TORCH ?= torch==2.13.0

.PHONY: help setup serve test test-fast chaos lint bench bench-engine wheel clean
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## virtual environment with pinned dependencies
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

serve: setup     ## the example deployment on http://127.0.0.1:8000
	$(BIN)/gearshift serve $(CONFIG)

test: setup      ## all tests, with real Ray, Redis and weights
	$(BIN)/python -m pytest

test-fast: setup ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow and not e2e"

chaos: setup     ## kill processes under load for CHAOS_SECONDS (120): is every request accounted for?
	$(BIN)/python -m pytest -m chaos

lint: setup      ## style and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: setup     ## the gateway's cost against a bare FastAPI route
	$(BIN)/gearshift bench gateway

bench-engine: setup ## the engine against its floor and transformers, 25 minutes
	$(BIN)/gearshift bench engine --vs transformers --streams 1,4,16,32 --json engine.json --plot engine.png

wheel: setup     ## dist/*.whl
	$(BIN)/python -m build --wheel

clean:           ## remove what the targets made
	rm -rf $(VENV) dist build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
