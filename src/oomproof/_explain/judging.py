"""What was seen of a log → its Diagnosis."""

from __future__ import annotations

import dataclasses
from typing import Any

from oomproof._explain.causes import Asked, Case, cause_of
from oomproof._explain.fixes import Facts, fixes_for
from oomproof._explain.layers import layer_of
from oomproof._explain.lines import shortened
from oomproof._explain.scan import Hit, Incident, Scan, numbers_of
from oomproof._records.diagnosis import Diagnosis, Evidence, Memory
from oomproof._records.units import DTYPE_BYTES, tensor_bytes

_EVIDENCE = 8
# A CUDA context takes this much outside of any allocator.
_CONTEXT = 0.7 * 2**30

_SHOWN = {
    "total": "total",
    "limit": "limit",
    "capacity": "capacity",
    "in_use": "in_use",
    "allocated": "allocated",
    "free": "free",
    "largest_free": "largest_free",
    "reserved": "reserved",
    "unallocated": "reserved_unused",
    "rss": "resident",
    "held_elsewhere": "held_elsewhere",
}


def judge(scan: Scan, model: Any = None) -> Diagnosis:
    """The diagnosis of all that was seen."""
    incident = scan.incident
    if incident is None:
        return _nothing(scan)
    root = incident.root
    if root.pattern.kind == "other":
        return _not_memory(incident, root)
    asked, numbers = _asked(incident, root), numbers_of(incident, scan.dump)
    raised_by = _raised_by(incident, root)
    if scan.capacity is not None:
        numbers.setdefault("capacity", scan.capacity)
    others = _others(incident, numbers)
    if others:
        numbers["held_elsewhere"] = sum(others.values())
    memory = _memory(incident, root)
    cause, sure, why = cause_of(Case(root, incident, scan.progress, asked, numbers), memory)
    named = {pid: size for pid, size in others.items() if pid}
    facts = Facts(cause, raised_by, memory, root.pattern.topic, asked.size, asked.shape, asked.dtype, numbers, named)
    shown = {label: numbers[name] for name, label in _SHOWN.items() if name in numbers}
    return Diagnosis(
        is_memory=True,
        memory=memory,
        raised_by=raised_by,
        requested_bytes=asked.size,
        tensor_shape=asked.shape,
        dtype=asked.dtype,
        op=asked.op,
        layer=_layer(incident, asked.op, model),
        cause=cause,
        confidence=round(sure, 2),
        summary=why,
        numbers=shown,
        evidence=_evidence(scan, incident, root, cause),
        fixes=fixes_for(facts),
    )


# Which fields were said


def _asked(incident: Incident, root: Hit) -> Asked:
    # What was asked of another memory is another matter.
    alike = [hit for hit in incident.hits.values() if hit.pattern.memory == root.pattern.memory]
    said = [root.said, *(hit.said for hit in alike if hit.pattern.kind != "other")]
    details = incident.details

    def first(*names: str) -> Any:
        return next((each[name] for each in said for name in names if each.get(name) is not None), None)

    stated, rounded = first("bytes"), first("size")
    if (own := root.said.get("size")) is not None and stated is not None and abs(stated - own) > 0.01 * own:
        # The exact figure of another request, such as one for a pool that had failed before.
        stated, rounded = None, own
    shape, dtype, op = first("shape"), first("dtype"), details.get("op")
    if shape and dtype is None:
        dtype = details.get("node_dtype")
    exact = None
    if shape and dtype in DTYPE_BYTES:
        exact = tensor_bytes(shape, dtype)
    size = stated if stated is not None else rounded
    if exact is not None and (size is None or (stated is None and abs(exact - size) <= 0.01 * exact)):
        # "36.5 GiB" is rounded; its shape is not.
        size = exact
    if shape is None and op is None:
        # XLA lists what is largest first.
        shape, dtype, op = (details.get(f"buffer_{name}") for name in ("shape", "dtype", "op"))
    return Asked(size, shape or None, dtype, op)


def _raised_by(incident: Incident, root: Hit) -> str:
    raised_by = root.pattern.raised_by
    if raised_by == "xla" and "tensorflow/core/common_runtime/" in root.text:
        return "tensorflow"
    # TensorFlow writes of the same files as local_xla.
    told = any(
        path in hit.text for hit in incident.hits.values() for path in ("external/xla/", "external/org_tensorflow/")
    )
    return "jax" if raised_by in ("xla", "tensorflow") and ("jax" in incident.details or told) else raised_by


def _memory(incident: Incident, root: Hit) -> Memory:
    memory: Memory = root.pattern.memory  # type: ignore[assignment]
    # XLA has words that it uses on CPUs and, at times, on devices; an allocator that is named settles it.
    if memory == "host" and root.pattern.raised_by in ("jax", "xla"):
        named = [hit for hit in incident.hits.values() if hit.pattern.memory == "device" and "GPU_" in hit.text]
        return "device" if named else memory
    return memory


def _others(incident: Incident, numbers: dict[str, int]) -> dict[int, int]:
    """{process: bytes} of the device that is not ours; process 0 where nobody is named."""
    own = numbers.get("allocated", 0) + numbers.get("unallocated", 0)
    own = max(own, numbers.get("reserved", 0))
    others = dict(incident.processes)
    if others and "this_process" not in numbers:
        # In a container our own process goes by a number that we do not know.
        ours = [pid for pid, size in others.items() if own <= size * 1.02 and size <= own + 2 * _CONTEXT]
        for pid in ours[:1]:
            del others[pid]
    if not others and "other_process" in numbers:
        others = {0: numbers["other_process"]}
    if not others and not incident.processes and "total" in numbers and "free" in numbers and own:
        ours_in_all = max(numbers.get("this_process", 0), own + int(_CONTEXT))
        rest = numbers["total"] - numbers["free"] - ours_in_all
        others = {0: rest} if rest > _CONTEXT else {}
    return others


def _layer(incident: Incident, op: str | None, model: Any) -> str | None:
    said = incident.details.get("layer")
    if said:
        return layer_of(said, model) if model is not None else str(said)
    return layer_of(op, model) if op else None


# What it rests on


def _evidence(scan: Scan, incident: Incident, root: Hit, cause: str) -> tuple[Evidence, ...]:
    hits = sorted(incident.hits.values(), key=lambda hit: (hit is not root, -hit.pattern.counts, hit.line))
    found: dict[int, str] = {}
    for hit in hits:
        if hit.pattern.counts >= 1 and len(found) < _EVIDENCE - 3:
            found.setdefault(hit.line, hit.text)
    if cause == "leak-over-time" and scan.progress.grew:
        found |= {line: text for line, text in scan.progress.figures if line not in found}
    for line, text in incident.detail_lines:
        if len(found) < _EVIDENCE:
            found.setdefault(line, text)
    return _as_evidence(found)


def _as_evidence(found: dict[int, str]) -> tuple[Evidence, ...]:
    return tuple(Evidence(line, shortened(text)) for line, text in sorted(found.items()))


# No memory failure


def _not_memory(incident: Incident, root: Hit) -> Diagnosis:
    known = {
        "disk": "A disk is full; memory did not run out.",
        "files": "Too many files are open; memory did not run out.",
        "illegal": "An invalid access or a failed assertion on the device; memory did not run out.",
        "grpc": "A message exceeded the size limit of a gRPC channel; memory did not run out.",
        "quota": "A quota or rate limit was reached; memory did not run out.",
        "nccl": "Communication between devices failed; the log says nothing about memory.",
        "processes": "The limit of processes or threads was reached; memory did not run out.",
    }
    text = known.get(root.pattern.topic, "It failed for another reason than memory.")
    sure = 0.95 if root.pattern.counts >= 2 else 0.7
    return _none(text, sure, {root.line: root.text}, root.pattern.raised_by, root.pattern.topic)


def _nothing(scan: Scan) -> Diagnosis:
    if scan.survived:
        hit = scan.survived[0].root
        text = "Memory ran out, but training went on."
        if hit.pattern.kind == "other":
            text = "Training went on after an error; memory did not run out."
        return _none(text, 0.8, {hit.line: hit.text}, hit.pattern.raised_by)
    if scan.harmless:
        hit = scan.harmless
        return _none("A warning about memory, not a failure.", 0.9, {hit.line: hit.text})
    if not scan.anything:
        return dataclasses.replace(_none("There is no text to explain.", 0.3, {}), cause="unknown")
    return _none("The log shows no memory failure.", 0.7, {})


def _none(
    summary: str, sure: float, lines: dict[int, str], raised_by: str = "other", topic: str = "harmless"
) -> Diagnosis:
    facts = Facts("not-memory", raised_by, "none", topic, None, None, None, {}, {})
    return Diagnosis(
        is_memory=False,
        memory="none",
        raised_by=raised_by,
        requested_bytes=None,
        tensor_shape=None,
        dtype=None,
        op=None,
        layer=None,
        cause="not-memory",
        confidence=sure,
        summary=summary,
        evidence=_as_evidence(lines),
        fixes=fixes_for(facts),
    )
