"""Ctrl-C while an update is written: all of it is done, or none."""

import sys

import keras
import numpy as np
import pytest
from here import BACKEND, modes
from keras import layers, ops
from models import BATCH, CLASSES, STEPS, WORDS, compiled, made, tags, words

import oomproof
from oomproof import _backends as backends

# Functions of each backend that write, by the file they are in.
WRITING = {
    "tensorflow": {"tensorflow/writes.py": ("commit", "_commit_eagerly", "assign")},
    "jax": {"jax/state.py": ("assign", "move"), "common/engine.py": ("to_the_end",)},
    "torch": {"torch/writes.py": ("write",), "torch/commit.py": ("__call__",)},
}[BACKEND]
# Those that change weights for a look, and put them back.
LOOKING = {
    "common/engine.py": ("taken_back", "to_the_end"),
    "jax/engine.py": ("changed",),
    "jax/state.py": ("assign", "move"),
    "tensorflow/commit.py": ("changed", "_put_back", "restore", "_is_restored"),
    "torch/engine.py": ("changed",),
    "torch/commit.py": ("undone", "_put_back", "copy"),
}


class Interrupt:
    """Raises KeyboardInterrupt when the line with this number, of those that write, is reached."""

    def __init__(self, number, files=WRITING):
        self._left, self._files = number, files

    def __call__(self, frame, event, argument):
        code = frame.f_code
        names = [names for file, names in self._files.items() if code.co_filename.endswith(file)]
        if event == "line" and names and code.co_name in names[0]:
            self._left -= 1
            if self._left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self)

    def __exit__(self, *error):
        sys.settrace(self._before)


def tagger():
    inner = [layers.Embedding(WORDS, 4), layers.Embedding(WORDS, 4), layers.Dense(CLASSES, "softmax")]
    first, second = inner[0], inner[1]
    x = layers.Input((STEPS,), dtype="int32")
    # Two tables, so that there is something between two sparse writes.
    model = keras.Model(x, inner[2](layers.Add()([first(x), second(x)])))
    return compiled(model, optimizer=keras.optimizers.SGD(0.1))


def values(model):
    return [np.array(ops.convert_to_numpy(v)) for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize("mode", modes("eager"))
def test_an_interrupt_leaves_no_half_of_an_update(mode):
    model = oomproof.guard(made(tagger, mode), micro_batch_size=5)
    data = words()[:BATCH], tags()[:BATCH]
    model.train_on_batch(*data)
    before = values(model)

    def reset():
        for variable, value in zip([*model.variables, *model.optimizer.variables], before, strict=True):
            variable.assign(value)

    model.train_on_batch(*data)
    after = values(model)
    interrupted = 0
    for line in range(200):
        reset()
        try:
            with Interrupt(line):
                model.train_on_batch(*data)
        except KeyboardInterrupt:
            found = values(model)
            assert equal(found, before) or equal(found, after), f"line {line} of those that write"
            interrupted += 1
        else:
            break
    else:
        pytest.fail("more lines write than expected")
    assert interrupted > 3


def looked_at(model):
    with backends.current().step(model).engine.changed(model.trainable_variables, lambda value: value + 1):
        raise ZeroDivisionError


def test_an_interrupt_leaves_no_weight_as_it_was_for_a_look():
    model = made(tagger, "eager")
    before, interrupted = values(model), 0
    for line in range(300):
        try:
            with Interrupt(line, LOOKING):
                looked_at(model)
        except KeyboardInterrupt:
            interrupted += 1
        except ZeroDivisionError:
            break
        assert all(np.array_equal(a, b) for a, b in zip(values(model), before, strict=True)), f"line {line}"
    assert all(np.array_equal(a, b) for a, b in zip(values(model), before, strict=True))
    assert 10 < interrupted < 299


def equal(some, others):
    return all(np.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(some, others, strict=True))
