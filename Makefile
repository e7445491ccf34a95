# The commands of a checkout; each sets up all it needs in $(VENV) and starts at once the second time.
#   make demo    run the first example
#   make test    lint, type check and tests (CPU)
#   make lint    lint and type check only
# Kernels are compiled without a GPU; where there is no CUDA toolkit, NVIDIA's wheels are put into build/cuda:
#   make native         the library with every kernel for compute capability 9.0, in build/native
#   make native-others  one kernel of each family for the other architectures
#   make native-full    every kernel for all architectures, in build/native-full
#   make native-same BASE=COMMIT  whether the kernels are still those of COMMIT, instruction for instruction
# Variables: PYTHON (3.10 or newer), VENV, TORCH (an exact version instead of the one in requirements/cpu.txt),
# PYTEST_ARGS (added to pytest's command line).

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
PYTEST_ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
PIN := $(if $(TORCH),torch==$(TORCH),-c requirements/cpu.txt)
STAMP := $(VENV)/.installed$(if $(TORCH),-$(TORCH))
INSTALLS := setup.py requirements/cpu.txt
TESTS_NEED := requirements/tools.txt requirements/guided.txt requirements/tensorrt.txt \
	requirements/tensorrt-lean-11.txt
TYPING := build/typing/trtllm_replayssm

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint native native-others native-full native-same clean

demo: $(STAMP)-run
	$(BIN)/python examples/01_generate.py

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(STAMP)-test $(TYPING)
	$(BIN)/ruff check .
	$(BIN)/mypy

native:
	WORKERS=$(WORKERS) .ci/native build/native 90

native-others:
	WORKERS=$(WORKERS) .ci/native build/native-others "80;100;120" -DREPLAYSSM_REDUCED=ON

native-full:
	WORKERS=$(WORKERS) .ci/native build/native-full "80;90;100;120"

native-same:
	WORKERS=$(WORKERS) PYTHON=$(PYTHON) .ci/same-code $(or $(BASE),HEAD)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: PYTHON: expected Python 3.10 or newer, got $$($(PYTHON) --version 2>&1). Use make PYTHON=python3.11"; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)

# The rooms builders/ and runtime/ are found under their long names only in an editable install.
$(STAMP)-run: $(INSTALLS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIN) -e .
	touch $@

$(STAMP)-test: $(INSTALLS) $(TESTS_NEED) | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIN) -c requirements/tools.txt -e '.[test,reference]'
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/guided.txt
	$(BIN)/python -m pip install --quiet -r requirements/tensorrt.txt -r requirements/tensorrt-lean-11.txt
	touch $@

# mypy does not see setup.py's package map: links show it the rooms under their long names.
$(TYPING):
	mkdir -p $@
	ln -sfn ../../../runtime $@/runtime
	ln -sfn ../../../builders $@/builders
