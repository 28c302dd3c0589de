# Trireme: `make demo` sets up and trains a model; `make test` is everything CI runs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; print(sys.version_info >= (3, 11) and "$(name)" or "")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
PYTEST_WORKERS ?= 4
FAULTS ?= 30

.PHONY: help setup demo test lint tools types pytest clients openapi dashboard soak compose-test format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(MAKEFILE_LIST) | while read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## create .venv and install everything into it (done by the other targets when needed)

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "Trireme needs Python 3.11 or later; python3 is $$(python3 --version 2>&1 || true). Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; fi
	@if [ ! -x $(BIN)/python ]; then \
		echo "==> creating $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 2; }; fi
	@echo "==> installing torch $(TORCH) (the long part, once)"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check 'torch==$(TORCH)'
	@echo "==> installing trireme and what it needs"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib >/dev/null || true  # on all cores; some packages have files for other versions of Python
	@touch $@

demo: $(STAMP) ## set up, then train examples/digits with 2 trainers and 2 parameter servers
	@echo "==> training examples/digits with 2 trainers and 2 parameter servers"
	@$(BIN)/trireme run examples/digits/digits.py --job demo --trainers 2 --pservers 2 --fresh

test: lint ## ruff, mypy --strict, pytest: what CI runs
	@$(MAKE) --no-print-directory -j 3 types tools pytest  # mypy, on one core for long, and downloads beside the first tests

lint: $(STAMP) ## ruff: rules and format
	@echo "==> ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

tools: $(STAMP) ## generators of API clients, packages of the dashboard, and node for them; once (a test that needs them waits)
	@$(BIN)/python -m clients.tools

types: $(STAMP) ## mypy --strict
	@echo "==> mypy"
	@$(BIN)/mypy

pytest: export PYTHONDONTWRITEBYTECODE :=  # tests start hundreds of interpreters; each would compile Trireme again
pytest: $(STAMP) ## the tests (without those marked soak)
	@$(BIN)/python -c 'from trireme_shared.tables.first_use import compile_loops; compile_loops()'  # once, not in each of the processes at once
	@$(BIN)/python -m pytest -qq --collect-only -m 'not soak' >/dev/null || true  # compiles the tests: the same; the next line says what is wrong
	@echo "==> pytest on $(PYTEST_WORKERS) processes"
	@$(BIN)/python -m pytest -q -m 'not soak' -n $(PYTEST_WORKERS) --dist worksteal

soak: $(STAMP) ## break a job in all ways, compare every bit: make soak [SEED="1 2"] [FAULTS=30] [TRANSPORT="tcp shm"] [MODE=async] [STRATEGY=collective [EXCHANGE=native]] [WORKLOAD=digits] [KINDS="cut-etcd kill-two"]
	@$(BIN)/python -m tests.soak --faults $(FAULTS) $(if $(SEED),--seed $(SEED)) $(if $(TRANSPORT),--transport $(TRANSPORT)) \
		$(if $(MODE),--mode $(MODE)) $(if $(STRATEGY),--strategy $(STRATEGY)) $(if $(EXCHANGE),--exchange $(EXCHANGE)) $(if $(WORKLOAD),--workload $(WORKLOAD)) $(if $(KINDS),--kinds $(KINDS))

clients: $(STAMP) openapi ## generate clients from openapi.json into build/clients and check their types; derive the synchronous Python client
	@$(BIN)/python -m clients.derive_sync
	@$(BIN)/python -m clients.generate openapi.json build/clients --go

openapi: $(STAMP) ## write openapi.json: the REST API as a document
	@$(BIN)/python -m clients.write_openapi

dashboard: $(STAMP) ## build the page at a master's / from master_service/dashboard/source
	@$(BIN)/python -m clients.build_dashboard

compose-test: $(STAMP) ## with the programs of Docker: build the image, docker compose up, train, resize, kill containers, restart the Engine, compare every bit: make compose-test [ENGINE=FOLDER] [ONLY="volumes restarts s3"]
	@$(BIN)/python -m tests.compose $(if $(ENGINE),--engine $(ENGINE)) $(foreach part,$(ONLY),--only $(part))

format: $(STAMP) ## rewrite the sources in the house format
	@$(BIN)/ruff check --quiet --fix . && $(BIN)/ruff format --quiet .

clean: ## remove .venv, runs and caches
	@rm -rf $(VENV) .trireme .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist ./*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
