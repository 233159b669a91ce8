# `make demo` and `make test` work on a bare clone: they set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard native/*.cpp native/*.h native/executor/*) CMakeLists.txt

.PHONY: demo test test-gpu setup system lint clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   set up, then plan, verify, simulate and draw a collective end to end"
	@echo "make test   set up, then ruff, mypy --strict, the import-direction check, pytest and doctests"
	@echo "make test-gpu PYTHON=...  the tests that need a GPU, in an environment with PyTorch for CUDA; installs stretto there"
	@echo "make setup  only build the environment in $(VENV)"
	@echo "make clean  remove what make built"

demo: setup
	$(BIN)/stretto demo --out demo-output

test: setup lint
	$(BIN)/python -m pytest -n 2

# The environment of `make setup` has PyTorch for CPUs: this installs into the Python that is given, beside its own.
test-gpu:
	$(PYTHON) -m pip install -q --disable-pip-version-check scikit-build-core nanobind libucx-cu12
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[runtime]' pytest hypothesis
	$(PYTHON) -m pytest tests/gpu

lint: setup
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt $(NATIVE) | system
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# First and alone: left to a later resolution, torch may come in another version with gigabytes of its own.
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt scikit-build-core nanobind libucx-cu12
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev,solvers,ray,runtime]'
	@touch $@

system:
	@./scripts/system-packages

clean:
	rm -rf $(VENV) build demo-output results
