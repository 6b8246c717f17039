"""What `oomproof.data.audit` answers with. Like all records it prints itself and goes to and from JSON."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from oomproof._records.diagnosis import Finding
from oomproof._records.record import Record
from oomproof._records.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Stage(Record):
    """One stage of a pipeline.

    Attributes:
        name: The stage, such as `"shuffle(10000)"`.
        bytes: Host memory it adds at the peak, or `None` where unknown.
        note: What the memory is for.
        element: Bytes of one element it produces, or `None` where unknown.
        count: Elements it produces in an epoch, or `None` where unknown or infinite.
    """

    name: str
    bytes: int | None
    note: str = ""
    element: int | None = None
    count: int | None = None


@dataclasses.dataclass(frozen=True)
class DataAudit(Record):
    """How much memory a data pipeline holds.

    Attributes:
        kind: `"tf.data"`, `"arrays"`, `"PyDataset"`, `"DataLoader"` or `"generator"`.
        stages: In the order of the data. Their bytes add up to `host_bytes`.
        host_bytes: RAM at the peak, while training is slower than the pipeline. A lower bound where a stage is unknown.
        device_bytes: Bytes on the device at a time.
        bound_bytes: RAM it can grow to where TensorFlow sizes buffers (AUTOTUNE), or `None` where it sizes none.
        available: RAM that was free, or `None` where unknown.
        findings: What could be better, and how.
    """

    kind: str
    stages: tuple[Stage, ...]
    host_bytes: int
    device_bytes: int
    bound_bytes: int | None = None
    available: int | None = None
    findings: tuple[Finding, ...] = ()

    _derived: ClassVar = ("unknown",)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The stages whose memory is unknown."""
        return tuple(stage.name for stage in self.stages if stage.bytes is None)

    def __str__(self) -> str:
        rows = [(stage.name, "unknown" if stage.bytes is None else format_bytes(stage.bytes), stage.note)
                for stage in self.stages]  # fmt: skip
        names = max((len(name) for name, _, _ in rows), default=0)
        sizes = max((len(size) for _, size, _ in rows), default=0)
        lines = [self._sentence()]
        lines += [f"  {name:<{names}}  {size:>{sizes}}  {note}".rstrip() for name, size, note in rows]
        if self.bound_bytes is not None:
            lines.append(f"  TensorFlow sizes some buffers (AUTOTUNE): up to {format_bytes(self.bound_bytes)}")
        for each in self.findings:
            lines.append(f"  {each.severity}: {each.text}")
            lines += [f"    → {each.fix}"] if each.fix else []
        return "\n".join(lines)

    def _sentence(self) -> str:
        least = "at least " if self.unknown else ""
        free = "" if self.available is None else f" of {format_bytes(self.available)} free"
        device = f", {format_bytes(self.device_bytes)} on the device" if self.device_bytes else ""
        return f"{self.kind}: {least}{format_bytes(self.host_bytes)} of RAM{free}{device}"
