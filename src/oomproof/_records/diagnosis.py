"""What `explain` and `doctor` return."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from oomproof._records.record import Record
from oomproof._records.units import format_bytes

Memory = Literal["device", "host", "shm", "other", "none"]
Cause = Literal[
    "too-big-single-tensor",
    "steady-exhaustion",
    "fragmentation",
    "held-elsewhere",
    "leak-over-time",
    "hidden-oom",
    "host-ram",
    "shm",
    "not-memory",
    "unknown",
]
Severity = Literal["ok", "note", "warning", "problem"]

_MEMORY = {
    "device": "device memory",
    "host": "host memory (RAM)",
    "shm": "shared memory (/dev/shm)",
    "other": "other memory",
    "none": "not a memory failure",
}


@dataclasses.dataclass(frozen=True)
class Evidence(Record):
    """A line of the log that supports a diagnosis.

    Attributes:
        line: Line number, counted from 1.
        text: The line, shortened and without control characters.
    """

    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class Diagnosis(Record):
    """Why training failed, as far as the log tells.

    Attributes:
        is_memory: Whether memory ran out.
        memory: Which one: `"device"`, `"host"`, `"shm"`, `"other"` or `"none"`.
        raised_by: `"tensorflow"`, `"xla"`, `"jax"`, `"torch"`, `"cudnn"`, `"cublas"`, `"nccl"`, `"kernel"`, `"python"`,
            `"dataloader"` or `"other"`.
        requested_bytes: Bytes of the request that failed, where the log states them or a shape and a dtype.
        tensor_shape: Shape of the requested tensor, where the log states it.
        dtype: Its dtype, by NumPy's name.
        op: The operation that requested it, by the framework's name.
        layer: The layer of that operation.
        cause: The kind of cause.
        confidence: Confidence in the cause, between 0 and 1.
        summary: The diagnosis in one sentence.
        numbers: Bytes that the log states: `free`, `total`, `in_use`, `held_elsewhere` and others.
        evidence: The lines that support it.
        fixes: What to do, most effective first. Each is a line of code or a command.
    """

    is_memory: bool
    memory: Memory
    raised_by: str
    requested_bytes: int | None
    tensor_shape: tuple[int, ...] | None
    dtype: str | None
    op: str | None
    layer: str | None
    cause: Cause
    confidence: float
    summary: str
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("memory", f"{_MEMORY[self.memory]}, reported by {self.raised_by}")]
        if self.requested_bytes is not None:
            rows.append(("requested", f"{format_bytes(self.requested_bytes)} ({self.requested_bytes} bytes)"))
        if self.tensor_shape is not None:
            rows.append(("tensor", f"{self.tensor_shape} {self.dtype or ''}".rstrip()))
        rows += [("op", self.op)] if self.op else []
        rows += [("layer", self.layer)] if self.layer else []
        rows += [(name.replace("_", " "), format_bytes(size)) for name, size in self.numbers.items()]
        rows.append(("cause", f"{self.cause} ({self.confidence:.0%} sure)"))
        width = max(len(name) for name, _ in rows)
        lines = [self.summary, *(f"  {name:<{width}}  {text}" for name, text in rows)]
        lines += ["  evidence"] * bool(self.evidence)
        lines += [f"    line {each.line}: {each.text}" for each in self.evidence]
        lines += ["  what to do"] * bool(self.fixes)
        lines += [f"    {number}. {fix}" for number, fix in enumerate(self.fixes, start=1)]
        return "\n".join(lines)


def short_of(needed: int, has: int, summary: str, *fixes: str) -> Diagnosis:
    """The diagnosis of a step that was refused before it ran because it needs more than there is."""
    return Diagnosis(
        is_memory=True,
        memory="device",
        raised_by="other",
        requested_bytes=needed,
        tensor_shape=None,
        dtype=None,
        op=None,
        layer=None,
        cause="steady-exhaustion",
        confidence=0.9,
        summary=summary,
        numbers={"limit": has},
        fixes=fixes,
    )


@dataclasses.dataclass(frozen=True)
class Finding(Record):
    """One result of `doctor`.

    Attributes:
        severity: `"ok"`, `"note"`, `"warning"` or `"problem"`.
        topic: What was checked.
        text: What was found.
        fix: What to do about it; empty where nothing is to be done.
    """

    severity: Severity
    topic: str
    text: str
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Checkup(Record):
    """The results of `doctor`.

    Attributes:
        findings: In the order of the checks.
    """

    findings: tuple[Finding, ...]

    _derived: ClassVar = ("worst",)

    @property
    def worst(self) -> Severity:
        """The worst severity among the findings."""
        order: tuple[Severity, ...] = ("ok", "note", "warning", "problem")
        return max((each.severity for each in self.findings), key=order.index, default="ok")

    def __str__(self) -> str:
        topics = max((len(each.topic) for each in self.findings), default=0)
        lines = []
        for each in self.findings:
            lines.append(f"{each.severity:<7}  {each.topic:<{topics}}  {each.text}")
            if each.fix:
                lines.append(f"{'':<7}  {'':<{topics}}  → {each.fix}")
        counts = {word: sum(each.severity == word for each in self.findings) for word in ("problem", "warning", "note")}
        found = ", ".join(f"{count} {word}{'s' * (count > 1)}" for word, count in counts.items() if count)
        return "\n".join([*lines, found or "no problems found"])
