"""How much memory a step takes, before it runs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from oomproof._records.record import Record
from oomproof._records.run import Phase
from oomproof._records.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Estimate(Record):
    """How much memory a step takes, before it runs.

    Attributes:
        model: Name of the model.
        backend: The Keras backend.
        mode: `"graph"`, `"eager"` or `"compiled"`.
        phase: `"train"`, `"test"` or `"predict"`.
        precision: The dtype policy it was estimated for.
        batch_size: Samples in a batch.
        micro_batch_size: Samples in the largest piece of a batch, or `None` for whole batches.
        engine: How it was estimated: `"trace"`, `"compile"` or `"probe"`.
        low: Lower bound of the peak, in bytes.
        expected: Expected peak in bytes, as the framework's allocator reports it.
        high: Upper bound of the peak, in bytes.
        confidence: Share of measured cases in which the real peak was at most `high`, or `None` where nothing was
            measured.
        gpu: The card of the estimate, or `None`.
        limit: Bytes the framework can use on that card, or `None` without a card.
        driver: Bytes that nvidia-smi will show for the process, including its CUDA context; `None` without a card.
        by_category: Bytes at the peak by purpose, largest first.
        by_layer: (path of the layer, bytes at the peak), largest first. The path is empty for memory of no layer: the
            batch, workspaces and rounding.
        peak_at: The moment of the peak, such as `"backward pass of block_2/conv"`.
        timeline: Bytes in use over the step, at most 500 points.
        seconds: Time the estimate took.
        notes: What to know about these figures.
    """

    model: str
    backend: str
    mode: str
    phase: Phase
    precision: str
    batch_size: int
    micro_batch_size: int | None
    engine: str
    low: int
    expected: int
    high: int
    confidence: float | None
    gpu: str | None
    limit: int | None
    driver: int | None
    by_category: dict[str, int]
    by_layer: tuple[tuple[str, int], ...]
    peak_at: str
    timeline: tuple[int, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    _derived: ClassVar = ("fits", "framework")

    @property
    def fits(self) -> bool | None:
        """Whether even `high` is within the limit; `None` without a limit."""
        return None if self.limit is None else self.high <= self.limit

    @property
    def framework(self) -> int | None:
        """Bytes of the process outside the peak: what the framework preallocates or keeps, and the CUDA context."""
        return None if self.driver is None else max(0, self.driver - self.expected)

    def __str__(self) -> str:
        pieces = "" if self.micro_batch_size is None else f" in pieces of {self.micro_batch_size}"
        doing = {"train": "training", "test": "evaluation", "predict": "prediction"}[self.phase]
        sure = ", not yet checked on GPUs" if self.confidence is None else f", {self.confidence:.0%} sure"
        lines = [
            f"{self.model}, batch {self.batch_size}{pieces}, {self.precision}, {doing} on {self.backend} ({self.mode})",
            f"  peak    {format_bytes(self.expected):>9}  between {format_bytes(self.low)} and "
            f"{format_bytes(self.high)}{sure}",
        ]
        if self.limit is not None:
            lines.append(f"  limit   {format_bytes(self.limit):>9}  usable on {self.gpu}")
        if self.driver is not None:
            shown = f"what nvidia-smi {'would' if self.fits is False else 'will'} show"
            lines.append(f"  driver  {format_bytes(self.driver):>9}  {shown}")
        if self.limit is not None:
            lines += self._verdict()
        lines.append(f"  peak during the {self.peak_at}; engine {self.engine}, {self.seconds:.1f} s")
        layers = [(path or "(no layer)", size) for path, size in self.by_layer[:10]]
        others = sum(size for _, size in self.by_layer[10:])
        layers += [(f"{len(self.by_layer) - 10} others", others)] if others else []
        lines += ["  by category", *_sizes(list(self.by_category.items()), self.expected)]
        if self.framework is not None:
            lines.append(f"    outside the peak: {format_bytes(self.framework)} for the framework and the CUDA context")
        lines += ["  by layer", *_sizes(layers, self.expected)]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _verdict(self) -> list[str]:
        assert self.limit is not None
        if self.fits:
            return [f"  fits with {format_bytes(self.limit - self.high)} to spare"]
        plan = "oomproof plan, or " if self.phase == "train" else ""
        what_to_do = f"  try {plan}oomproof max-batch-size for a batch that fits"
        if self.low > self.limit:
            return [f"  does not fit: at least {format_bytes(self.low - self.limit)} over the limit", what_to_do]
        return [f"  may not fit: up to {format_bytes(self.high - self.limit)} over the limit", what_to_do]


_NAME = 59


def _sizes(rows: list[tuple[str, int]], whole: int) -> list[str]:
    # The end of a path says most, and lines stay within 80 columns.
    rows = [(name if len(name) <= _NAME else "…" + name[1 - _NAME :], size) for name, size in rows]
    width = max((len(name) for name, _ in rows), default=0)
    return [
        f"    {name:<{width}}  {format_bytes(size):>9}  {size / max(1, whole):>4.0%}" for name, size in rows if size
    ]
