"""Small models and data for the exactness suites, and the comparison all of them rest on.

Everything is plain Keras and NumPy, so that each backend can run the same suites.
"""

import dataclasses

import keras
import numpy as np
from here import USUAL, set_mode
from keras import layers, ops

import oomproof
from oomproof._training.training import Measured

BATCH = 12
# Two full batches and a short one.
SAMPLES = 29
FEATURES, CLASSES, STEPS, WORDS = 4, 3, 5, 7
TOLERANCE = 1e-9


@dataclasses.dataclass
class Trained:
    """What training left behind: every variable by name, and the History."""

    model: keras.Model
    variables: dict
    history: dict

    def __getitem__(self, part):
        """The last variable whose name holds `part`."""
        return [value for name, value in self.variables.items() if part in name][-1]


def snapshot(model):
    """Copies of all variables, numbered because their names need not be unique."""
    optimizer = [] if model.optimizer is None else model.optimizer.variables
    found = [*model.variables, *optimizer]
    return {f"{number} {v.name}": np.array(ops.convert_to_numpy(v)) for number, v in enumerate(found)}


def made(build, mode="graph"):
    """A fresh model. Every call with the same `build` starts from the same weights and seeds."""
    # Names start anew. Collecting garbage too would take longer than many a test.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    model = build()
    set_mode(model, mode)
    return model


def train(build, *data, guard=None, mode="graph", **fit):
    """Trains a fresh model by `fit`, guarded when `guard` holds arguments for `oomproof.guard`."""
    model = made(build, mode)
    if guard is not None:
        oomproof.guard(model, **guard)
    if isinstance(data[0], dict | list | tuple | np.ndarray):
        fit.setdefault("batch_size", BATCH)
        fit.setdefault("shuffle", False)
    history = model.fit(*data, **{"verbose": 0, **fit})
    if guard is not None:
        history.history.pop("run", None)
    return Trained(model, snapshot(model), history.history)


def force_pieces(model, size):
    """Makes a guarded model run every phase in pieces of at most `size`; Keras offers no argument for that."""
    model._oomproof_guard._ready().training.current.micro_batch_size = lambda phase, unit: size


def forget_failures(model):
    """Makes a guarded model start from what it was told, as if nothing had failed. Its programs are kept."""
    training = model._oomproof_guard._driver.training
    training.current.lean = False
    training.current.volumes.clear()
    training.current.may_grow.clear()
    for phase in training.measured:
        training.measured[phase] = Measured()


def check_same(expected, received, tolerance=TOLERANCE):
    """Raises AssertionError, naming what differs, unless both trainings left the same behind."""
    _check_values("variables", expected.variables, received.variables, tolerance)
    _check_values("history", expected.history, received.history, tolerance)


def _check_values(what, expected, received, tolerance):
    assert list(expected) == list(received), f"{what}: {list(expected)} and {list(received)}"
    wrong = []
    for name, value in expected.items():
        a, b = np.asarray(value, "float64"), np.asarray(received[name], "float64")
        scale = max(1.0, float(np.max(np.abs(a), initial=0.0, where=np.isfinite(a))))
        if a.shape != b.shape or not np.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True):
            largest = np.max(np.abs(a - b)) if a.shape == b.shape else f"shapes {a.shape}, {b.shape}"
            wrong.append(f"{name}: {largest}")
    assert not wrong, f"{what} differ: {'; '.join(wrong)}"


def check_exact(build, *data, micro=3, mode=USUAL, plain_mode="eager", tolerance=TOLERANCE, **fit):
    """Trains plainly and in pieces of at most `micro` samples, and compares.

    The plain training runs eagerly unless told otherwise: that spares a trace or a compile, most of a test's time.
    """
    expected = train(build, *data, mode=plain_mode, **fit)
    received = train(build, *data, guard={"micro_batch_size": micro}, mode=mode, **fit)
    check_same(expected, received, tolerance)
    return expected, received


# Data


def numbers(samples=SAMPLES, width=FEATURES, seed=0):
    return np.random.default_rng(seed).normal(size=(samples, width))


def classes(samples=SAMPLES, seed=1):
    return np.random.default_rng(seed).integers(0, CLASSES, samples)


def words(samples=SAMPLES, seed=2):
    """Sequences of very different lengths, padded with zeros; the first is all padding."""
    random = np.random.default_rng(seed)
    found = random.integers(1, WORDS, (samples, STEPS))
    lengths = random.integers(1, STEPS + 1, samples)
    lengths[0] = 0
    return np.where(np.arange(STEPS) < lengths[:, None], found, 0)


def tags(samples=SAMPLES, seed=3):
    return np.random.default_rng(seed).integers(0, CLASSES, (samples, STEPS))


def weights(*shape, seed=4):
    return np.random.default_rng(seed).uniform(0.1, 2.0, shape or (SAMPLES,))


# Models


def compiled(model, loss="sparse_categorical_crossentropy", optimizer=None, **options):
    model.compile(optimizer if optimizer is not None else keras.optimizers.SGD(0.05, momentum=0.9), loss, **options)
    return model


def classifier(*middle, **options):
    """Numbers to classes, with the given layers in the middle."""
    inner = [layers.Dense(5, "tanh"), *middle, layers.Dense(CLASSES, "softmax")]
    return compiled(keras.Sequential([layers.Input((FEATURES,)), *inner]), **options)


def regressor(*middle, outputs=2, activation=None, loss="mse", **options):
    """Numbers to numbers."""
    inner = [layers.Dense(5, "tanh"), *middle, layers.Dense(outputs, activation)]
    return compiled(keras.Sequential([layers.Input((FEATURES,)), *inner]), loss, **options)


def tagger(*middle, mask_zero=True, **options):
    """Masked sequences of words to a class for each word."""
    inner = [layers.Embedding(WORDS, 4, mask_zero=mask_zero), *middle, layers.Dense(CLASSES, "softmax")]
    return compiled(keras.Sequential([layers.Input((STEPS,), dtype="int32"), *inner]), **options)
