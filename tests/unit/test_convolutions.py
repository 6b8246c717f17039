"""What convolutions take besides, without any framework: rules beside what was measured on an H200.

Figures are from benchmarks/estimate/truth/kernels-jax.jsonl.
"""

import dataclasses

import pytest

from oomproof._simulators.xla.convolutions import for_cudnn, workspace
from oomproof._simulators.xla.program import Convolution, Node, Value

MB = 10**6


def convolution(
    batch, size, channels, filters, kernel, *, by="kernel", strides=1, holes=1, apart=1, padding=(1, 1), grouped=False
):
    """One of the three convolutions of a layer, as JAX writes it; `size` is that of its images."""
    images, result = (batch, *size, channels), (batch, *size, filters)
    rank = len(size)
    many = {
        "strides": (strides,) * rank,
        "padding": (padding,) * rank,
        "holes": (holes,) * rank,
        "window_holes": (apart,) * rank,
        "grouped": grouped,
    }
    if by != "kernel":
        shapes = (images, (*[kernel] * rank, channels, filters), result)
        return Convolution(shapes, (0, rank + 1), (rank + 1, rank), (0, rank + 1), **many)
    shapes = (images, result, (*[kernel] * rank, channels, filters))
    return Convolution(shapes, (rank + 1, 0), (rank + 1, 0), (rank, rank + 1), **many)


@pytest.mark.parametrize(
    ("batch", "size", "channels", "filters", "kernel", "measured"),
    [
        (1024, 14, 24, 1, 5, 370_088_304),
        (512, 32, 128, 1, 3, 10_881_866_256),
        (16, 56, 32, 96, 3, 537_974_800),
        (256, 28, 3, 32, 7, 443_310_480),
    ],
)
def test_fourier_transforms_are_known_to_the_byte(batch, size, channels, filters, kernel, measured):
    """Gradients by the kernels of transposed convolutions with strides of 2, padded unevenly."""
    x = Value((batch, size, size, channels), "float32", 4 * batch * size * size * channels)
    gradient = Value((batch, 2 * size, 2 * size, filters), "float32", 16 * batch * size * size * filters)
    result = Value((kernel, kernel, channels, filters), "float32", 4 * kernel * kernel * channels * filters)
    shapes = (x.shape, gradient.shape, result.shape)
    conv = Convolution(shapes, (3, 0), (3, 0), (2, 3), (1, 1), ((2, 1), (2, 1)), (2, 2), (1, 1))
    node = Node("conv_general_dilated", [x, gradient], [result], convolution=conv)
    *pads, last = for_cudnn([node])
    assert last is node
    # cuDNN itself asks for 16 bytes more.
    assert node.workspace == measured - 16
    spread = 2 * size - 1
    assert [pad.outputs[0].size for pad in pads] == [
        4 * batch * channels * spread**2,
        4 * batch * filters * (spread + kernel - 1) ** 2,
    ]
    assert node.inputs == [pad.outputs[0] for pad in pads]


def test_more_than_was_ever_given_for_them_is_not_expected():
    conv = convolution(4096, (127, 127), 64, 64, 3, holes=2, padding=(2, 1))
    assert workspace(conv, "by kernel", 4) == 2 * 4 * 4096 * 127 * 127 * 64


@pytest.mark.parametrize(
    ("what", "width", "measured"),
    [
        # Few channels: both arrays in another order.
        (convolution(128, (56, 56), 24, 32, 3), 4, 91.7 * MB),
        (convolution(16, (128, 128), 3, 96, 5, padding=(2, 2)), 4, 109.9 * MB),
        (convolution(32, (64, 64), 96, 96, 7, padding=(3, 3)), 4, 124.1 * MB),
        (convolution(64, (128, 128), 64, 64, 3, strides=2, padding=(2, 2)), 4, 536.9 * MB),
        # In three dimensions always, in half precision with channels filled up to eight.
        (convolution(64, (14, 14, 14), 1, 256, 3), 4, 181.6 * MB),
        (convolution(512, (14, 14, 14), 24, 3, 5, padding=(2, 2)), 2, 95.9 * MB),
        (convolution(128, (14, 14, 14), 128, 32, 3), 2, 116.3 * MB),
        # In half precision in two dimensions only those that are not filled up.
        (convolution(64, (128, 128), 1, 32, 3), 2, 18.0 * MB),
    ],
)
def test_gradients_by_kernels(what, width, measured):
    assert workspace(what, "by kernel", width) == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("width", [2, 4])
def test_most_gradients_by_kernels_are_summed_up_in_parts(width):
    """4.3 and 7.7 MB were measured of such layers."""
    assert workspace(convolution(64, (64, 64), 96, 32, 3), "by kernel", width) == 4 << 20
    # A matrix product, unless there are strides.
    assert workspace(convolution(32, (56, 56), 256, 128, 1, padding=(0, 0)), "by kernel", width) == 0
    assert workspace(convolution(32, (56, 56), 256, 128, 1, padding=(0, 0), apart=2), "by kernel", width) == 4 << 20


def test_a_window_that_is_flat_on_one_side_is_no_matrix_product():
    conv = convolution(8, (8, 8, 8), 16, 16, 3)
    flat = dataclasses.replace(conv, shapes=(*conv.shapes[:2], (1, 3, 3, 16, 16)))
    assert workspace(flat, "by kernel", 4) == workspace(conv, "by kernel", 4) == 2 * 4 * 8 * 512 * 16


def test_in_one_dimension_nothing_is_known_of_fourier_transforms():
    for size in ((100,), (1, 100)):
        conv = convolution(64, size, 64, 64, 3, holes=2, padding=(2, 1))
        assert workspace(conv, "by kernel", 4) == 2 * 4 * 64 * 100 * 64


def test_op_by_op_a_copy_is_made_for_each():
    x, kernel = images(), Value((3, 3, 4, 8), "float32", 4 * 288)
    one, two = layer(x, kernel), layer(x, kernel)
    assert [node.name for node in for_cudnn([one, two], shared=False)].count("pad") == 2
    assert one.inputs[0] is not two.inputs[0]


def test_forward_and_by_input():
    wide = convolution(64, (64, 64), 96, 32, 3, by="input")
    assert workspace(wide, "forward", 4) == workspace(wide, "by input", 4) == workspace(wide, "forward", 2) == 0
    narrow = convolution(1024, (28, 28), 16, 3, 3, by="input")
    assert workspace(narrow, "by input", 2) == 1024 * 28 * 28 * 8 * 2
    assert workspace(convolution(8, (32, 32), 96, 96, 3, grouped=True), "by kernel", 4) == 0


def images(batch=2, size=16, channels=4):
    return Value((batch, size, size, channels), "float32", 4 * batch * size * size * channels)


def layer(x, kernel, **changes):
    """A forward convolution of 4 to 8 channels."""
    result = images(channels=8)
    given = {"padding": ((0, 1), (0, 1)), "strides": (2, 2), "holes": (1, 1), "window_holes": (1, 1)} | changes
    shapes = (x.shape, (3, 3, 4, 8), result.shape)
    conv = Convolution(shapes, (0, 3), (3, 2), (0, 3), **given)
    return Node("conv_general_dilated", [x, kernel], [result], convolution=conv)


def test_uneven_padding_is_a_copy_that_is_shared():
    x, kernel = images(), Value((3, 3, 4, 8), "float32", 4 * 288)
    one, two = layer(x, kernel), layer(x, kernel)
    pad, *rest = for_cudnn([one, two])
    assert rest == [one, two]
    assert pad.outputs[0].shape == (2, 17, 17, 4)
    assert one.inputs[0] is two.inputs[0] is pad.outputs[0]
    assert one.inputs[1] is kernel


def test_even_padding_and_gradients_by_input_are_left_as_they_are():
    x, kernel = images(), Value((3, 3, 4, 8), "float32", 4 * 288)
    reverse = Node("rev", [kernel], [])
    turned = Value(kernel.shape, "float32", kernel.size, reverse)
    for node in (
        layer(x, kernel, padding=((1, 1), (1, 1))),
        layer(x, kernel, strides=(1, 1), holes=(2, 2)),
        layer(x, turned, strides=(1, 1)),
    ):
        assert for_cudnn([node]) == [node]
    # With strides it cannot be one, and turned twice it is none.
    twice = Value(kernel.shape, "float32", kernel.size, Node("rev", [turned], []))
    for node in (layer(x, turned), layer(x, twice, strides=(1, 1))):
        assert len(for_cudnn([node])) == 2
