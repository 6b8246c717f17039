"""What kernels of a JAX step work in: convolutions, their gradients, and cuDNN's recurrent layers."""

import keras
import pytest
from here import BACKEND, only
from keras import layers

from oomproof._records.trace import Spec, Target, Workload

pytestmark = only("jax", because="programs planned by XLA")
if BACKEND == "jax":
    from oomproof._simulators.jax.trace import trace

GPU, CPU = Target(gpu=True, capability=(8, 0)), Target(gpu=False)


def painter(kernel):
    inputs = keras.Input((16, 16, 32))
    model = keras.Model(inputs, layers.Conv2DTranspose(16, kernel, 2, padding="same")(inputs))
    model.compile("sgd", "mse", jit_compile=True)
    return model


def pictures(target):
    x, y = Spec((64, 16, 16, 32), "float32"), Spec((64, 32, 32, 16), "float32")
    return Workload(x, y, "train", True, target)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        # Padded alike on both sides: copies in another order.
        (4, 64 * 4 * (16 * 16 * 32 + 32 * 32 * 16)),
        # Not alike: 64 × 48 images by Fourier transforms of 64 × 33 numbers, twice, and copies of what is read.
        (3, 2 * 8 * 64 * 33 * 64 * 48 + 4 * 64 * (2 * 32 * 31**2 + 16 * 33**2) + 4 * 9 * 32 * 16),
    ],
)
def test_what_the_gradient_of_a_transposed_convolution_works_in(kernel, expected):
    found = [b.size for b in trace(painter(kernel), pictures(GPU)).buffers if b.workspace]
    assert max(found) == expected
    # There is no cuDNN on a CPU.
    assert not [b for b in trace(painter(kernel), pictures(CPU)).buffers if b.workspace]


def test_what_is_read_with_images_as_channels_is_copied():
    image = 4 * 64 * 16 * 16 * 32
    assert image in [b.size for b in trace(painter(4), pictures(GPU)).buffers if b.start >= 0]


def test_arrays_that_are_not_padded_alike_are_copied():
    """The image between its pixels with zeros, and the gradient around, both read with images as channels."""
    spread, around = 4 * 64 * 32 * 31**2, 4 * 64 * 16 * 33**2
    sizes = [b.size for b in trace(painter(3), pictures(GPU)).buffers]
    assert spread in sizes
    assert around in sizes
    assert spread not in [b.size for b in trace(painter(3), pictures(CPU)).buffers]


def test_what_convolutions_in_loops_work_in_is_told_apart():
    inputs = keras.Input((5, 16, 16, 8))
    model = keras.Model(inputs, layers.ConvLSTM2D(8, 3, padding="same")(inputs))
    model.compile("sgd", "mse", jit_compile=True)
    x, y = Spec((4, 5, 16, 16, 8), "float32"), Spec((4, 16, 16, 8), "float32")
    found = trace(model, Workload(x, y, "train", True, GPU))
    assert "scan" in {found.ops[b.start].name for b in found.buffers if b.workspace}


def test_op_by_op_padded_copies_are_there_for_a_moment():
    inputs = keras.Input((32, 32, 8))
    model = keras.Model(inputs, layers.Conv2D(8, 3, 2, padding="same")(inputs))
    model.compile("sgd", "mse", jit_compile=False)
    x, y = Spec((16, 32, 32, 8), "float32"), Spec((16, 16, 16, 8), "float32")
    padded = 4 * 16 * 33 * 33 * 8
    spans = {}
    for jit in (True, False):
        found = trace(model, Workload(x, y, "train", jit, GPU))
        spans[jit] = [b.end - b.start for b in found.buffers if b.size == padded]
    assert len(spans[True]) == 1 < spans[True][0]
    assert spans[False] == [1, 1]


def test_what_cudnn_asks_for_an_lstm():
    """As it answered on an H200 (benchmarks/estimate/truth/kernels-jax.jsonl)."""
    from oomproof._simulators.jax.cudnn import lstm_sizes

    for asked, told in (
        ((128, 512, 1, 256, 200, False), (569379072, 524288256)),
        ((300, 512, 1, 256, 16, False), (67143936, 41943296)),
        ((300, 128, 1, 16, 200, False), (25790848, 8192256)),
        ((128, 512, 1, 256, 200, True), (1534068992, 1048576256)),
    ):
        assert lstm_sizes(*asked) == pytest.approx(told, rel=0.005)
