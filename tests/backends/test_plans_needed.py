"""Whether a model needs a plan: a rough bound of what a step takes, and where it cannot tell."""

import keras
import pytest
from here import BACKEND
from keras import layers

from oomproof import _backends as backends
from oomproof._backends.common.footprint import bytes_of_outputs
from oomproof._planning.planner import Planner
from oomproof._records.trace import Spec, Target, Workload


class Block(layers.Layer):
    """An own layer that holds others: what they make is nowhere in the graph."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(4096)

    def call(self, x):
        return x + self.inner(x)[..., :8]


def bound_of(layer, shape=(16, 8), samples=10):
    inputs = keras.Input(shape)
    return bytes_of_outputs(keras.Model(inputs, layer(inputs)), samples)


def test_what_layers_make_is_counted():
    plain = bound_of(layers.Dense(4))
    assert plain == 10 * 16 * 4 * 4
    inner = keras.Sequential([keras.Input((16, 8)), layers.Dense(4)])
    assert bound_of(inner) >= plain


def test_attention_makes_more_than_it_returns():
    inputs = keras.Input((64, 8))
    model = keras.Model(inputs, layers.MultiHeadAttention(4, 2)(inputs, inputs))
    scores = 10 * 4 * 64 * 64 * 4
    assert bytes_of_outputs(model, 10) > 2 * scores


@pytest.mark.parametrize("kind", ["Conv2D", "Conv2DTranspose", "DepthwiseConv2D"])
def test_convolutions_need_room_to_work_in(kind):
    arguments = () if kind == "DepthwiseConv2D" else (8,)
    narrow, wide = (bound_of(getattr(layers, kind)(*arguments, size, padding="same"), (16, 16, 8)) for size in (1, 5))
    assert wide - narrow == 2 * 24 * 10 * 16 * 16 * 8 * 4


@pytest.mark.parametrize(
    "layer",
    [
        Block,
        lambda: layers.LSTM(4),
        lambda: layers.Bidirectional(layers.GRU(4)),
        lambda: layers.TimeDistributed(layers.Dense(4)),
        lambda: layers.Lambda(lambda x: keras.ops.tile(x, (1, 1, 99))[..., :8]),
    ],
)
def test_code_that_the_graph_does_not_show_needs_a_plan(layer):
    assert bound_of(layer()) is None


def test_operations_have_sizes_as_they_came():
    assert bound_of(lambda images: keras.ops.unfold(images, 3), (2, 8, 8)) > 0


def test_room_is_left_to_the_search_for_kernels():
    """In graph mode on a GPU TensorFlow's first step of a shape tries every kernel of a convolution."""

    def margin(*inner, jit=False, gpu=True, limit=2**40):
        model = keras.Sequential([keras.Input((8, 8, 2)), *inner, layers.Flatten(), layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=jit)
        specs = (Spec((4, 8, 8, 2), "float32"), Spec((4, 1), "float32"))
        workload = Workload(*specs, "train", jit, Target(gpu, (9, 0)))
        return Planner(backends.current(), model, frozenset(), cache=False)._margin(workload, limit)

    plain, convolves = margin(), margin(layers.Conv2D(4, 3))
    if BACKEND == "tensorflow":
        assert convolves == pytest.approx(plain * 16 / 15)
        # Blocks that are not split for less than 128 MiB are more of a small card.
        assert margin(limit=2**30) == pytest.approx(plain * 8 / 7, rel=1e-3)
        assert plain > margin(gpu=False)
    else:
        assert convolves == plain
    assert margin(layers.Conv2D(4, 3), jit=True) == margin(jit=True)
