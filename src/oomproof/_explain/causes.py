"""The kind of cause behind a failure, by what the text and its numbers tell."""

from __future__ import annotations

import dataclasses
from typing import get_args

from oomproof._explain.progress import Progress
from oomproof._explain.scan import Hit, Incident
from oomproof._records.diagnosis import Cause, Memory
from oomproof._records.units import format_bytes

_GIB = 2**30
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


@dataclasses.dataclass(frozen=True)
class Asked:
    """What was asked for."""

    size: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    op: str | None = None


# What happened, how sure that is, and a sentence about it.
_Story = tuple[Cause, float, str]


@dataclasses.dataclass(frozen=True)
class Case:
    """What the cause is judged by."""

    root: Hit
    incident: Incident
    progress: Progress
    asked: Asked
    numbers: dict[str, int]

    @property
    def sure(self) -> float:
        return self.root.pattern.sure

    @property
    def total(self) -> int | None:
        """Bytes of the device, or of the part of it that may be used."""
        return self.numbers.get("limit") or self.numbers.get("total")

    @property
    def single(self) -> int | None:
        """Bytes of one request. A TPU says what the whole program takes; one buffer of it is what may be too big."""
        return self.numbers.get("piece") if self.root.pattern.name.startswith("tpu") else self.asked.size

    @property
    def room(self) -> str:
        """What there is, in words."""
        if limit := self.numbers.get("limit"):
            return f"the limit of {format_bytes(limit)}"
        return "" if self.total is None else f"the device's {format_bytes(self.total)}"

    @property
    def much(self) -> str:
        return "" if self.asked.size is None else f" on a request for {format_bytes(self.asked.size)}"

    @property
    def small_device(self) -> bool:
        return 0 < self.numbers.get("capacity", 0) < _SMALL_DEVICE


def cause_of(case: Case, memory: Memory) -> _Story:
    """The cause, how sure it is, and what happened in a sentence."""
    sure, given = case.sure, case.root.pattern.cause
    if memory == "host":
        if case.progress.grew:
            first, last = case.progress.grew
            grew = f"{format_bytes(first)} to {format_bytes(last)}"
            text = f"Host memory grew from {grew} until it ran out: something leaks."
            return "leak-over-time", sure * 0.9, text
        return "host-ram", sure, f"Host memory ran out{case.much}{_killed(case.root)}."
    if memory == "shm":
        return "shm", sure, "Shared memory (/dev/shm), which processes use to exchange data, is too small."
    if given == "hidden-oom" and case.small_device:
        return _left_little(case)
    if given == "hidden-oom":
        text = "A CUDA library failed as it does when device memory runs out, without saying so."
        return "hidden-oom", sure, text
    if given in get_args(Cause):
        size = "" if case.asked.size is None else f" of {format_bytes(case.asked.size)}"
        texts = {
            "held-elsewhere": "The device had no free memory from the start: another process holds it, or the program "
            "requested all of it at once.",
            "too-big-single-tensor": f"A single request{size} is larger than the device allows.",
        }
        known: Cause = given  # type: ignore[assignment]
        return known, sure, texts.get(known, "Memory ran out; the log does not say why.")
    return _device_cause(case)


def _killed(root: Hit) -> str:
    if root.pattern.raised_by != "kernel":
        return ""
    size = root.said.get("rss")
    return ", and the kernel killed the process" + (f" at {format_bytes(size)}" if size else "")


def _device_cause(case: Case) -> _Story:
    """The first story that the numbers tell, the surest first."""
    for story in (_larger_than_all, _fragmented, _held_elsewhere, _grew, _large):
        if found := story(case):
            return found
    text = f"The step needs more memory than {case.room or 'there is'}: it failed{case.much}."
    return "steady-exhaustion", case.sure if case.total else case.sure * 0.75, text


def _larger_than_all(case: Case) -> _Story | None:
    if case.single and case.total and case.single >= _TOO_BIG * case.total:
        text = f"One request of {format_bytes(case.single)} exceeds {case.room}."
        return "too-big-single-tensor", case.sure, text
    return None


def _fragmented(case: Case) -> _Story | None:
    loose = _in_pieces(case.numbers, case.asked.size, case.total)
    if loose is None:
        return None
    wanted = format_bytes(case.asked.size or 0)
    text = f"{format_bytes(loose)} were free, but in blocks too small for {wanted}: fragmentation."
    return "fragmentation", case.sure * 0.9, text


def _held_elsewhere(case: Case) -> _Story | None:
    numbers, size, total = case.numbers, case.asked.size, case.total
    held = numbers.get("held_elsewhere", 0)
    # Where the process has a limit of its own and the device has room, the others are not in its way.
    has_room = "limit" in numbers and numbers.get("free", 0) >= (size or numbers["limit"])
    if total and held >= _HELD * total and not has_room:
        text = f"Other processes hold {format_bytes(held)} of {case.room}."
        return "held-elsewhere", case.sure * 0.95, text
    if size and _not_given(numbers, size):
        allowed = format_bytes(size)
        text = f"The allocator was allowed {allowed} more, but the device did not have it: another process holds it."
        return "held-elsewhere", case.sure * 0.75, text
    if "cuda-driver-allocation" in case.incident.hits and numbers.get("in_use", 0) < _FULL * (total or 1):
        text = "The framework did not get the memory it requested at startup: another process holds it."
        return "held-elsewhere", case.sure * 0.75, text
    if case.root.pattern.name == "torch-cuda-error" and not case.incident.fitted_before:
        # torch's allocator says what it asked for; without that the driver had no room for as much as a context.
        text = "The driver ran out of memory before a tensor was requested: another process holds the device's memory."
        return "held-elsewhere", case.sure * 0.9, text
    return _left_little(case) if total is None and case.small_device else None


def _left_little(case: Case) -> _Story:
    found = format_bytes(case.numbers["capacity"])
    text = f"The framework found only {found} at startup: another process holds the rest."
    return "held-elsewhere", case.sure * 0.75, text


def _grew(case: Case) -> _Story | None:
    if case.progress.grew:
        first, last = map(format_bytes, case.progress.grew)
        text = f"Memory grew from {first} to {last} while training went on: something leaks."
        return "leak-over-time", case.sure * 0.95, text
    if case.incident.fitted_before:
        text = "Earlier steps succeeded, so memory use has grown since, or batch sizes vary."
        return "leak-over-time", case.sure * 0.7, text
    return None


def _large(case: Case) -> _Story | None:
    single, total = case.single, case.total
    used = case.numbers.get("in_use") or case.numbers.get("allocated") or 0
    if single and total and single >= _TOO_BIG_ALONE * total and single >= used:
        text = f"One request of {format_bytes(single)} is most of {case.room}."
        return "too-big-single-tensor", case.sure * 0.75, text
    if single and total is None and single >= _TOO_BIG_ANYWHERE:
        text = f"One request of {format_bytes(single)} is more than most devices have."
        return "too-big-single-tensor", case.sure * 0.75, text
    return None


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
