"""Reads a log once, in constant memory, and keeps the incidents: lines of failures that belong together.

An incident that training went on after is one that was survived.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from oomproof.diagnosis import lines
from oomproof.diagnosis.bfc import Dump
from oomproof.diagnosis.pattern import NUMBERS, Pattern, parse_size
from oomproof.diagnosis.progress import Progress
from oomproof.diagnosis.sources import DETAILS, MEANINGS, PATTERNS

# Progress is taken from the ends of blocks in which nothing happened.
_SAMPLE = 4096
# Steps that must follow a failure before it counts as survived.
_SURVIVED = 2
_SURVIVED_AN_ERROR = 3
# How many lines after a failure may say more about it.
_NEAR = 400
_PROCESS = re.compile(r"Process (\d{1,9}) has ([\d.]+ ?[KMGT]?i?B) memory in use", re.IGNORECASE)
_CAPACITY = next(pattern for pattern in DETAILS if pattern.name == "tf-created-device")
_KEYWORDS = re.compile("|".join(sorted({re.escape(pattern.keyword) for pattern in PATTERNS})))
_FINDABLE = tuple(sorted({pattern.keyword.encode() for pattern in MEANINGS}))


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
    steps_after: int = 0

    @property
    def survived(self) -> bool:
        raised = any(hit.pattern.counts >= 3 for hit in self.hits.values())
        return self.steps_after >= (_SURVIVED_AN_ERROR if raised else _SURVIVED)

    @property
    def root(self) -> Hit:
        """The first of the lines that say most."""
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
        lowered = block.lower()
        self.anything = self.anything or not block.isspace()
        if not self._near(number) and not any(keyword in lowered for keyword in _FINDABLE):
            if len(block) > 4 * _SAMPLE:
                # Nothing but progress in here, which only grows.
                self._lines(number, block[:_SAMPLE])
                self._lines(number + block.count(b"\n", 0, -_SAMPLE), block[-_SAMPLE:])
                return
        self._lines(number, block)

    def _lines(self, number: int, block: bytes) -> None:
        for offset, line in enumerate(block.split(b"\n")):
            for part in lines.stretches(line):
                self._line(number + offset, lines.clean(part))

    def _near(self, number: int) -> bool:
        return self.incident is not None and number - self.incident.last_line < _NEAR

    def _line(self, number: int, line: str) -> None:
        lowered = line.lower()
        pattern, said = self._meaning(line, lowered) if _KEYWORDS.search(lowered) else (None, {})
        if pattern is None:
            self._other_line(number, line, lowered)
            return
        if pattern.kind == "harmless":
            self.harmless = self.harmless or Hit(pattern, number, line, said)
            return
        if self.incident is not None and self.incident.survived:
            self._close()
        if self.incident is None:
            self.incident = Incident()
        incident = self.incident
        if "ran out of memory trying to allocate" in lowered:
            self.dump = Dump()
        incident.last_line = number
        incident.steps_after = 0
        incident.hits.setdefault(pattern.name, Hit(pattern, number, line, said))
        self._details(incident, number, line, lowered)

    def _meaning(self, line: str, lowered: str) -> tuple[Pattern | None, dict[str, Any]]:
        for pattern in MEANINGS:
            said = pattern.search(line, lowered)
            if said is not None:
                return pattern, said
        return None, {}

    def _other_line(self, number: int, line: str, lowered: str) -> None:
        incident = self.incident
        if self.dump.read(line):
            if incident is not None:
                incident.last_line = number
            return
        if incident is not None and number - incident.last_line < _NEAR:
            self._details(incident, number, line, lowered)
        elif "mb memory" in lowered and (said := _CAPACITY.search(line, lowered)):
            self.capacity = self.capacity or said["capacity"]
        if "bfc_allocator" in lowered:
            return
        if incident is None:
            self.progress.read_figure(number, line, lowered)
        if self.progress.read(line, lowered) and incident is not None:
            incident.steps_after += 1

    def _details(self, incident: Incident, number: int, line: str, lowered: str) -> None:
        for pattern in DETAILS:
            said = pattern.search(line, lowered)
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
        found |= {name: size for name, size in each.items() if name in NUMBERS and size is not None and name not in found}
    return found
