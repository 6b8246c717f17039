"""What XLA keeps in memory, as modelled: small programs, each for one rule, that XLA was seen to follow."""

import pytest

from oomproof._simulators.xla.fusion import Fusion
from oomproof._simulators.xla.program import Node, Value, linked
from oomproof._simulators.xla.schedule import planned
from oomproof._simulators.xla.stablehlo import read
from oomproof._simulators.xla.zeros import with_shared_zeros

ROWS, COLUMNS = 4096, 4096
BYTES = {"float32": 4, "float16": 2, "bool": 1}


class Writing:
    """Writes a program down, operation by operation."""

    def __init__(self, dtype="float32", shape=(ROWS, COLUMNS)):
        self.nodes, self.inputs, self.dtype, self.shape = [], [], dtype, shape

    def value(self, shape=None, dtype=None):
        shape, dtype = shape or self.shape, dtype or self.dtype
        count = 1
        for size in shape:
            count *= size
        return Value(shape, dtype, count * BYTES[dtype])

    def given(self, shape=None):
        self.inputs.append(self.value(shape))
        return self.inputs[-1]

    def op(self, name, *inputs, shape=None, dtype=None, **facts):
        result = self.value(shape, dtype)
        result.node = Node(name, list(inputs), [result], **facts)
        self.nodes.append(result.node)
        return result

    def kernels(self, *outputs):
        return Fusion(linked(with_shared_zeros(self.nodes), self.inputs, outputs)).kernels


def made(kernels):
    return {id(value) for kernel in kernels for value in kernel.makes}


def test_what_is_cheap_is_computed_again_and_what_is_dear_is_kept():
    kept = {}
    for name in ("neg", "tanh"):
        program = Writing()
        x = program.op("dot_general", program.given(), program.given())
        y = program.op(name, x)
        others = [program.given() for _ in range(2)]
        kept[name] = id(y) in made(program.kernels(*(program.op("mul", y, other) for other in others)))
    assert kept == {"neg": False, "tanh": True}


def test_a_sum_that_many_read_is_kept_since_each_would_read_two_arrays():
    kept = {}
    for readers in (1, 5):
        program = Writing()
        left, right = (program.op("dot_general", program.given(), program.given()) for _ in range(2))
        both = program.op("add", left, right)
        kept[readers] = id(both) in made(program.kernels(*(program.op("neg", both) for _ in range(readers))))
    assert kept == {1: False, 5: True}


@pytest.mark.parametrize("bias", ["of the program", "computed"])
def test_a_product_computes_what_it_reads_where_that_is_no_more(bias):
    program = Writing()
    first = program.op("dot_general", program.given(), program.given())
    vector = program.given((COLUMNS,))
    if bias == "computed":
        vector = program.op("convert_element_type", vector, shape=(COLUMNS,))
    before = program.op("add", first, program.op("broadcast_in_dim", vector))
    after = program.op("max", before, zero=True)
    kernels = program.kernels(program.op("dot_general", after, program.given()))
    (last,) = [kernel for kernel in kernels if kernel.makes[0].returned]
    assert id(after) not in made(kernels)
    assert (first if bias == "of the program" else before) in last.reads


def test_a_product_writes_in_the_precision_that_is_wanted():
    program = Writing()
    product = program.op("dot_general", program.given(), program.given())
    half = program.op("convert_element_type", product, dtype="float16")
    kernels = program.kernels(program.op("sort", half, dtype="float16"))
    assert id(product) not in made(kernels)
    assert id(half) in made(kernels)


@pytest.mark.parametrize(("dtype", "kept"), [("float32", False), ("float16", True)])
def test_in_half_precision_what_erfc_reads_is_kept(dtype, kept):
    # With reshapes around matrix products XLA counts what it reads once for each time that erfc uses it.
    program = Writing(dtype, (64, 64, 4096))
    x = program.op("dot_general", program.given(), program.given())
    scaled = program.op("mul", program.op("neg", x))
    forward = program.op("mul", x, program.op("erfc", scaled))
    backward = program.op("exp", program.op("square", scaled))
    gradient = program.op("mul", backward, program.op("mul", x, program.given()))
    assert (id(scaled) in made(program.kernels(forward, gradient))) is kept


def test_a_scatter_computes_what_it_adds():
    program = Writing()
    added = program.op("mul", program.given(), program.given())
    start = program.op("broadcast_in_dim")
    kernels = program.kernels(program.op("scatter-add", start, added))
    assert id(added) not in made(kernels)
    assert id(start) in made(kernels)


def pooled():
    """A ReLU whose result is pooled, and the gradient of both."""
    program = Writing(shape=(64, 64, 64, 64))
    x = program.op("conv_general_dilated", program.given(), program.given())
    y = program.op("max", x, zero=True)
    gradient = program.op("select_and_scatter_add", program.given((64, 32, 32, 64)), y)
    mask = program.op("gt", x, dtype="bool", zero=True)
    return program, gradient, program.op("select_n", mask, program.op("broadcast_in_dim", zero=True), gradient)


def test_the_zeros_that_pooling_scatters_into_are_those_of_the_relu():
    program, gradient, result = pooled()
    kernels = program.kernels(result)
    (zeros,) = [kernel.makes[0] for kernel in kernels if kernel.node.name == "broadcast_in_dim"]
    scatter = next(kernel for kernel in kernels if gradient in kernel.makes)
    copy = next(kernel for kernel in kernels if kernel.node.name == "copy")
    assert copy.reads == [zeros]
    assert scatter.in_place == copy.makes
    assert zeros in next(kernel for kernel in kernels if result in kernel.makes).reads


def test_without_pooling_there_are_no_zeros():
    program = Writing()
    x = program.op("dot_general", program.given(), program.given())
    kernels = program.kernels(program.op("sort", program.op("max", x, zero=True)))
    assert not [kernel for kernel in kernels if kernel.node.name == "broadcast_in_dim"]


def test_an_element_is_written_over_one_that_nobody_else_reads():
    peaks = {}
    for readers in (1, 2):
        program = Writing()
        x = program.op("dot_general", program.given(), program.given())
        y = program.op("tanh", x)
        others = [program.op("sort", x) for _ in range(readers - 1)]
        results = [program.op("sort", value) for value in (y, *others)]
        peaks[readers] = planned(program.kernels(*results), {id(value) for value in results}).peak
    array = ROWS * COLUMNS * 4
    assert peaks == {1: array, 2: 2 * array}


def test_zeros_are_seen_in_stablehlo():
    text = """\
module @zeros {
  func.func public @main(%arg0: tensor<4x8xf32>) -> tensor<4x8xf32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<4x8xf32> loc(#loc1)
    %cst_0 = stablehlo.constant dense<1.000000e+00> : tensor<4x8xf32> loc(#loc1)
    %0 = stablehlo.maximum %arg0, %cst : tensor<4x8xf32> loc(#loc1)
    %1 = stablehlo.multiply %0, %cst_0 : tensor<4x8xf32> loc(#loc1)
    return %1 : tensor<4x8xf32> loc(#loc1)
  } loc(#loc)
}
#loc = loc(unknown)
#loc1 = loc("x")
"""
    program, _ = read(text)
    assert {node.name: node.zero for node in program.nodes} == {"max": True, "mul": False}


def test_elements_are_written_over_those_that_no_other_kernel_reads():
    for others in (0, 1):
        program = Writing()
        x = program.op("dot_general", program.given(), program.given())
        y = program.op("tanh", x)
        more = [program.op("dot_general", x, program.given()) for _ in range(others)]
        writing = next(kernel for kernel in program.kernels(y, *more) if y in kernel.makes)
        assert writing.in_place == ([] if others else [x])
