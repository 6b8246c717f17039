"""StableHLO text read into a program, without any framework."""

import pathlib

from oomproof._simulators.xla.fusion import Fusion
from oomproof._simulators.xla.schedule import planned
from oomproof._simulators.xla.stablehlo import read

TEXTS = pathlib.Path(__file__).parent / "stablehlo"
STEP, LOOP = ((TEXTS / f"{name}.mlir").read_text() for name in ("step", "loop"))


def test_a_step():
    program, settled = read(STEP)
    assert [value.size for value in program.inputs] == [64 * 16 * 4, 16 * 32 * 4]
    names = [node.name for node in program.nodes]
    # What is called is put in its place, and what was computed before is not computed again.
    assert names == ["dot_general", "add", "reduce_sum", "transpose", "dot_general", "sub"]
    product, _, reduction, _, gradient, update = program.nodes
    assert product.outputs[0].shape == (64, 32)
    assert reduction.axes == (0,)
    assert gradient.scope == "gradient_tape/net/dense/MatMul"
    assert product.scope == "net/dense/MatMul"
    assert settled == {id(update.outputs[0])}
    assert program.outputs[1] is update.outputs[0]


def test_what_takes_memory_in_it():
    program, settled = read(STEP)
    kernels = Fusion(program).kernels
    # The transpose is part of the product that reads it, and the new weights take the place of the old.
    assert "transpose" not in [kernel.node.name for kernel in kernels]
    plan = planned(kernels, settled)
    assert 64 * 32 * 4 <= plan.peak <= 3 * 64 * 32 * 4


def test_a_loop_reads_where_it_is_what_it_does_not_change():
    program, _ = read(LOOP)
    (loop,) = [node for node in program.nodes if node.name == "while"]
    assert [value.size for value in loop.outputs] == [4, 400]
    (body,) = loop.bodies
    assert [node.name for node in body.nodes] == ["add", "add"]
    assert program.outputs[0] is loop.outputs[1]


CONVOLUTION = """module {
  func.func @main(%arg0: tensor<8x16x16x3xf32> loc("x"), %arg1: tensor<8x8x8x4xf32> loc("g")) -> tensor<3x3x3x4xf32> {
    %0 = stablehlo.convolution(%arg0, %arg1) dim_numbers = [f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f], window = {stride = \
[1, 1], pad = [[0, 1], [0, 1]], lhs_dilate = [1, 1], rhs_dilate = [2, 2]} {batch_group_count = 1 : i64, \
feature_group_count = 1 : i64} : (tensor<8x16x16x3xf32>, tensor<8x8x8x4xf32>) -> tensor<3x3x3x4xf32> loc(#loc1)
    return %0 : tensor<3x3x3x4xf32> loc(#loc1)
  } loc(#loc1)
}
#loc1 = loc("net/conv")
"""


def test_a_convolution():
    program, _ = read(CONVOLUTION)
    pad, node = program.nodes
    assert (pad.name, pad.outputs[0].shape, node.inputs[0] is pad.outputs[0]) == ("pad", (8, 17, 17, 3), True)
    conv = node.convolution
    assert conv.shapes == ((8, 16, 16, 3), (8, 8, 8, 4), (3, 3, 3, 4))
    assert (conv.first, conv.second, conv.result) == ((3, 0), (3, 0), (2, 3))
    assert (conv.strides, conv.padding, conv.holes, conv.window_holes) == ((1, 1), ((0, 1), (0, 1)), (1, 1), (2, 2))
    assert not conv.grouped
    assert node.workspace > 0
    (plain,) = read(CONVOLUTION, gpu=False)[0].nodes
    assert plain.workspace == 0
