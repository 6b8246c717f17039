"""`audit` of a tf.data pipeline."""

from __future__ import annotations

import platform
from typing import Any

from oomproof._machine import host
from oomproof._records.units import format_bytes
from oomproof.data.audit_record import DataAudit, Stage
from oomproof.data.pipelines.tf_elements import Elements, batch_size_at
from oomproof.data.pipelines.tf_findings import findings
from oomproof.data.pipelines.tf_memory import Accounts, Settings, settings_of
from oomproof.data.pipelines.tf_stages import AUTOTUNE, Node, chain_of, walk

_GRAVEST = ("problem", "warning", "note", "ok")
# A copy of less is not worth a line.
_WORTH_IT = 2**20
# oneDNN's allocator, which TensorFlow has on most x86 machines, keeps what was freed if it was at least this large.
_POOLED = 256 * 2**10


def audit_tf(dataset: Any, batch_size: int | None, placed: bool) -> DataAudit:
    """What a tf.data pipeline will hold. `placed`: its batches go to a device with memory of its own."""
    end = chain_of(dataset)
    if batch_size is not None and batch_size_at(end) is None and not any(node.kind == "unknown" for node in walk(end)):
        end = chain_of(dataset.batch(batch_size))
    elements, settings = Elements(), settings_of(end)
    books = Accounts(end, elements, settings)
    stages = _stages(end, books)
    running = books.total(end, ends=True)
    rest = running - sum(stage.bytes or 0 for stage in stages)
    if rest:
        stages.append(Stage("prefetch(1)", rest, "added at the end by TensorFlow"))
    total = _with_rewriting(end, elements, settings, running)
    if total > running:
        stages.append(
            Stage("iterator", total - running, "TensorFlow copies source tensors when it optimizes the pipeline")
        )
    element = _bytes(elements, end) or 0
    available = host.available()
    found = findings(end, books, stages, available, batch_size)
    return DataAudit(
        kind="tf.data",
        stages=tuple(stages),
        host_bytes=total,
        device_bytes=element if placed else 0,
        bound_bytes=_bound(end, books, total),
        available=available,
        findings=tuple(sorted(found, key=lambda each: _GRAVEST.index(each.severity))),
    )


def _stages(end: Node, books: Accounts) -> list[Stage]:
    found, totals = [], dict[int, int]()
    for node in walk(end):
        before = sum(totals[id(each.dataset)] for each in node.inputs)
        totals[id(node.dataset)] = books.total(node, ends=False)
        element = _bytes(books.elements, node)
        known = element is not None and id(node.dataset) not in books.unknown
        count = node.cardinality if node.cardinality >= 0 else None
        added = totals[id(node.dataset)] - before
        found.append(Stage(node.name, added if known else None, _note(node, books), element, count))
    return found


def _note(node: Node, books: Accounts) -> str:
    if node.kind in ("tensor_slices", "tensors"):
        return "tensors in the pipeline, in addition to the arrays they were made from"
    size = books.size(node.inputs[0]) if node.inputs else 0
    if node.kind == "unknown":
        return "oomproof does not know this stage"
    if node.kind == "shuffle":
        words = "views of the source" if size < 1024 else f"elements of {format_bytes(size)}"
        return f"buffer of {words}"
    if node.kind == "cache":
        if node.on_disk:
            return "on disk"
        count = node.inputs[0].cardinality
        return "unknown number of elements" if count < 0 else f"{count} elements of {format_bytes(size)}"
    if node.kind == "map":
        calls = books.calls(node)
        return "one call at a time" if calls is None else f"{calls} calls in flight{_whose(node)}"
    if node.kind == "batch" and books.is_fused(node):
        return "2 batches in progress, fused with the map by TensorFlow"
    if node.kind == "prefetch" and node.number("_buffer_size") == AUTOTUNE:
        return "TensorFlow starts with 1 and doubles it when it runs empty"
    return ""


def _whose(node: Node) -> str:
    return "" if (node.parallel_calls or AUTOTUNE) != AUTOTUNE else ", TensorFlow's choice"


def _with_rewriting(end: Node, elements: Elements, settings: Settings, running: int) -> int:
    """Bytes at the peak, with the copy of the source tensors that optimising a pipeline takes for a moment."""
    sources = Accounts(end, elements, settings).at(end).sources
    if not settings.rewrites or sources < _WORTH_IT:
        return running
    if not _keeps_what_was_freed():
        return max(running, 2 * sources)
    total = sources
    for counts in (lambda part: part.bytes >= _POOLED, lambda part: part.bytes < _POOLED):
        books = Accounts(end, elements, settings, counts)
        copied = books.at(end).sources
        total += max(copied, books.total(end, ends=True) - copied)
    return total


def _keeps_what_was_freed() -> bool:
    """Whether TensorFlow has oneDNN's allocator: only buffers that come from it as well take the room of the copy."""
    try:
        from oomproof._compat import tf_data

        return bool(tf_data.built_with_onednn())
    except (ImportError, AttributeError):
        return platform.machine() == "x86_64"


def _bound(end: Node, books: Accounts, total: int) -> int | None:
    """What buffers can grow to that TensorFlow sizes: by default half of the RAM that is there."""
    sized = [node for node in walk(end) if node.kind == "prefetch" and node.number("_buffer_size") == AUTOTUNE]
    if not sized:
        return None
    ram = end.dataset.options().autotune.ram_budget or (host.available() or 0) // 2
    counts = [node.cardinality for node in sized]
    # No buffer holds more than an epoch.
    most = sum(count * books.size(node) if count >= 0 else ram for count, node in zip(counts, sized, strict=True))
    return total + min(int(ram), most)


def _bytes(elements: Elements, node: Node) -> int | None:
    element = elements.at(node)
    return None if element is None else sum(part.bytes for part in element)
