# Every target makes the environment it needs. `make test` is what CI runs, `make check` what to run while you work.
PYTHON ?= python3
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
DEMO_READY := .venv/.ready-demo
OLDEST_READY := .venv-oldest/.ready

.PHONY: demo check core test test-all lint unit backends oldest bench soak fuzz clean
.PHONY: $(foreach kind,backends oldest soak,$(BACKENDS:%=$(kind)-%))
.DEFAULT_GOAL := test

# Only what the demo needs, so that the first look is quick; `make test` completes the same environment.
demo: $(DEMO_READY)
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

# Which lines the unit tests and the suite of one backend run, child processes included.
COVERED ?= tensorflow
.PHONY: coverage
coverage: $(READY)
	.venv/bin/pytest tests/unit --cov --cov-report= $(PYTEST_ARGS)
	KERAS_BACKEND=$(COVERED) .venv/bin/pytest tests/backends --cov --cov-append --cov-report= $(PYTEST_ARGS)
	.venv/bin/coverage report

# The wheel as a user gets it: built, installed with EXTRAS in an environment of its own, and used from outside.
EXTRAS ?= tensorflow data
COMMA := ,
.PHONY: wheel-test
wheel-test:
	rm -rf dist .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	.venv-wheel/bin/python $(PIP_INSTALL) --constraint constraints.txt \
		"$$(echo dist/oomproof-*.whl)[$(subst $() ,$(COMMA),$(strip $(EXTRAS)))]"
	.venv-wheel/bin/python -P tests/install_smoke.py $(EXTRAS)

clean:
	rm -rf .venv .venv-oldest .venv-wheel .coverage .suites dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Every file of Keras's own tests that trains a model, with all of them guarded.
.PHONY: keras-tests $(BACKENDS:%=keras-tests-%)
keras-tests: $(BACKENDS:%=keras-tests-%)

$(BACKENDS:%=keras-tests-%): keras-tests-%: $(READY)
	KERAS_BACKEND=$* .venv/bin/pytest tests/backends/test_keras_own.py -m keras_own

$(DEMO_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo "Installing TensorFlow and Keras in .venv, once."
	.venv/bin/python $(PIP_INSTALL:--quiet=) --constraint constraints.txt --editable '.[tensorflow]'
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[tensorflow,jax,torch,data,dev]'
	touch $@ $(DEMO_READY)

$(OLDEST_READY): pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python $(PIP_INSTALL) --constraint constraints-oldest.txt --editable '.[tensorflow,jax,torch,data,dev]'
	touch $@
