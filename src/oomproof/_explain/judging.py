"""What was seen of a log → its Diagnosis."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from oomproof._explain.fixes import Facts, fixes_for
from oomproof._explain.layers import layer_of
from oomproof._explain.lines import shortened
from oomproof._explain.scan import Hit, Incident, Scan, numbers_of
from oomproof._records.diagnosis import Cause, Diagnosis, Evidence, Memory
from oomproof._records.units import DTYPE_BYTES, format_bytes, tensor_bytes

_GIB = 2**30
_EVIDENCE = 8
# A CUDA context takes this much outside of any allocator.
_CONTEXT = 0.7 * _GIB
# One request of more than this share of all there is, is too big by itself.
_TOO_BIG = 0.95
_TOO_BIG_ALONE = 0.5
# And of more than this where nothing is said of the device.
_TOO_BIG_ANYWHERE = 16 * _GIB
# From here on, what others hold, or what is free but in pieces, is the story.
_HELD = 0.3
_IN_PIECES = 0.1
_FULL = 0.95
# A framework that finds this little when it starts has been left that little.
_SMALL_DEVICE = 1.5 * _GIB

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
}


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What was asked for."""

    size: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    op: str | None = None


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
    cause, sure, why = _cause(scan, incident, asked, numbers, memory)
    named = {pid: size for pid, size in others.items() if pid}
    facts = Facts(cause, raised_by, memory, root.pattern.topic, asked.size, asked.shape, asked.dtype, numbers, named)
    shown = {
        label: numbers[name]
        for name, label in {**_SHOWN, "held_elsewhere": "held_elsewhere"}.items()
        if name in numbers
    }
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


def _asked(incident: Incident, root: Hit) -> _Asked:
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
    return _Asked(size, shape or None, dtype, op)


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


# The cause


def _cause(
    scan: Scan, incident: Incident, asked: _Asked, numbers: dict[str, int], memory: str
) -> tuple[Cause, float, str]:
    root = incident.root
    sure, given = root.pattern.sure, root.pattern.cause
    progress = scan.progress
    much = "" if asked.size is None else f" asking for {format_bytes(asked.size)}"
    if memory == "host":
        if progress.grew:
            first, last = progress.grew
            grew = f"{format_bytes(first)} to {format_bytes(last)}"
            text = f"Host memory grew from {grew} until it ran out: something leaks."
            return "leak-over-time", sure * 0.9, text
        return "host-ram", sure, f"The memory of the machine ran out{much}{_killed(root)}."
    if memory == "shm":
        return "shm", sure, "The shared memory that processes hand data over in (/dev/shm) is too small."
    if given == "hidden-oom" and 0 < numbers.get("capacity", 0) < _SMALL_DEVICE:
        return _left_little(numbers, sure)
    if given == "hidden-oom":
        text = "A CUDA library failed in the way it does when device memory is short, without saying so."
        return "hidden-oom", sure, text
    if given in get_args(Cause):
        texts = {
            "held-elsewhere": "The device had no room from the start: something else holds its memory, or all of it "
            "was asked for at once.",
            "too-big-single-tensor": f"A single request was larger than the device allows{much}.",
        }
        known: Cause = given  # type: ignore[assignment]
        return known, sure, texts.get(known, "Memory ran out, and the text does not say why.")
    return _device_cause(scan, incident, asked, numbers, much)


def _killed(root: Hit) -> str:
    if root.pattern.raised_by != "kernel":
        return ""
    size = root.said.get("rss")
    return ", and the process was killed" + (f" at {format_bytes(size)}" if size else "")


def _device_cause(
    scan: Scan, incident: Incident, asked: _Asked, numbers: dict[str, int], much: str
) -> tuple[Cause, float, str]:
    root = incident.root
    sure, size = root.pattern.sure, asked.size
    total = numbers.get("limit") or numbers.get("total")
    # A TPU says what the whole program takes; one buffer of it is what may be too big.
    single = numbers.get("piece") if root.pattern.name.startswith("tpu") else size
    room = "" if total is None else f" the {format_bytes(total)}"
    if single and total and single >= _TOO_BIG * total:
        return (
            "too-big-single-tensor",
            sure,
            f"One request of {format_bytes(single)} is more than{room} there are in all.",
        )
    if (loose := _in_pieces(numbers, size, total)) is not None:
        text = f"{format_bytes(loose)} were free, but in pieces too small for {format_bytes(size or 0)}: fragmentation."
        return "fragmentation", sure * 0.9, text
    held = numbers.get("held_elsewhere", 0)
    # Where the process has a limit of its own and the device has room, the others are not in its way.
    has_room = "limit" in numbers and numbers.get("free", 0) >= (size or numbers["limit"])
    if total and held >= _HELD * total and not has_room:
        return "held-elsewhere", sure * 0.95, f"Something else on the device holds {format_bytes(held)} of{room}."
    if size and _not_given(numbers, size):
        text = (
            f"The allocator was allowed {format_bytes(size)} more, and the device did not give it: something holds it."
        )
        return "held-elsewhere", sure * 0.75, text
    if "cuda-driver-allocation" in incident.hits and numbers.get("in_use", 0) < _FULL * (total or 1):
        text = "The device did not give what the framework wanted when it started: something else holds it."
        return "held-elsewhere", sure * 0.75, text
    if root.pattern.name == "torch-cuda-error" and not incident.fitted_before:
        # torch's allocator says what it asked for; without that the driver had no room for as much as a context.
        text = "The driver itself ran out before anything was asked for: something else holds the device's memory."
        return "held-elsewhere", sure * 0.9, text
    if total is None and 0 < numbers.get("capacity", 0) < _SMALL_DEVICE:
        return _left_little(numbers, sure)
    progress = scan.progress
    if progress.grew:
        first, last = progress.grew
        text = (
            f"Memory grew from {format_bytes(first)} to {format_bytes(last)} while steps went through: something leaks."
        )
        return "leak-over-time", sure * 0.95, text
    if incident.fitted_before:
        text = "Steps like this one went through before, so something has been taking memory since, or sizes vary."
        return "leak-over-time", sure * 0.7, text
    used = numbers.get("in_use") or numbers.get("allocated") or 0
    if single and total and single >= _TOO_BIG_ALONE * total and single >= used:
        return (
            "too-big-single-tensor",
            sure * 0.75,
            f"One request of {format_bytes(single)} is most of{room} there are.",
        )
    if single and total is None and single >= _TOO_BIG_ANYWHERE:
        return (
            "too-big-single-tensor",
            sure * 0.75,
            f"One request of {format_bytes(single)} is more than most devices have.",
        )
    text = f"What the step needs in all is more than{room or ' what'} there is: it failed{much}."
    return "steady-exhaustion", sure if total else sure * 0.75, text


def _left_little(numbers: dict[str, int], sure: float) -> tuple[Cause, float, str]:
    found = format_bytes(numbers["capacity"])
    return "held-elsewhere", sure * 0.75, f"The framework found only {found} when it started: something holds the rest."


def _in_pieces(numbers: dict[str, int], size: int | None, total: int | None) -> int | None:
    """How much was free but in pieces, if that was the trouble."""
    if size is None:
        return None
    if "unallocated" in numbers or ("reserved" in numbers and "allocated" in numbers):
        loose = numbers.get("unallocated", numbers.get("reserved", 0) - numbers.get("allocated", 0))
        whole = numbers.get("allocated", 0) + loose
        return loose if loose >= size and loose >= _IN_PIECES * whole else None
    if "in_use" not in numbers:
        return None
    limit = numbers.get("limit") or total or 0
    if numbers["in_use"] >= _FULL * limit:
        return None
    loose = max(numbers.get("free", 0), numbers.get("region", 0) - numbers["in_use"])
    if "region" not in numbers and "free" not in numbers:
        loose = limit - numbers["in_use"]
    return loose if loose >= size > numbers.get("largest_free", 0) else None


def _not_given(numbers: dict[str, int], size: int) -> bool:
    """Whether an allocator that may still grow was not given what it asked for."""
    return "region" in numbers and "limit" in numbers and numbers["limit"] - numbers["region"] >= size


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
        "disk": "A disk is full; memory is not.",
        "files": "Too many files are open; memory is not short.",
        "illegal": "A bad access or assertion on the device; memory did not run out.",
        "grpc": "A message was larger than a channel allows; memory did not run out.",
        "quota": "A quota or rate limit was reached; memory did not run out.",
        "nccl": "Communication failed; the text says nothing about memory.",
        "processes": "The limit of processes or threads was reached; memory did not run out.",
    }
    text = known.get(root.pattern.topic, "It failed, and not because of memory.")
    sure = 0.95 if root.pattern.counts >= 2 else 0.7
    return _none(text, sure, {root.line: root.text}, root.pattern.raised_by, root.pattern.topic)


def _nothing(scan: Scan) -> Diagnosis:
    if scan.survived:
        hit = scan.survived[0].root
        text = "Memory ran out, and training went on: that was survived."
        if hit.pattern.kind == "other":
            text = "There was an error that training went on after; memory did not run out."
        return _none(text, 0.8, {hit.line: hit.text}, hit.pattern.raised_by)
    if scan.harmless:
        hit = scan.harmless
        return _none("A warning about memory that is not a failure.", 0.9, {hit.line: hit.text})
    if not scan.anything:
        return dataclasses.replace(_none("There is no text to explain.", 0.3, {}), cause="unknown")
    return _none("Nothing in it is a failure of memory.", 0.7, {})


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
