"""What TensorFlow's kernels do with memory: which results are new, which are an input's, what is needed meanwhile."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

from oomproof._simulators.tensorflow.convolutions import CONVOLUTIONS, convolution_scratch
from oomproof._simulators.tensorflow.graph import Node, TensorType


def ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


# The result is the input, seen differently.
_SAME_BUFFER = ops("""
    Identity IdentityN Reshape ExpandDims Squeeze StopGradient PreventGradient Snapshot Bitcast CheckNumerics
    PlaceholderWithDefault EnsureShape Enter Exit NextIteration
""")
# The result is written over an input of the same size if nobody else needs it.
_IN_PLACE = ops("""
    Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BiasAdd BitwiseAnd BitwiseOr BitwiseXor Ceil ClipByValue
    Conj Cos Cosh Digamma Div DivNoNan Elu EluGrad Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod
    FusedBatchNormGradV3 FusedBatchNormV3 Greater GreaterEqual Inv InvGrad Invert LeakyRelu LeakyReluGrad Less LessEqual
    Lgamma Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NotEqual
    OnesLike Pow RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Select
    SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softmax Softplus SoftplusGrad Softsign SoftsignGrad Sqrt
    SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad TruncateDiv Xdivy Xlog1py Xlogy ZerosLike _FusedBatchNormEx
""")
_REDUCTIONS = ops("Sum Mean Prod Max Min All Any EuclideanNorm")
# Results that are the input where nothing is cut off, added or repeated.
_UNCHANGED_IF_WHOLE = ops("Slice StridedSlice Pad Tile BroadcastTo ConcatV2") | _REDUCTIONS
# What these say is read by the host, which keeps it wherever the rest is.
_ON_HOST = ops("Shape ShapeN Size Rank BroadcastGradientArgs BroadcastArgs VariableShape TensorListLength")
_CONVOLUTION_GRADIENTS = frozenset(("Conv2DBackpropFilter", "Conv2DBackpropInput"))
_POOLING_IN_3D = ops("MaxPool3D MaxPool3DGrad AvgPool3D AvgPool3DGrad")
# Constants of TensorFlow's convolution kernels for CPUs.
_WORKING_SET = 30 * 2**20
_PER_THREAD = 256 * 2**10


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """How an op uses memory.

    Attributes:
        same: Result 0 is input 0.
        in_place: Result 0 may be written over an input.
        scratch: Bytes needed while it runs, one number for each allocation.
        overwrites: An input it writes over while it runs; where others need that, it writes to a copy.
        host: Its results are in the memory of the host.
        fixed: Whether `scratch` is as large for a part of the batch.
    """

    same: bool = False
    in_place: bool = False
    scratch: tuple[int, ...] = ()
    overwrites: int | None = None
    host: bool = False
    fixed: bool = False


def kernel_of(node: Node, inputs: Sequence[TensorType], outputs: Sequence[TensorType], gpu: bool) -> Kernel:
    if node.op in _SAME_BUFFER:
        return Kernel(same=True)
    if node.op in _ON_HOST or (gpu and _is_for_host(node, outputs)):
        return Kernel(host=True)
    if node.op in _IN_PLACE:
        return Kernel(in_place=True)
    if node.op in _UNCHANGED_IF_WHOLE and inputs[0].size == outputs[0].size:
        return Kernel(same=True)
    if node.op in ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"):
        return Kernel(scratch=(outputs[0].size,))
    if node.op == "MaxPoolGrad" and not gpu:
        # The forward pass once more, and where in each window the largest value was (int64).
        return Kernel(scratch=(math.prod(inputs[1].shape or ()) * 8,), overwrites=1)
    if node.op in _CONVOLUTION_GRADIENTS and not gpu:
        return Kernel(scratch=_columns_scratch(node, inputs, outputs), fixed=True)
    return Kernel(scratch=tuple(n for n in _scratch(node, inputs, outputs, gpu) if n))


def _is_for_host(node: Node, outputs: Sequence[TensorType]) -> bool:
    """On a GPU, numbers that say how to compute stay with the host: sizes, axes, loop counters."""
    return node.op in ("Const", "Range", "Pack", "StridedSlice", "Fill", "ConcatV2", "Mul", "AddV2", "Sub") and all(
        kind.dtype in ("int32", "bool", "string") and len(kind.shape or ()) <= 1 for kind in outputs
    )


def _scratch(node: Node, inputs: Sequence[TensorType], outputs: Sequence[TensorType], gpu: bool) -> Sequence[int]:
    if node.op in _REDUCTIONS:
        return _reduction_scratch(node, inputs)
    if node.op == "Einsum":
        return _einsum_scratch(node, inputs, outputs)
    if gpu and node.op in CONVOLUTIONS:
        return convolution_scratch(node, inputs, outputs)
    if gpu and node.op in _POOLING_IN_3D and node.attributes["data_format"].s.endswith(b"C"):
        # cuDNN pools in three dimensions with the channels first: everything is copied there, or back.
        return [kind.size for kind in (*inputs, *outputs)]
    return ()


def _reduction_scratch(node: Node, inputs: Sequence[TensorType]) -> Sequence[int]:
    """Axes that alternate more than twice between reduced and kept are first sorted, in a copy."""
    axes = node.inputs[1][0].value
    shape = inputs[0].shape
    if axes is None or shape is None:
        return ()
    reduced = {int(axis) % max(len(shape), 1) for axis in axes.ravel()}
    runs: list[bool] = []
    for axis, size in enumerate(shape):
        if size != 1 and (not runs or runs[-1] != (axis in reduced)):
            runs.append(axis in reduced)
    return (inputs[0].size,) if len(runs) > 3 else ()


def _einsum_scratch(node: Node, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> Sequence[int]:
    """Operands are transposed to batch, free, contracted axes (or batch, contracted, free), and the result back."""
    terms, _, result = node.attributes["equation"].s.decode().partition("->")
    operands = terms.split(",")
    if len(operands) != 2 or "." in terms or any(kind.shape is None for kind in inputs):
        return ()
    order = {label: number for number, label in enumerate(dict.fromkeys(terms + result)) if label != ","}
    left, right = operands

    def role(label: str) -> int:
        shared = label in left and label in right
        return (0 if label in result else 2) if shared else (1 if label in result else 3)

    sizes: dict[str, int] = {}
    scratch = []
    for labels, kind in zip(operands, inputs, strict=True):
        sizes |= dict(zip(labels, kind.shape or (), strict=True))
        present = [label for label in labels if sizes[label] != 1]
        plain = sorted(present, key=lambda label: (role(label), order[label]))
        swapped = sorted(present, key=lambda label: ((0, 2, 1, 3)[role(label)], order[label]))
        scratch.append(0 if present in (plain, swapped) else kind.size)
    batch = [label for label in left if role(label) == 0]
    free = [label for labels in operands for label in sorted(labels, key=order.__getitem__) if role(label) == 1]
    natural = [label for label in sorted(batch, key=order.__getitem__) + free if sizes[label] != 1]
    scratch.append(0 if natural == [label for label in result if sizes[label] != 1] else outputs[0].size)
    return scratch


def _columns_scratch(node: Node, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> tuple[int, ...]:
    """TensorFlow's gradients of convolutions on a CPU lay out the windows of several images as one matrix.

    As many as fill a certain working set, however few images there are.
    """
    to_filter = node.op == "Conv2DBackpropFilter"
    kernel, gradient = (outputs[0] if to_filter else inputs[1]).shape, inputs[2].shape
    if kernel is None or gradient is None or len(kernel) != 4 or len(gradient) != 4:
        return ()
    positions, window, filters = gradient[1] * gradient[2], math.prod(kernel[:3]), kernel[3]
    columns, item = positions * window, 4 if inputs[2].dtype == "float32" else 2
    work = columns + positions * filters + window * filters
    threads = os.cpu_count() or 1
    together = -(-(_WORKING_SET // item) // work)
    if not to_filter and (gradient[0] == 1 or work / threads >= _PER_THREAD / item):
        together = 1
    return (together * columns * item,)
