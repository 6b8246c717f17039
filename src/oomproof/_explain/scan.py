"""Reads a log once, in constant memory, and keeps the incidents: lines of failures that belong together.

An incident that training went on after is one that was survived.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from oomproof._explain import lines
from oomproof._explain.bfc import Dump
from oomproof._explain.pattern import NUMBERS, Pattern, parse_size
from oomproof._explain.progress import Progress
from oomproof._explain.sources import DETAILS, MEANINGS

# Progress is taken from the ends of blocks in which nothing happened.
_SAMPLE = 4096
# Blocks up to this size are looked at line by line.
_SMALL = 1 << 16
# Steps that must follow a failure before it counts as survived.
_SURVIVED = 2
_SURVIVED_AN_ERROR = 3
# How many lines after a failure may say more about it.
_NEAR = 400
# After so many lines of one incident, more of them say nothing new.
_ENOUGH = 500
# Into how many more lines a terminal may have wrapped one.
_WRAPPED = 4
_PROCESS = re.compile(r"Process (\d{1,9}) has ([\d.]+ ?[KMGT]?i?B) memory in use", re.IGNORECASE)
# A row of nvidia-smi's list of processes.
_SMI_PROCESS = re.compile(r"\|\s+\d+\s+(?:N/A\s+N/A\s+)?(\d{1,9})\s+[CG+]{1,3}\s+\S.{0,80}?(\d{1,9}MiB)\s*\|")
_CAPACITIES = [pattern for pattern in DETAILS if pattern.name in ("tf-created-device", "tf-free-memory")]
# Lines of a dump that may have lost its beginning, and of a framework that starts: they are looked at though they mean
# nothing by themselves.
# Each text that is looked for is a pass over the log. Keywords that share a rare word are looked for together, by that
# word; those that share a common one only where that is found at all.
_STEMS: tuple[str, ...] = (
    "out of memory",
    "shared memory",
    "to allocate",
    "kill",
    "oom",
    "nccl",
    "exhausted",
    "cudnn",
    "cublas",
    "errno",
)
_STEMS += ("137", "0xc000", "no space left", "quota", "shm", "jax")
_GATES: tuple[bytes, ...] = (
    b"memory",
    b"alloc",
    b"error",
    b"exit",
    b"status",
    b"signal",
    b"code",
    b"kernel",
    b"disk",
    b"died",
    b"mps",
    b"find",
)
_GATES += (b"larger than", b"limit", b"address", b"fault", b"too ", b"size", b"inuse")
_ALSO = (b"inuse:", b"limit:  ", b"memory_limit_", b"mb memory", b"freememory")


def _indexes() -> dict[bytes, tuple[int, ...]]:
    """{text to look for: patterns that it may lead to}."""
    found: dict[bytes, tuple[int, ...]] = dict.fromkeys(_ALSO, ())
    for index, pattern in enumerate(MEANINGS):
        for keyword in pattern.keyword.split("|"):
            stem = next((stem for stem in _STEMS if stem in keyword), keyword).encode()
            if index not in found.get(stem, ()):
                found[stem] = (*found.get(stem, ()), index)
    return found


_INDEXES = _indexes()
_GATE_OF = {keyword: next((gate for gate in _GATES if gate in keyword), None) for keyword in _INDEXES}


def _candidates(block: bytes) -> list[tuple[int, int, set[int]]]:
    """(start, stop, patterns that may match) of every line that holds a keyword, in order."""
    lowered = block.lower()
    found: dict[tuple[int, int], set[int]] = {}
    open_gates = {gate for gate in _GATES if gate in lowered}
    for keyword, indexes in _INDEXES.items():
        text = lowered if keyword == keyword.lower() else block
        at = text.find(keyword) if _GATE_OF[keyword] is None or _GATE_OF[keyword] in open_gates else -1
        while at >= 0:
            span = lines.line_around(block, at)
            found.setdefault(span, set()).update(indexes)
            # The same word once more in the same line says nothing new.
            at = text.find(keyword, max(span[1], at + 1))
    return [(start, stop, indexes) for (start, stop), indexes in sorted(found.items())]


@dataclasses.dataclass
class Hit:
    """The first line that a pattern matched in an incident."""

    pattern: Pattern
    line: int
    text: str
    said: dict[str, Any]


@dataclasses.dataclass
class Incident:
    """Lines of failures without any progress between them."""

    hits: dict[str, Hit] = dataclasses.field(default_factory=dict)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    detail_lines: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    processes: dict[int, int] = dataclasses.field(default_factory=dict)
    last_line: int = 0
    count: int = 0
    steps_after: int = 0
    # Whether steps like the one that failed had gone through for a while. Those that came later say nothing.
    fitted_before: bool = False
    # The last line of a failure with those after it, as far as a terminal may have wrapped it.
    wrapped: str = ""
    wrapped_hit: Hit | None = None

    @property
    def survived(self) -> bool:
        raised = any(hit.pattern.counts >= 3 for hit in self.hits.values())
        return self.steps_after >= (_SURVIVED_AN_ERROR if raised else _SURVIVED)

    @property
    def root(self) -> Hit:
        """The first of the lines that say most."""
        frame = self.hits.get("shm-frame")
        if frame is not None and "disk" in self.hits:
            return frame
        return max(self.hits.values(), key=lambda hit: (hit.pattern.counts, -hit.line))


class Scan:
    """All that was seen of a log."""

    def __init__(self) -> None:
        self.incident: Incident | None = None
        self.survived: list[Incident] = []
        self.harmless: Hit | None = None
        self.progress = Progress()
        # What a framework found when it started.
        self.capacity: int | None = None
        self.anything = False
        # The allocator writes its dump before the error, and a log may begin in the middle of it.
        self.dump = Dump()

    def read(self, source: Any) -> Scan:
        for number, block in lines.blocks(source):
            self._block(number, lines.without_escapes(block))
        if self.incident is not None and self.incident.survived:
            self._close()
        return self

    def _block(self, number: int, block: bytes) -> None:
        """Looks at the lines with keywords, at those near a failure, and for progress at the ends of the block.

        Most lines of a large log say nothing, so they are never cut out of their block.
        """
        self.anything = self.anything or not block.isspace()
        everything = len(block) <= _SMALL
        if not everything and not self._near(number):
            self._plain(number, block[:_SAMPLE])
        end = 0
        for start, stop, indexes in _candidates(block):
            if start >= end:
                if everything or self._near(number):
                    self._plain(number, block[end:start], near=not everything)
                number += block.count(b"\n", end, start)
            self._line(number, lines.clean(block[start:stop]), indexes, everything)
            end = max(end, stop)
        if everything or self._near(number):
            self._plain(number, block[end:], near=not everything)
        if not everything and not self._near(number):
            self._plain(number + block.count(b"\n", end, -_SAMPLE), block[-_SAMPLE:])

    def _plain(self, number: int, block: bytes, near: bool = False) -> None:
        """Lines without keywords; only while a failure is near, if so wanted."""
        start = 0
        while start < len(block) and not (near and not self._near(number)):
            stop = block.find(b"\n", start)
            stop = len(block) if stop < 0 else stop
            for part in block[start:stop].split(b"\r"):
                if part:
                    line = lines.clean(part[: lines.WIDTH])
                    self._other_line(number, line, line.lower())
            number += 1
            start = stop + 1

    def _near(self, number: int) -> bool:
        return self.incident is not None and number - self.incident.last_line < _NEAR

    def _line(self, number: int, line: str, indexes: set[int], everything: bool) -> None:
        lowered, told = line.lower(), ""
        for index in sorted(indexes):
            pattern = MEANINGS[index]
            said = pattern.search(told := told or lines.bare(line)) if pattern.may_match(lowered) else None
            if said is not None:
                self._hit(number, line, lowered, pattern, said)
                return
        if everything or not indexes or self._near(number):
            self._other_line(number, line, lowered)

    def _hit(self, number: int, line: str, lowered: str, pattern: Pattern, said: dict[str, Any]) -> None:
        if pattern.kind == "harmless":
            self.harmless = self.harmless or Hit(pattern, number, line, said)
            return
        if self.incident is not None and self.incident.survived:
            self._close()
        if self.incident is None:
            self.incident = Incident(fitted_before=self.progress.fitted_before)
        incident = self.incident
        if "ran out of memory trying to allocate" in lowered:
            self.dump = Dump()
        incident.last_line = number
        incident.steps_after = 0
        hit = incident.hits.setdefault(pattern.name, Hit(pattern, number, line, said))
        incident.wrapped, incident.wrapped_hit = line, hit
        incident.count += 1
        if incident.count <= _ENOUGH:
            self._details(incident, number, line, lowered)

    def _other_line(self, number: int, line: str, lowered: str) -> None:
        incident = self.incident
        if self.dump.read(line):
            if incident is not None:
                incident.last_line = number
            return
        if incident is not None and number - incident.last_line < _NEAR:
            self._details(incident, number, line, lowered)
            if 0 < number - incident.last_line <= _WRAPPED and incident.count <= _ENOUGH:
                self._unwrap(incident, line)
        elif "mb memory" in lowered or "freememory" in lowered:
            for said in filter(None, (pattern.search(line) for pattern in _CAPACITIES)):
                self.capacity = min(self.capacity or said["capacity"], said["capacity"])
        if "bfc_allocator" in lowered:
            return
        if incident is None:
            self.progress.read_figure(number, line, lowered)
        went_on = self.progress.read(line, lowered)
        if incident is not None:
            incident.steps_after += _SURVIVED_AN_ERROR if self.progress.is_done(line, lowered) else went_on

    def _unwrap(self, incident: Incident, line: str) -> None:
        """Reads on where a terminal may have cut a line."""
        incident.wrapped = f"{incident.wrapped} {line.strip()}"[: lines.WIDTH]
        hit = incident.wrapped_hit
        assert hit is not None
        told, lowered = lines.bare(incident.wrapped), incident.wrapped.lower()
        for pattern in MEANINGS:
            # A part of a line may be taken for less than the whole of it is.
            alike = (pattern.raised_by, pattern.memory, pattern.kind) == (
                hit.pattern.raised_by,
                hit.pattern.memory,
                hit.pattern.kind,
            )
            said = pattern.search(told) if alike and pattern.may_match(lowered) else None
            for name, value in (said or {}).items():
                if hit.said.get(name) is None:
                    hit.said[name] = value
        self._details(incident, incident.last_line, incident.wrapped, lowered)

    def _details(self, incident: Incident, number: int, line: str, lowered: str) -> None:
        told = lines.bare(line)
        for pattern in DETAILS:
            said = pattern.search(told) if pattern.may_match(lowered) else None
            if not said:
                continue
            new = {name: value for name, value in said.items() if value is not None and name not in incident.details}
            # An operation that is named in the error is better than one from a log line before it.
            if "op" in said and pattern.name in ("tf-node", "tf-eager-op") and "op_of_error" not in incident.details:
                new |= {"op": said["op"], "op_of_error": True}
            if new:
                incident.details.update(new)
                incident.detail_lines.append((number, line))
                del incident.detail_lines[8:]
        for found in _PROCESS.finditer(line) if "memory in use" in lowered else ():
            incident.processes[int(found[1])] = parse_size(found[2]) or 0
        for found in _SMI_PROCESS.finditer(line) if "mib" in lowered else ():
            incident.processes[int(found[1])] = parse_size(found[2]) or 0

    def _close(self) -> None:
        assert self.incident is not None
        self.survived.append(self.incident)
        del self.survived[1:]
        self.incident = None


def numbers_of(incident: Incident, dump: Dump) -> dict[str, int]:
    """Every size that was said, by what it is the size of."""
    found: dict[str, int] = {}
    said = [dump.numbers, incident.details, *(hit.said for hit in incident.hits.values())]
    for each in said:
        found |= {
            name: size for name, size in each.items() if name in NUMBERS and size is not None and name not in found
        }
    return found
