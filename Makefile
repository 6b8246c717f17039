# Every target makes the environment it needs. `make test` is what CI runs.
PYTHON ?= python3
OLDEST_KERAS := 3.13.0
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

export KERAS_BACKEND := tensorflow
export TF_CPP_MIN_LOG_LEVEL := 2

BACKENDS := tensorflow jax torch
READY := .venv/.ready
OLDEST_READY := .venv-oldest/.ready

.PHONY: demo test lint unit backends oldest bench soak clean $(BACKENDS:%=backends-%) $(BACKENDS:%=oldest-%)
.DEFAULT_GOAL := test

demo: $(READY)
	.venv/bin/oomproof demo

test: lint unit backends oldest

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

unit: $(READY)
	.venv/bin/pytest tests/unit

# One suite, once for each backend: Keras chooses its backend when it is imported.
backends: $(BACKENDS:%=backends-%)

$(BACKENDS:%=backends-%): backends-%: $(READY)
	KERAS_BACKEND=$* .venv/bin/pytest tests/backends

# Keras's calling convention is the one thing we lean on that is not promised, so it is pinned on both ends.
oldest: $(BACKENDS:%=oldest-%)

$(BACKENDS:%=oldest-%): oldest-%: $(OLDEST_READY)
	KERAS_BACKEND=$* .venv-oldest/bin/pytest tests/backends -m seam

bench: $(READY)
	@set -e; for script in benchmarks/[!_]*.py; do echo "$$script"; .venv/bin/python "$$script"; done

soak: $(READY)
	.venv/bin/pytest tests -m soak

clean:
	rm -rf .venv .venv-oldest dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[tensorflow,jax,torch,data,dev]'
	touch $@

$(OLDEST_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -v '^keras==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python $(PIP_INSTALL) --constraint .venv-oldest/constraints.txt --editable '.[tensorflow,jax,torch,data,dev]' keras==$(OLDEST_KERAS)
	touch $@
