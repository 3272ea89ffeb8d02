# make run    install everything pinned into .venv, then the main job on the embedded data sets
# make test   the same installation, then lint, types and the fast tests; those of apfed-protocols
#             where nothing else is installed, in .venv-light (alone: make test-light)
# make quick  the tests nearest to the files changed since the last commit, in seconds
#             (of others: make quick FILES=secure_apfed/console/terminal.py)
# make site   the documentation as a site, in build/site
# make dist   both distributions as wheels, in dist, and whether an index would take them
# make wheelhouse  all wheels that both need, in build/wheelhouse, for machines without a network
#             (with other extras: make wheelhouse EXTRAS=experiments,grpc,onnx)
# make lock   requirements-hashes.lock anew, after a change of requirements
# make help   every target
#
# PYTHON       the interpreter that makes .venv, and whose wheels go into a wheelhouse; 3.11 or newer
# TORCH_INDEX  where to take torch from, e.g. https://download.pytorch.org/whl/cpu for the small
#              build without CUDA; by default the package index that pip is set up with

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 3
EXTRAS ?= experiments,grpc

VENV := .venv
LIGHT := .venv-light
PASSED := $(LIGHT)/passed.json
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL := -m pip --disable-pip-version-check install --quiet --constraint requirements.lock
PIP := $(BIN)/python $(INSTALL)
QUIETLY := -m pip --disable-pip-version-check install --quiet
HASHED := $(BIN)/python $(QUIETLY) --require-hashes --no-deps --requirement requirements-hashes.lock
OURS := $(BIN)/python $(QUIETLY) --no-index --no-deps --no-build-isolation
# Workers take tests from one another at the end; a file's tests stay together before. Three, since
# processes of tests wait for one another.
PYTEST := $(BIN)/python -m pytest
APART := -n $(WORKERS) --dist worksteal -r fEs
CODE := protocols secure_apfed attacks experiments tests

.DEFAULT_GOAL := help
.PHONY: help setup run test quick test-fast test-light test-slow lint site dist wheelhouse lock clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' $(firstword $(MAKEFILE_LIST))
	@echo "make setup | run | test | quick | test-fast | test-light | test-slow | lint | site | dist | wheelhouse | lock | clean"

setup: $(STAMP)

# No index is asked for the two distributions of this project, whose names nobody owns there: all
# else comes by its hash, and they come by their paths, without an index. Torch has no hash there, since
# its builds differ.
$(STAMP): pyproject.toml protocols/pyproject.toml requirements.lock requirements-hashes.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; $(PYTHON) is `$(PYTHON) -V 2>&1`. Try: make PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(HASHED)
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(OURS) --editable ./protocols --editable .
	@touch $@

run: setup
	$(BIN)/secure-apfed study main

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

site: setup
	$(BIN)/python -m mkdocs build --strict

# mypy is one process: tests use the other core meanwhile.
test: setup
	+$(MAKE) -j 2 lint test-fast

# What passed among the light tests is not run again; what was skipped or failed there is.
test-fast: setup test-light
	$(PYTEST) -m "not slow" $(APART) --skip-passed=$(PASSED)

quick: setup
	files=`$(BIN)/python tests/nearest_tests.py $(FILES)` && $(PYTEST) -m "not slow" -q $$files

$(LIGHT)/.installed: protocols/pyproject.toml requirements.lock
	test -x $(LIGHT)/bin/python || $(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python $(INSTALL) hatchling editables hypothesis pytest pytest-timeout pytest-xdist
	$(LIGHT)/bin/python $(INSTALL) --no-build-isolation --editable ./protocols
	@touch $@

test-light: $(LIGHT)/.installed
	$(LIGHT)/bin/python -c 'from importlib.util import find_spec as f; assert not any(map(f, ("torch", "pydantic")))'
	$(LIGHT)/bin/python -m pytest -c protocols/pyproject.toml --rootdir . -m "not slow" $(APART) \
		--write-passed=$(PASSED) tests/contracts tests/protocols

dist: setup
	$(BIN)/python -m build --no-isolation --outdir dist protocols
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

wheelhouse: dist
	light=`ls -t dist/apfed_protocols-*.whl | head -1` && whole=`ls -t dist/secure_apfed-*.whl | head -1` && \
	$(PYTHON) -m pip --disable-pip-version-check download --quiet --only-binary :all: --constraint requirements.lock \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --dest build/wheelhouse "$$light" "$$whole[$(EXTRAS)]"

lock: setup
	$(BIN)/python .ci/lock.py

test-slow: setup
	$(PYTEST) -m slow $(APART)

clean:
	rm -rf $(VENV) $(LIGHT) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -exec rm -rf {} +
