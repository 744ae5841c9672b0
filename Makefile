# The one task runner. Each target makes the environment it needs; `make check` is what CI runs.

PYTHON ?= python3
# More than there are cores: tests wait for other processes as much as they work. Each begins with neighbouring tests,
# which share daemons, and takes from others when it has nothing left.
PYTEST_WORKERS ?= 6
PYTEST := -n $(PYTEST_WORKERS) --dist worksteal
# Tests start hundreds of processes: none should compile what another has compiled.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
RUNTIME_STAMP := $(VENV)/.runtime
STAMP := $(VENV)/.installed
# There while tests marked browser can run: chromium is the system's, what drives it is in a lock of its own.
BROWSER_STAMP := $(VENV)/.browser
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
PROVE_VENV := .venv-prove
PROVE_STAMP := $(PROVE_VENV)/.installed
PROVE_NODE := examples/prove/node_modules
PIP_FLAGS := --quiet --disable-pip-version-check
# Python compiles what it imports; compiling all that is there would take longer than the rest.
PIP_TELLS := --no-compile --progress-bar off --disable-pip-version-check
RUNTIME_LOCK := requirements/runtime.lock
LOCKS := requirements/extras.lock requirements/dev.lock
# Each package by name as it comes. A pipe ends with the status of its last command, so pip's is kept in a file.
NAMED := while read -r verb what _; do case $$verb in \
  Collecting|Processing) echo "  $${what\#\#*/}";; Installing) echo "  writing the files";; esac; done
install = (status=0; $(BIN)/python -u -m pip install $(1) || status=$$?; echo $$status > $(VENV)/.status) | $(NAMED); \
  exit $$(cat $(VENV)/.status)
CHECKED := $(wildcard src tests bench examples scripts)

.DEFAULT_GOAL := help
.PHONY: help setup run browser test test-matrix test-all test-postgres cluster test-pythons check lint types fmt docs bench prove clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## prepare .venv with all that is pinned: the core, the extras, the tools

# What `make run` needs: the core alone. A stamp is touched last, so an interrupted install is done again.
$(RUNTIME_STAMP): $(RUNTIME_LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Covenant needs Python 3.11 or later")'
	@echo "making $(VENV) for $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing the $$(grep -c == $(RUNTIME_LOCK)) packages of $(RUNTIME_LOCK)"
	@$(call install,$(PIP_TELLS) --require-hashes -r $(RUNTIME_LOCK))
	@echo "installing covenant from this folder"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

$(STAMP): $(RUNTIME_STAMP) $(LOCKS)
	@echo "installing the $$(cat $(LOCKS) | grep -c ==) packages of the extras and of what checks and tests: once, for minutes"
	@$(call install,$(PIP_TELLS) --require-hashes $(LOCKS:%=-r %))
	@touch $@

# Other queues stay out of .venv: what is measured must not change what is shipped. The lock is complete, and pip
# takes a dependency with an extra (psycopg[pool]) for one without a hash: so it installs what is listed and no more.
$(BENCH_STAMP): requirements/bench.lock
	@echo "preparing $(BENCH_VENV)"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps --require-hashes -r requirements/bench.lock
	@touch $@

# The servers of others that the kit kills, in Python and in JavaScript. Without npm the latter are left out.
$(PROVE_STAMP): requirements/prove.lock examples/prove/package-lock.json
	@echo "preparing $(PROVE_VENV)"
	@$(PYTHON) -m venv $(PROVE_VENV)
	@$(PROVE_VENV)/bin/python -m pip install $(PIP_FLAGS) --require-hashes -r requirements/prove.lock
	@if command -v npm >/dev/null; then echo "preparing $(PROVE_NODE)"; npm ci --silent --prefix examples/prove; fi
	@touch $@

run: $(RUNTIME_STAMP) ## start the daemon with a sample agent, and say what to try next
	@$(BIN)/covenant serve --demo

# A folder in memory, if there is one with room for what a run writes, and programs may be started there.
MEMORY = $(shell [ "$$(df -k /dev/shm 2>/dev/null | awk 'END {print $$4}')" -gt 4000000 ] 2>/dev/null \
  && ! grep -q ' /dev/shm [^ ]* [^ ]*noexec' /proc/mounts && echo /dev/shm)
# Quick: files are in memory, where a sync costs nothing, and properties are tried with fewer examples. CI runs
# the same tests on the disk and with all examples (`test-matrix`). What a failed run wrote is kept.
test: setup ## run the tests except the matrices and those that need root
	@export TMPDIR=$$(mktemp -d $(MEMORY:%=-p %)) && chmod 711 $$TMPDIR && \
	$(BIN)/python -m pytest $(PYTEST) --hypothesis-profile=quick $(ARGS) && rm -rf $$TMPDIR

# Where there is no chromium, or nothing to drive it with, tests marked browser are left out by name of their mark.
browser: setup
	@rm -f $(BROWSER_STAMP); command -v chromium >/dev/null \
	  && $(BIN)/python -m pip install $(PIP_FLAGS) --no-compile --require-hashes -r requirements/browser.lock \
	  && touch $(BROWSER_STAMP) || echo "no chromium, or nothing to drive it with: leaving out the tests marked browser"

test-matrix: browser ## run those, the matrices and the browser tests, as CI does
	@$(BIN)/python -m pytest $(PYTEST) \
	  -m "not slow and not root$$(test -e $(BROWSER_STAMP) || echo ' and not browser')" $(ARGS)

# Tests that need root are left out loudly, by name of their mark, rather than skipped one by one.
test-all: browser ## run every test: the long matrices and, as root, the tests that need root
	@test "$$(id -u)" = 0 || echo "not root: leaving out the tests marked root"
	@$(BIN)/python -m pytest $(PYTEST) --hypothesis-profile=thorough --timeout 1800 \
	  -m "(slow or not slow)$$(test "$$(id -u)" = 0 || echo ' and not root')$$(test -e $(BROWSER_STAMP) || echo ' and not browser')" $(ARGS)

# The suites above the ledger once more, on a PostgreSQL that is started for them, or on the one that COVENANT_TEST_PG names.
ON_POSTGRES := tests/conformance tests/doors tests/agents tests/outbound tests/simple tests/e2e/peers
test-postgres: setup ## run the suites of the doors, the agents and the peers on PostgreSQL
	@COVENANT_TEST_LEDGER=postgres $(BIN)/python -m pytest $(PYTEST) \
	  -m "not slow and not root and not matrix and not browser and not embedded" $(or $(ARGS),$(ON_POSTGRES))

cluster: setup ## three daemons and a PostgreSQL with a standby under every fault, for twenty minutes
	@$(BIN)/python -m tests.cluster $(ARGS)

# Each in an environment of its own, .venv-3.12 and so on. An interpreter that is not here is left out, by name.
PYTHONS ?= 3.11 3.12 3.13
test-pythons: ## run the tests on each of PYTHONS that is installed
	@failed=; for version in $(PYTHONS); do \
	  if ! python$$version -c '' 2>/dev/null; then echo "python$$version is not here: left out"; continue; fi; \
	  echo "testing on $$(python$$version --version)"; \
	  $(MAKE) --no-print-directory test VENV=.venv-$$version PYTHON=python$$version || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed on:$$failed"; exit 1; }

check: lint types ## format check, lint, strict types, then the tests and the matrices: what CI runs
	@$(MAKE) --no-print-directory test-matrix

lint: setup
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/ruff check $(CHECKED)

types: setup
	@$(BIN)/mypy $(CHECKED)

fmt: setup ## format, and fix what the linter can fix safely
	@$(BIN)/ruff format $(CHECKED)
	@$(BIN)/ruff check --fix --exit-zero $(CHECKED)

docs: setup ## write the generated documents again
	@$(BIN)/python scripts/generate_docs.py
	@$(BIN)/python scripts/state_diagram.py

bench: setup $(BENCH_STAMP) ## measure, next to other queues in .venv-bench
	@$(BIN)/python -m bench $(ARGS)

prove: setup $(PROVE_STAMP) ## kill each server of examples/prove, and write docs/durability
	@$(BIN)/python scripts/prove_servers.py $(ARGS)

clean: ## remove the environments and caches
	rm -rf $(VENV) .venv-[0-9]* $(BENCH_VENV) $(PROVE_VENV) $(PROVE_NODE) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
