"""The suite can fail: each mistake that people make when they accumulate gradients turns its comparison red."""

import contextlib
import copy
import dataclasses

import keras
import numpy as np
import pytest
from here import only
from keras import layers, ops, optimizers
from models import (
    BATCH,
    CLASSES,
    FEATURES,
    STEPS,
    WORDS,
    check_exact,
    check_same,
    classes,
    classifier,
    compiled,
    numbers,
    tagger,
    tags,
    train,
    words,
)

from oomproof._backends.common import losses, phases, statistics

pytestmark = pytest.mark.usefixtures("float64")


def embedded():
    inner = [layers.Embedding(WORDS, 4), layers.Flatten(), layers.Dense(CLASSES, "softmax")]
    return compiled(keras.Sequential([layers.Input((STEPS,), dtype="int32"), *inner]), optimizer=optimizers.Adam(0.05))


def clipped():
    return classifier(optimizer=optimizers.SGD(0.5, clipnorm=0.02))


@contextlib.contextmanager
def replaced(owner, name, make):
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def sample_count_for_normaliser():
    """Each piece's mean is weighted by its samples, whatever its mask left of them."""

    def divide(self, total, normaliser):
        self.normalisers.append(normaliser)
        return ops.divide_no_nan(total, normaliser) * ops.cast(self._share, total.dtype)

    return replaced(losses.Reductions, "_divide", lambda original: divide)


def loop_replaced(make):
    """Replaces the loop over pieces in the engine that the neutral phases are given."""

    def with_another_loop(original):
        def init(self, model, engine, *others, **options):
            original(self, model, engine, *others, **options)
            self.engine = copy.copy(engine)
            self.engine.over_pieces = make(engine.over_pieces)

        return init

    return replaced(phases.Phases, "__init__", with_another_loop)


def remainder_dropped():
    def make(original):
        def over_pieces(piece, batch_size, count, state):
            return original(piece, (batch_size // count) * count, count, state)

        return over_pieces

    return loop_replaced(make)


def rows_merged():
    import tensorflow as tf

    from oomproof._backends.tensorflow import step

    def merged(gradient):
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        indices, where = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, where, tf.size(indices))
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def make(original):
        def apply_gradients(optimizer, gradients, *others):
            return original(optimizer, [merged(gradient) for gradient in gradients], *others)

        return apply_gradients

    return replaced(step, "apply_gradients", make)


def clipped_in_pieces():
    def clip(gradient):
        # A norm of 0.02 for the batch is 0.005 for each of four pieces.
        return gradient * ops.minimum(0.005 / ops.sqrt(ops.sum(ops.square(gradient))), 1.0)

    def make(original):
        def over_pieces(piece, *others):
            def clipping(*arguments):
                outcome = piece(*arguments)
                return dataclasses.replace(outcome, gradients=[clip(gradient) for gradient in outcome.gradients])

            return original(clipping, *others)

        return over_pieces

    return loop_replaced(make)


MISTAKES = {
    "sample count for the normaliser": (sample_count_for_normaliser, tagger, lambda: (words(), tags())),
    "remainder dropped": (remainder_dropped, classifier, lambda: (numbers(), classes())),
    "clipped in pieces": (clipped_in_pieces, clipped, lambda: (numbers(), classes())),
    "rows merged": (rows_merged, embedded, lambda: (words(), classes())),
}
MARKS = {"rows merged": [only("tensorflow", because="sparse gradients")]}


@pytest.mark.parametrize("mistake", [pytest.param(name, marks=MARKS.get(name, [])) for name in MISTAKES])
def test_mistake_is_seen(mistake):
    plant, build, data = MISTAKES[mistake]
    # Right without the mistake, so that what turns it red is the mistake and nothing else.
    check_exact(build, *data(), micro=3, mode="eager", tolerance=1e-7)
    with plant(), pytest.raises(AssertionError, match="variables differ"):
        check_exact(build, *data(), micro=3, mode="eager", tolerance=1e-7)


def normalised():
    inner = [layers.BatchNormalization(momentum=0.9), layers.Dense(CLASSES, "softmax")]
    return compiled(keras.Sequential([layers.Input((FEATURES,)), *inner]))


@pytest.mark.parametrize("planted", [False, True])
def test_statistics_updated_by_every_piece_are_seen(planted):
    def make(original):
        def advance(calls, sums):
            for _ in range(3):
                original(calls, sums)

        return advance

    data = numbers(BATCH)
    with replaced(statistics, "advance", make) if planted else contextlib.nullcontext():
        received = train(normalised, data, classes(BATCH), guard={"micro_batch_size": 4}, mode="eager")
    same = np.allclose(received["moving_mean"], 0.1 * data.mean(0), atol=1e-9)
    assert same is not planted


def test_comparison_sees_history_and_state():
    """The comparison itself: a difference in History alone or in optimizer state alone is one."""
    expected, received = check_exact(classifier, numbers(BATCH), classes(BATCH), mode="eager")
    history = {"loss": [expected.history["loss"][0] + 1e-6]}
    with pytest.raises(AssertionError, match="history differ"):
        check_same(expected, dataclasses.replace(received, history=history))
    name = next(name for name in received.variables if "iteration" in name)
    with pytest.raises(AssertionError, match="iteration"):
        check_same(expected, dataclasses.replace(received, variables=received.variables | {name: np.array(4)}))
