"""A pytest plugin for Keras's own tests: guards every model they train, and runs its batches in pieces.

Loaded by test_keras_own.py in a child process, with `-p keras_guarded --outcomes FILE`. The file then says of each test
how it ended, and whether a batch of it was cut. With `--plain` nothing is guarded.
"""

import collections
import functools
import json
import pathlib

import keras
import pytest
from keras.src.models.model import Trainer
from keras.src.trainers.trainer import Trainer as BaseTrainer

import oomproof
from oomproof._backends.pieces import piece_count, usual_count
from oomproof._training.training import Training

if keras.backend.backend() == "jax":
    import jax

    # As in conftest.py: nearly all of the time is compiling programs that run once.
    jax.config.update("jax_disable_most_optimizations", True)

_LARGEST_PIECE = 2
# Enough to see that pieces add up; Keras trains some models for a thousand steps.
_MOST_PIECES = 16
_outcomes = collections.defaultdict(dict)
_running = ""


def name_of(item):
    kind = f"{item.cls.__name__}::" if item.cls is not None else ""
    return f"{item.module.__name__.removeprefix('keras.src.')}::{kind}{item.name}"


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=pathlib.Path)
    parser.addoption("--plain", action="store_true")
    parser.addoption("--names", type=pathlib.Path, help="a file with the names of the tests to run, one a line")


def pytest_configure(config):
    for mark in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{mark}: Keras's own")
    if not config.getoption("--plain"):
        _guard_when_called(BaseTrainer, "compile", after=True)
        # What is never compiled can predict.
        for method in ("predict", "predict_on_batch"):
            _guard_when_called(Trainer, method, after=False)
        _cut_every_batch()


def pytest_collection_modifyitems(config, items):
    if (file := config.getoption("--names")) is not None:
        wanted = set(file.read_text().splitlines())
        items[:] = [item for item in items if name_of(item) in wanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    found = _outcomes[name_of(item)]
    if report.when == "call" or not report.passed:
        found["outcome"] = report.outcome
        found["error"] = str(report.longrepr)[-3000:] if report.failed else ""
    return report


def pytest_runtest_setup(item):
    global _running
    _running = name_of(item)


def pytest_sessionfinish(session):
    if (file := session.config.getoption("--outcomes")) is not None:
        file.write_text(json.dumps(_outcomes, indent=1))


def _guard_when_called(kind, method, after):
    original = getattr(kind, method)

    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        if after:
            result = original(self, *args, **kwargs)
            _guard(self)
            return result
        if _guard(self):
            return getattr(self, method)(*args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(kind, method, wrapper)


def _guard(model):
    """Whether the model was guarded only now. One that guard refuses, with a step of its own say, stays plain."""
    if "_oomproof_guard" in vars(model):
        return False
    try:
        oomproof.guard(model, verbose=0)
    except oomproof.UnsupportedModelError:
        return False
    return True


def _cut_every_batch():
    own = Training.pieces

    def pieces(training, batch):
        count = own(training, batch)
        if training.step.splittable(batch.data):
            # Batches of two are cut, too.
            forced = piece_count(batch.size, min(_LARGEST_PIECE, max(1, batch.size // 2)))
            count = max(count, min(forced, _MOST_PIECES))
        if training.step.equal_pieces_only() and count > 1:
            count = usual_count(max(batch.size, 1), count)
        count = min(count, max(batch.size, 1))
        if count > 1:
            _outcomes[_running]["cut"] = True
        return count

    Training.pieces = pieces
