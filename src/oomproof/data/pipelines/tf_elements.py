"""What an element is at each stage of a tf.data pipeline: bytes of its parts, and whether they are its own.

Sizes come from shapes; where those are not known a few real elements are made, from a pipeline without the stages that
would first have to fill up (shuffle, cache, prefetch).
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from oomproof._records.units import DTYPE_BYTES, tensor_bytes
from oomproof.data.pipelines.tf_rebuild import CannotRebuildError, rebuilt
from oomproof.data.pipelines.tf_stages import Node

# TensorFlow hands out slices of a tensor without copying them if they start at such addresses.
_ALIGNMENT = 64
# A handle, a shape and what malloc needs, for each tensor that is kept; and the vector an element is.
PART_OVERHEAD, ELEMENT_OVERHEAD = 160, 96
_PASS = {"filter", "shuffle", "cache", "prefetch", "repeat", "take", "skip", "shard", "options", "pass"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of an element.

    Attributes:
        bytes: Its size.
        owned: Whether it has memory of its own; `False` for a view of what is held elsewhere.
        dtype: In NumPy's words.
        measured: Whether its size was seen and not derived.
    """

    bytes: int
    owned: bool
    dtype: str
    measured: bool = False


Element = tuple[Part, ...] | None


@dataclasses.dataclass
class Elements:
    """The elements at each stage, made when they are asked for. `seconds` and `samples` bound what is made for that."""

    batch_size: int | None = None
    seconds: float = 2.0
    samples: int = 16

    def __post_init__(self) -> None:
        self._known: dict[int, Element] = {}
        self._kept: list[Node] = []

    def at(self, node: Node) -> Element:
        """An element that leaves this stage, `None` when that cannot be known."""
        key = id(node.dataset)
        if key not in self._known:
            # The node is kept, or its id could be another's one day.
            self._kept.append(node)
            self._known[key] = self._made(node)
        return self._known[key]

    def _made(self, node: Node) -> Element:
        first = self.at(node.inputs[0]) if node.inputs else None
        if node.kind in ("tensor_slices", "tensors"):
            return tuple(_from_source(tensor, node.kind == "tensor_slices") for tensor in node.dataset._tensors)
        if node.kind == "cache":
            # A cache in memory keeps the elements it has seen: what comes out is what is kept.
            return first if first is None or node.on_disk else tuple(_shared(part) for part in first)
        if node.kind in _PASS and first is not None and len(first) == len(node.specs):
            return first
        if node.kind == "zip":
            whole: list[Part] = []
            for each in node.inputs:
                if (parts_of := self.at(each)) is None:
                    return None
                whole += parts_of
            return tuple(whole)
        if node.kind == "batch" and first is not None:
            size = node.number("_batch_size", 1)
            return tuple(Part(part.bytes * size, True, part.dtype, part.measured) for part in first)
        passed = node.function.passed_on if node.kind == "map" and node.function else {}
        parts = self._from_specs(node)
        if parts is None or first is None:
            return parts
        return tuple(first[passed[i]] if passed.get(i, len(first)) < len(first) else p for i, p in enumerate(parts))

    def _from_specs(self, node: Node) -> Element:
        found = [self._from_spec(spec, node) for spec in node.specs]
        if None not in found:
            return tuple(part for part in found if part is not None)
        measured = self._measured(node)
        if measured is None:
            return None
        return tuple(seen if part is None else part for part, seen in zip(found, measured, strict=True))

    def _from_spec(self, spec: Any, node: Node) -> Part | None:
        shape = getattr(spec, "shape", None)
        if type(spec).__name__ != "TensorSpec" or shape is None or shape.rank is None:
            return None
        sizes, dtype = list(shape), spec.dtype.base_dtype.name
        if sizes and sizes[0] is None:
            sizes[0] = batch_size_at(node) or None
        if None in sizes or dtype not in DTYPE_BYTES:
            return None
        return Part(tensor_bytes(tuple(sizes), dtype), True, dtype)

    def _measured(self, node: Node) -> Element:
        """The mean of a few elements."""
        import tensorflow as tf

        try:
            dataset = rebuilt(node, without=("shuffle", "cache", "prefetch", "repeat"))
        except CannotRebuildError:
            dataset = node.dataset
        seen: list[list[int]] = []
        dtypes: list[str] = []
        until = time.monotonic() + self.seconds
        for element in dataset.take(self.samples):
            tensors = tf.nest.flatten(element)
            if not all(hasattr(tensor, "dtype") for tensor in tensors):
                # Windows are datasets.
                return None
            seen.append([_bytes_of(tensor) for tensor in tensors])
            dtypes = [tensor.dtype.name for tensor in tensors]
            if time.monotonic() > until:
                break
        if not seen:
            return None
        means = [sum(column) // len(seen) for column in zip(*seen, strict=True)]
        return tuple(Part(mean, True, dtype, measured=True) for mean, dtype in zip(means, dtypes, strict=True))


def batch_size_at(node: Node) -> int | None:
    """The size of the batch that a stage works on, if its elements are batches."""
    if node.kind in ("batch", "padded_batch"):
        return node.number("_batch_size", 1)
    if node.kind in ("unbatch", "flat_map", "interleave", "unknown") or not node.inputs:
        return None
    return batch_size_at(node.inputs[0])


def _from_source(tensor: Any, sliced: bool) -> Part:
    dtype = tensor.dtype.base_dtype.name
    whole = _bytes_of(tensor)
    if not sliced:
        return Part(whole, False, dtype)
    row = whole // max(1, int(tensor.shape[0] or 1))
    return Part(row, owned=dtype == "string" or row % _ALIGNMENT != 0, dtype=dtype)


def _shared(part: Part) -> Part:
    return dataclasses.replace(part, owned=False)


def _bytes_of(tensor: Any) -> int:
    import tensorflow as tf

    if not isinstance(tensor, tf.Tensor):
        # Ragged and sparse tensors are made of plain ones.
        return sum(_bytes_of(each) for each in tf.nest.flatten(tensor, expand_composites=True))
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor))) + 24 * int(tf.size(tensor))
    return tensor_bytes(tuple(tensor.shape), tensor.dtype.base_dtype.name)
