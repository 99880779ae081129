# The two commands are `make demo` and `make test`. Each makes .venv and installs what it needs the first time.
# Everything else is for people who change infer; CONTRIBUTING.md explains it.

PYTHON ?= python3
JOBS ?= 2
QUESTION ?= What is the capital of France? Answer in one sentence.

VENV := .venv
BIN := $(VENV)/bin
RESULTS := results/tests.json
# The name of the stamp changes with what is to be installed, so a second run does nothing.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# A CUDA build of torch brings the Triton it was made for. Beside a CPU build the tests of the GPU kernels need the one whose
# compiler the budgets are of; what other packages bring is any.
TRITON := triton==3.6.0
TRITON_STAMP := $(VENV)/.installed-$(subst ==,-,$(TRITON))
# Written with "=": pytest takes a separate word that exists for the place to look for conftest.py, and finds no options.
PYTEST := $(BIN)/pytest tests --results=$(RESULTS) --fail-on-skip --durations=10

# The same tests on the platform of plain torch: those that may build an engine, and of them a few minutes' worth.
ON_REFERENCE := INFER_PLATFORM=reference $(BIN)/pytest --fail-on-skip --durations=10 -m "not heavy and not gpu"
BUILD_ENGINES := $(addprefix tests/,integration plugin_package $(addprefix unit/,backends cli engine models quantization weights))
SMOKE := $(addprefix tests/integration/test_,engine_batching.py engine_logprobs.py forced_tokens.py models_architectures.py)

.PHONY: help demo test lint test-fast test-heavy test-reference status status-check bench docs install clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        ask the default model a question and read the answer as it is written"
	@echo "make test        lint, type check, import contracts and the tests (under 15 minutes on 2 cores)"
	@echo "make test-heavy  wheel, soak and large fuzz tests, a few tests on the reference (under 45 minutes)"
	@echo "make test-reference  the tests that build engines, without the native kernels (INFER_PLATFORM=reference)"
	@echo "make status      rebuild docs/status.md from the results of the two above"
	@echo "make bench       measure speed on this machine"
	@echo "make docs        rebuild what docs/ takes from the source: configuration, api, command line, plugin examples, fields, the tables of schemas and of combinations"
	@echo "make clean       remove .venv, results and caches"

demo: $(STAMP)
	@$(BIN)/infer run --temperature 0 "$(QUESTION)"

test: lint test-fast

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tools $(filter-out examples/notebook_cell.py, $(wildcard examples/*.py))
	$(BIN)/lint-imports

test-fast: $(STAMP) $(TRITON_STAMP)
	$(PYTEST) --results-run=test -m "not heavy and not gpu" -n $(JOBS) --dist loadfile

test-heavy: $(STAMP) $(TRITON_STAMP)
	HYPOTHESIS_PROFILE=heavy $(PYTEST) --results-run=heavy -m "heavy and not gpu" --timeout 1800 -n $(JOBS) --dist loadfile
	$(ON_REFERENCE) -n $(JOBS) --dist loadfile $(SMOKE)

test-reference: $(STAMP) $(TRITON_STAMP)
	$(ON_REFERENCE) -n $(JOBS) --dist loadfile $(BUILD_ENGINES)

status: $(STAMP)
	$(BIN)/python tools/status.py --results $(RESULTS)

status-check: $(STAMP)
	$(BIN)/python tools/status.py --results $(RESULTS) --check

bench: $(STAMP)
	$(BIN)/infer bench latency
	$(BIN)/infer bench throughput

docs: $(STAMP)
	$(BIN)/python tools/config_reference.py
	$(BIN)/python tools/public_api.py
	$(BIN)/python tools/cli_reference.py
	$(BIN)/python tools/plugin_pages.py
	$(BIN)/python tools/field_reference.py
	$(BIN)/python tools/schema_table.py
	$(BIN)/python tools/combination_table.py

install: $(STAMP) $(TRITON_STAMP)

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "infer needs Python 3.11 or newer, and there is no '$(PYTHON)' here. Install one, or name it: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "infer needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@for package in $$(sed 's/#.*//' .ci/packages); do \
	  ! command -v dpkg-query >/dev/null || dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || \
	  echo "note: the Debian package $$package is missing; tests that need it will fail (apt-get install $$package)"; done
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing infer and its dependencies into $(VENV) (once; torch is the large one) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

$(TRITON_STAMP): $(STAMP)
	@$(BIN)/python -c 'import sys, torch; from importlib.metadata import distributions; \
	  found = {d.name: d.version for d in distributions()}; \
	  sys.exit(torch.version.cuda is None and found.get("triton") != "$(subst triton==,,$(TRITON))")' || { \
	  echo "Installing $(TRITON) for the tests of the GPU kernels (once) ..." && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TRITON)'; }
	@touch $@

clean:
	rm -rf $(VENV) results build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
