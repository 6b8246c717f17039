"""The frozen records that pass between the rooms. Each prints itself and goes to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any, Literal

from oomproof.exactness import Exactness
from oomproof.units import format_bytes

Phase = Literal["train", "test", "predict"]
EventKind = Literal["oom", "shrink", "grow", "commit-oom", "plan", "note"]


@dataclasses.dataclass(frozen=True)
class Device:
    """The memory a framework can use on one device.

    Attributes:
        name: The framework's name for it, such as `"GPU:0"`.
        limit: Bytes its allocator may hand out, or `None` when that cannot be known.
        measurable: Whether use and peak can be read.
    """

    name: str
    limit: int | None
    measurable: bool

    def __str__(self) -> str:
        size = "limit unknown" if self.limit is None else format_bytes(self.limit)
        return f"{self.name}: {size}" + ("" if self.measurable else ", memory use cannot be measured")


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A way to run a batch that was looked at.

    Attributes:
        name: The levers it uses, such as `"4 × 256, recomputing 3 of 9"`.
        predicted: Bytes at the peak, or `None` when that is not known.
        relative_time: Time of a step, as a multiple of the plain one.
        exact: Whether the outcome is that of the plain step, up to rounding; `None` where that has to be proven.
        taken: Whether it is the plan.
        why: Why it was taken or not.
    """

    name: str
    predicted: int | None
    relative_time: float
    exact: bool | None
    taken: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one logical batch is run.

    Attributes:
        micro_batch_size: No piece of a batch holds more samples than this; `None` runs batches whole.
        recompute: Stretches of the model whose forward pass is computed again in the backward pass instead of being
            kept. Each is the label of a layer, or of the first and the last of a stretch: `"conv_1..relu_3"`.
        jit_compile: Compile the step with XLA, or not; `None` leaves it as the model was compiled.
        precision: Dtype policy to train with; `None` leaves the model's own.
        lean_commit: Apply the update variable by variable from the host, when the device has no room for the
            new values beside the old ones. Slower.
        caveats: What is not exactly the same as on unlimited memory, in words.
        exactness: What training under this plan was proven to be; `None` where nothing was proven yet.
        batch_size: The batch it was made for, or `None`.
        predicted: Bytes at the peak, or `None` when nobody looked.
        limit: Bytes it was to fit into, or `None`.
        relative_time: Time of a step, as a multiple of the plain one's, or `None`.
        segments: Into how many stretches the model can be cut.
        recomputed: How many of these are recomputed. One of `recompute` may be several.
        alternatives: What else was looked at.
    """

    micro_batch_size: int | None = None
    recompute: tuple[str, ...] = ()
    jit_compile: bool | None = None
    precision: str | None = None
    lean_commit: bool = False
    caveats: tuple[str, ...] = ()
    exactness: Exactness | None = None
    batch_size: int | None = None
    predicted: int | None = None
    limit: int | None = None
    relative_time: float | None = None
    segments: int = 0
    recomputed: int = 0
    alternatives: tuple[Alternative, ...] = ()

    @property
    def changes_model(self) -> bool:
        """Whether it changes the model, and not just how its batches are run."""
        return self.precision is not None or self.jit_compile is not None

    @property
    def sentence(self) -> str:
        """All of it in a line: what is done, and what it was predicted to take."""
        parts = [self._cut()]
        if self.recompute and self.segments:
            parts.append(f"recomputing {self.recomputed or len(self.recompute)} of {self.segments} segments")
        elif self.recompute:
            parts.append(f"recomputing {', '.join(self.recompute)}")
        if self.jit_compile is not None:
            parts.append("compiled with XLA" if self.jit_compile else "without XLA")
        parts += [f"in {self.precision}"] if self.precision else []
        parts += ["lean commit"] if self.lean_commit else []
        expected = self._expected()
        if not expected:
            return ", ".join(parts)
        return f"{', '.join(parts)}: {expected} ({self._exact()})"

    def _exact(self) -> str:
        if self.caveats:
            return str(Exactness("not exact", self.caveats))
        if self.exactness is not None:
            return str(self.exactness)
        plain = self._cut().endswith(("whole", "whole batches")) and not self.recompute
        return str(Exactness()) if plain else "to be proven on the first batch"

    def __str__(self) -> str:
        if not self._expected():
            unproven = self.caveats if self.exactness is None else ()
            return self.sentence + "".join(f"\n  not exact: {caveat}" for caveat in unproven)
        return "\n".join([*_alternatives(self.alternatives), self.sentence])

    def _cut(self) -> str:
        micro, batch = self.micro_batch_size, self.batch_size
        if batch is None:
            return "whole batches" if micro is None else f"micro-batches of {micro}"
        if micro is None or micro >= batch:
            return f"batch {batch} whole"
        return f"batch {batch} as {-(-batch // micro)} × {micro}"

    def _expected(self) -> str:
        expected = []
        if self.predicted is not None:
            size = format_bytes(self.predicted)
            if self.limit is not None:
                limit = format_bytes(self.limit)
                same_unit = size.split()[1] == limit.split()[1]
                size = f"{size.split()[0] if same_unit else size} of {limit}"
            expected.append(f"predicted {size}")
        if self.relative_time is not None:
            expected.append(f"about {self.relative_time:.1f}× step time")
        return ", ".join(expected)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        lists = {name: tuple(data.get(name, ())) for name in ("recompute", "caveats")}
        alternatives = tuple(Alternative(**each) for each in data.get("alternatives", ()))
        exactness = None if data.get("exactness") is None else Exactness.from_json(data["exactness"])
        return cls(**{**data, **lists, "exactness": exactness, "alternatives": alternatives})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record as JSON."""
        pathlib.Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        return cls.from_json(json.loads(pathlib.Path(path).read_text()))


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened to a batch because of memory.

    Attributes:
        kind: `"oom"` (a step failed), `"commit-oom"` (the update failed), `"shrink"` (made smaller before it
            failed), `"grow"`, `"plan"` (the sizes a run starts with) or `"note"`.
        phase: `"train"`, `"test"` or `"predict"`.
        epoch: Epoch, counted from 0, or `None` outside of `fit`.
        step: Steps of this phase finished before this one.
        batch_size: Samples in the logical batch.
        before: Largest piece before the event.
        after: Largest piece after it, or `None` when there was nothing smaller left.
        needed: Bytes the step that failed would have needed, where known.
        free: Bytes that were free for it, where known.
        seconds: Time lost to the failed attempt.
        message: The line that was logged.
    """

    kind: EventKind
    phase: Phase
    epoch: int | None
    step: int
    batch_size: int
    before: int | None
    after: int | None
    needed: int | None
    free: int | None
    seconds: float
    message: str

    def __str__(self) -> str:
        return self.message


@dataclasses.dataclass(frozen=True)
class Run:
    """What happened in one `fit`, `evaluate` or `predict`.

    Attributes:
        backend: The Keras backend.
        versions: Versions of oomproof, Keras and the framework.
        device: Where it ran.
        budget: The limit that was held, in bytes, or `None`.
        plan: The plan in force at the end of training.
        steps: Logical batches finished, by phase.
        peak: Largest measured use in bytes over the steps that were measured, or `None`.
        seconds: Wall time.
        events: What happened, in order.
        host_peak: Most RAM that this process and those it started were seen to hold between steps, or `None`.
        exactness: How its training relates to the same training with unlimited memory.
    """

    backend: str
    versions: dict[str, str]
    device: Device
    budget: int | None
    plan: Plan
    steps: dict[str, int]
    peak: int | None
    seconds: float
    events: tuple[Event, ...] = ()
    host_peak: int | None = None
    exactness: Exactness = dataclasses.field(default_factory=Exactness)

    @property
    def ooms(self) -> int:
        """How many attempts ran out of memory."""
        return sum(event.kind in ("oom", "commit-oom") for event in self.events)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        return cls(
            **{
                **data,
                "device": Device(**data["device"]),
                "plan": Plan.from_json(data["plan"]),
                "events": tuple(Event(**event) for event in data["events"]),
                "exactness": Exactness.from_json(data.get("exactness") or Exactness().to_json()),
            }
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record as JSON."""
        pathlib.Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        return cls.from_json(json.loads(pathlib.Path(path).read_text()))

    def __str__(self) -> str:
        steps = ", ".join(f"{count} {phase}" for phase, count in self.steps.items() if count) or "no"
        lines = [
            f"{self.backend} on {self.device}",
            f"steps: {steps}; {self.seconds:.1f} s",
            f"plan: {self.plan.sentence if self.plan.alternatives else self.plan}",
            f"peak: {'not measured' if self.peak is None else format_bytes(self.peak)}"
            + ("" if self.budget is None else f" of a budget of {format_bytes(self.budget)}"),
            *([] if self.host_peak is None else [f"host memory: {format_bytes(self.host_peak)}"]),
            f"out of memory: {self.ooms} {'time' if self.ooms == 1 else 'times'}",
            *([f"training: {self.exactness}"] if self.steps.get("train") else []),
        ]
        return "\n".join(lines + [f"  {event}" for event in self.events])


@dataclasses.dataclass(frozen=True)
class Estimate:
    """How much memory a step takes, before it is run.

    Attributes:
        model: Name of the model.
        backend: The Keras backend.
        mode: `"graph"`, `"eager"` or `"compiled"`.
        phase: `"train"`, `"test"` or `"predict"`.
        precision: The dtype policy it was estimated for.
        batch_size: Samples in a batch.
        micro_batch_size: Largest piece of a batch, or `None` for whole batches.
        engine: How it was found out: `"trace"`, `"compile"` or `"probe"`.
        low: Bytes at the peak, at least.
        expected: Bytes at the peak, as the framework's allocator will report them.
        high: Bytes at the peak, at most.
        confidence: In what share of cases the real peak was not above `high` when that was measured, or `None` where
            it has not been measured.
        gpu: The card it was estimated for, or `None`.
        limit: Bytes the framework can use on that card, or `None` without one.
        driver: Bytes nvidia-smi will show for the process, context included; `None` without a card.
        by_category: Bytes at the peak by what they are for, largest first.
        by_layer: (path of the layer, bytes at the peak), largest first; an empty path for what is no layer's.
        peak_at: The moment of the peak, such as `"backward of block_2/conv"`.
        timeline: Bytes in use over the step, at most 500 points.
        seconds: Time the estimate took.
        notes: What to know about these figures, in words.
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

    @property
    def fits(self) -> bool | None:
        """Whether it fits even if the peak is as high as it may be; `None` where there is nothing to compare with."""
        return None if self.limit is None else self.high <= self.limit

    @property
    def framework(self) -> int | None:
        """Bytes of the process beside the peak: what the framework takes ahead or keeps, and CUDA's context."""
        return None if self.driver is None else max(0, self.driver - self.expected)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "fits": self.fits, "framework": self.framework}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Estimate:
        fields = {key: value for key, value in data.items() if key not in ("fits", "framework")}
        by_layer = tuple((path, size) for path, size in data["by_layer"])
        return cls(
            **{**fields, "by_layer": by_layer, "timeline": tuple(data["timeline"]), "notes": tuple(data["notes"])}
        )

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
        lines.append(f"  most in the {self.peak_at}; engine {self.engine}, {self.seconds:.1f} s")
        layers = [(path or "(no layer)", size) for path, size in self.by_layer[:10]]
        others = sum(size for _, size in self.by_layer[10:])
        layers += [(f"{len(self.by_layer) - 10} others", others)] if others else []
        lines += ["  by category", *_sizes(list(self.by_category.items()), self.expected)]
        if self.framework is not None:
            lines.append(f"    beside the peak: {format_bytes(self.framework)} framework and CUDA's context")
        lines += ["  by layer", *_sizes(layers, self.expected)]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _verdict(self) -> list[str]:
        assert self.limit is not None
        if self.fits:
            return [f"  fits, {format_bytes(self.limit - self.high)} to spare"]
        plan = "oomproof plan, or " if self.phase == "train" else ""
        what_to_do = f"  try {plan}oomproof max-batch-size for a batch that fits"
        if self.low > self.limit:
            return [f"  does not fit, at least {format_bytes(self.low - self.limit)} too much", what_to_do]
        return [f"  may not fit, up to {format_bytes(self.high - self.limit)} too much", what_to_do]


def _alternatives(rows: tuple[Alternative, ...]) -> list[str]:
    if not rows:
        return []
    cells = [("way", "predicted", "time", "exact", "why")]
    cells += [
        (
            row.name,
            "?" if row.predicted is None else format_bytes(row.predicted),
            f"{row.relative_time:.2f}×",
            {True: "yes", False: "no", None: "to prove"}[row.exact],
            row.why,
        )
        for row in rows
    ]
    name, size, time, exact, _ = (max(map(len, column)) for column in zip(*cells, strict=True))
    return [
        f"  {cell[0]:<{name}}  {cell[1]:>{size}}  {cell[2]:>{time}}  {cell[3]:<{exact}}  {cell[4]}".rstrip()
        for cell in cells
    ]


_NAME = 59


def _sizes(rows: list[tuple[str, int]], whole: int) -> list[str]:
    # The end of a path says most, and lines stay within 80 columns.
    rows = [(name if len(name) <= _NAME else "…" + name[1 - _NAME :], size) for name, size in rows]
    width = max((len(name) for name, _ in rows), default=0)
    return [
        f"    {name:<{width}}  {format_bytes(size):>9}  {size / max(1, whole):>4.0%}" for name, size in rows if size
    ]
