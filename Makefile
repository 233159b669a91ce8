# `make demo` and `make test` work on a bare clone: they set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SCRIPTS := $(shell grep -ls "^.!.*python" scripts/*)
NATIVE := $(wildcard native/*.cpp native/*.h native/executor/*) src/stretto/runtime/gpu/kernel.cu CMakeLists.txt

# Tests that run the C++ code most; those of memory that is measured are left out where a sanitizer keeps more of it.
NATIVE_TESTS := tests/simulator tests/programs tests/dimensions tests/planner/test_schedule.py \
  tests/planner/test_schedule_random.py tests/planner/test_search.py tests/synthesis/test_forest.py \
  tests/synthesis/test_flow.py tests/synthesis/test_greedy.py tests/synthesis/test_tree_pairs.py \
  tests/synthesis/test_steiner.py tests/synthesis/test_exchange.py tests/cluster/test_routes.py tests/planner/test_nccl_tuner.py
EXECUTOR_TESTS := tests/runtime/test_executor.py tests/runtime/test_executor_faults.py \
  tests/runtime/test_executor_join.py tests/runtime/test_backend_splits.py tests/runtime/test_backend_reuse.py
# These ask how good a program is that a search finds within some seconds, which are not enough with a sanitizer.
TESTS_OF_SPEED := tests/synthesis/test_forest.py::test_programs_keep_the_pace_of_their_trees \
  tests/synthesis/test_forest.py::test_all_gather_keeps_the_pace_on_two_boxes \
  tests/synthesis/test_flow.py::test_hundred_and_twenty_eight_gpus_within_five_percent \
  tests/synthesis/test_greedy.py::test_hosts_on_switches_come_near_the_bound
# Tests in which PyTorch runs; tests/gpu are added where there is a GPU.
TORCH_TESTS := tests/runtime tests/control tests/resharding/test_reshard_specs.py tests/cli/test_run_command.py \
  tests/cli/test_run_splits.py tests/cli/test_run_styles.py
TORCH_VENV = .venv-torch-$(TORCH)

.PHONY: demo check test coverage docs wheels test-torch test-asan test-tsan test-gpu setup system lint clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   set up, then plan, verify, simulate and draw a collective end to end"
	@echo "make check  the loop of a developer: format, lint, types, and the tests that start no processes and are not slow"
	@echo "make coverage  the tests of make check, with the share of lines that they run, and a floor"
	@echo "make test   set up, then ruff, mypy --strict, the import-direction check, pytest and doctests"
	@echo "make test-torch TORCH=2.11.0  the tests in which PyTorch runs, with another version in an environment of its own"
	@echo "make test-asan, make test-tsan  the tests of the C++ code, built with sanitizers of g++"
	@echo "make test-gpu PYTHON=...  the tests that need a GPU, in an environment with PyTorch for CUDA; installs stretto there"
	@echo "make docs   the documentation as a site in build/site; every link is checked"
	@echo "make wheels  wheels that install without a compiler, in dist, for every supported Python that is found"
	@echo "make setup  only build the environment in $(VENV)"
	@echo "make clean  remove what make built"

demo: setup
	$(BIN)/stretto demo -o demo-output

# Marks are set by path in tests/conftest.py. Doctests of src are among these.
QUICK := -m "not job and not slow"

check: setup lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(QUICK)

# Four at once on two cores: tests of jobs wait for much of their time. A file is one worker's, so that what its tests share
# (often a whole job) is made once; in the order of the folders, so that small files come last and all end together.
test: setup lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# Not a part of `make test`, since it makes the tests of `make check` nearly twice as long; processes that tests start are not counted.
coverage: setup
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[coverage]' --no-build-isolation
	$(BIN)/python -m pytest -n 2 $(QUICK) --cov=stretto --cov-report=term:skip-covered

# Strict: a page that is not in the menu, or a link that leads nowhere, is an error.
docs: setup
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]' --no-build-isolation
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

wheels: | system
	$(PYTHON) scripts/make-wheels

# pip's own settings say from where; a build with CUDA brings gigabytes. All but torch is as in `make setup`.
test-torch: | system
	@test -n "$(TORCH)" || { echo "TORCH: must be a version of PyTorch, as in: make test-torch TORCH=2.11.0"; exit 2; }
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip install -q --disable-pip-version-check torch==$(TORCH)
	$(TORCH_VENV)/bin/pip install -q --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt scikit-build-core \
	  nanobind libucx-cu12
	$(TORCH_VENV)/bin/pip install -q --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt --no-build-isolation \
	  -C build-dir=build/torch-$(TORCH) -e '.[dev,solvers,ray,runtime]'
	$(TORCH_VENV)/bin/python -m pytest -n 2 $(TORCH_TESTS) $$($(TORCH_VENV)/bin/python -c \
	  'import torch; print("tests/gpu" if torch.cuda.is_available() else "")')

# The modules are built into build/sanitized-*, and what is installed stays as it is (docs/executor.md).
test-asan: setup
	scripts/test-sanitized address,undefined $(CURDIR)/$(BIN)/python $(NATIVE_TESTS) $(EXECUTOR_TESTS) \
	  $(addprefix --deselect=,$(TESTS_OF_SPEED))

test-tsan: setup
	scripts/test-sanitized thread $(CURDIR)/$(BIN)/python $(EXECUTOR_TESTS)

# The environment of `make setup` has PyTorch for CPUs: this installs into the Python that is given, beside its own.
test-gpu:
	$(PYTHON) -m pip install -q --disable-pip-version-check scikit-build-core nanobind libucx-cu12
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[runtime]' pytest hypothesis
	$(PYTHON) -m pytest tests/gpu

lint: setup
	$(BIN)/ruff check src tests benchmarks examples $(SCRIPTS)
	$(BIN)/ruff format --check -q src tests benchmarks examples $(SCRIPTS)
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
	rm -rf $(VENV) .venv-torch-* build dist demo-output results
