# Every target makes the environment it needs. `make test` is what CI runs, `make check` what to run while you work.
PYTHON ?= python3
OLDEST_KERAS := 3.13.0
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

export KERAS_BACKEND ?= tensorflow
export TF_CPP_MIN_LOG_LEVEL := 2

BACKENDS := tensorflow jax torch
# The longest first, so that none of them runs alone at the end.
SUITES := $(BACKENDS:%=backends-%) $(BACKENDS:%=oldest-%) unit lint
# How many of them run side by side: one for each core of a small machine.
AT_ONCE ?= 2
# For every call of pytest, such as PYTEST_ARGS="-k records".
PYTEST_ARGS ?=
# What `make check` runs of the suite of one backend: something of each room.
CORE := bad_input seam seam_callbacks exactness_losses exactness_models exactness_state injected recompute \
	estimate plans docs table
READY := .venv/.ready
OLDEST_READY := .venv-oldest/.ready

.PHONY: demo check core test test-all lint unit backends oldest bench soak fuzz clean
.PHONY: $(foreach kind,backends oldest soak,$(BACKENDS:%=$(kind)-%))
.DEFAULT_GOAL := test

demo: $(READY)
	.venv/bin/oomproof demo

# KERAS_BACKEND=jax make check: the core of another backend.
check: $(READY)
	@$(MAKE) --jobs=$(AT_ONCE) --output-sync=recurse --keep-going --no-print-directory core unit lint

core: $(READY)
	.venv/bin/pytest $(CORE:%=tests/backends/test_%.py) $(PYTEST_ARGS)

# With what is exhaustive: more cases of what `make test` shows.
test-all:
	@$(MAKE) --no-print-directory test PYTEST_ARGS="--exhaustive $(PYTEST_ARGS)"

# A suite is shown when it has ended, so that those side by side do not mix, and none hides how the others ended.
test: $(READY) $(OLDEST_READY)
	@rm -rf .suites && mkdir .suites
	@$(MAKE) --jobs=$(AT_ONCE) --output-sync=recurse --no-print-directory $(SUITES:%=.suites/%.log)
	@grep -hE '^(FAILED|ERROR) ' .suites/*.log; cat .suites/outcomes; ! grep -q '^FAILED' .suites/outcomes

.suites/%.log:
	@outcome=passed; $(MAKE) --no-print-directory $* > $@ 2>&1 || outcome=FAILED; cat $@; \
	echo "$$outcome $*: $$(grep -v '^make' $@ | tail -n 1)" >> .suites/outcomes

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

unit: $(READY)
	.venv/bin/pytest tests/unit $(PYTEST_ARGS)

# One suite, once for each backend: Keras chooses its backend when it is imported.
backends: $(BACKENDS:%=backends-%)

$(BACKENDS:%=backends-%): backends-%: $(READY)
	KERAS_BACKEND=$* .venv/bin/pytest tests/backends $(PYTEST_ARGS)

# Keras's calling convention is the one thing we lean on that is not promised, so it is pinned on both ends.
oldest: $(BACKENDS:%=oldest-%)

$(BACKENDS:%=oldest-%): oldest-%: $(OLDEST_READY)
	KERAS_BACKEND=$* .venv-oldest/bin/pytest tests/backends -m seam $(PYTEST_ARGS)

bench: $(READY)
	@set -e; for script in benchmarks/[!_]*.py; do echo "$$script"; .venv/bin/python "$$script"; done

soak: $(BACKENDS:%=soak-%)

$(BACKENDS:%=soak-%): soak-%: $(READY)
	KERAS_BACKEND=$* .venv/bin/pytest tests/soak -m soak $(PYTEST_ARGS)

# Random trainings, plain and guarded: MINUTES for each backend, two backends side by side. Minimal scripts of what
# fails are left in .fuzz.
MINUTES ?= 10
SEED ?= 0
fuzz: $(READY)
	@printf '%s\n' $(BACKENDS) | PYTHONPATH=tests xargs -P 2 -I BACKEND \
		.venv/bin/python -m fuzz --backend BACKEND --minutes $(MINUTES) --seed $(SEED)

clean:
	rm -rf .venv .venv-oldest .suites dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Every file of Keras's own tests that trains a model, with all of them guarded.
.PHONY: keras-tests $(BACKENDS:%=keras-tests-%)
keras-tests: $(BACKENDS:%=keras-tests-%)

$(BACKENDS:%=keras-tests-%): keras-tests-%: $(READY)
	KERAS_BACKEND=$* .venv/bin/pytest tests/backends/test_keras_own.py -m keras_own

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[tensorflow,jax,torch,data,dev]'
	touch $@

$(OLDEST_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -v '^keras==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python $(PIP_INSTALL) --constraint .venv-oldest/constraints.txt --editable '.[tensorflow,jax,torch,data,dev]' keras==$(OLDEST_KERAS)
	touch $@
