# Set-up happens by itself: `make demo` and `make test` make .venv when it is missing, and again when pyproject.toml or
# constraints.txt change. Another Python: make PYTHON=python3.12 demo. torch for the CPU alone, where pip would take the CUDA build:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
SET_UP := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow mutants check docs bench format tables zoo

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' Makefile | while read verb text; do printf '  make %-11s%s\n' "$$verb" "$$text"; done

demo: .venv/.demo        ## two replicas train one model over an emulated 5 Mbit/s link: about two minutes
	$(BIN)/thinwire train

# Workers and the processes that tests start read modules that are compiled, whatever this shell says of bytecode: a fifth of a worker's start.
test: .venv/.dev         ## all tests that take seconds, by four workers
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist worksteal

test-slow: .venv/.dev    ## the other tests: minutes each
	$(BIN)/python -m pytest -m slow

mutants: .venv/.dev      ## do tests notice a wrong line? 200 random ones: an hour or two; some: make mutants MUTANTS="codecs --sample 20"
	$(BIN)/python tests/support/mutants.py $(MUTANTS)

check: .venv/.dev        ## format, lint, types; layers, README, docs, public names
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks/*.py examples/*.py
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist worksteal tests/repo/test_layers.py tests/repo/test_pages.py tests/repo/test_public_names_and_options.py

docs: .venv/.docs        ## these pages as a site, build/site, with the API; a broken link fails
	$(BIN)/mkdocs build --strict

format: .venv/.dev       ## write the format that check asks for
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

zoo: .venv/.demo         ## workloads that nobody tuned for, with five methods, and their table: under ten minutes
	$(BIN)/python benchmarks/zoo.py --out runs/zoo

tables: .venv/.demo      ## the README's tables anew, from benchmarks/results
	$(BIN)/python docs/tables.py

bench: .venv/.demo       ## utilization on a thin link, beside DDP and torchft: about an hour, Linux and root
	$(BIN)/python benchmarks/utilization.py

# What users need, without tools and tests. `.dev` holds all of it too.
.venv/.demo: $(SET_UP) | .venv/bin/python
	@echo "installing Thinwire and what it needs into .venv (torch is the large part) ..."
	@$(PIP) -e .
	@touch $@

.venv/.dev: $(SET_UP) | .venv/bin/python
	@echo "installing Thinwire, what it needs, and the tools of its tests into .venv (torch is the large part) ..."
	@$(PIP) -e '.[dev]'
	@touch .venv/.demo $@

.venv/.docs: $(SET_UP) | .venv/bin/python
	@echo "installing Thinwire, what it needs, and what makes the site into .venv (torch is the large part) ..."
	@$(PIP) -e '.[docs]'
	@touch .venv/.demo $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d; 3.11 or later is needed: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@echo "making .venv with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
