"""How a batch is run, and which other ways were considered."""

from __future__ import annotations

import dataclasses

from oomproof._records.exactness import Exactness
from oomproof._records.record import Record
from oomproof._records.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Alternative(Record):
    """A way to run a batch that was considered.

    Attributes:
        name: The levers it uses, such as `"4 × 256, recomputing 3 of 9"`.
        predicted: Bytes at the peak, or `None` where unknown.
        relative_time: Time of a step, as a multiple of the plain step's.
        exact: Whether the result is that of the plain step, up to rounding; `None` where that is still to be proven.
        taken: Whether it became the plan.
        why: Why it was taken or not.
    """

    name: str
    predicted: int | None
    relative_time: float
    exact: bool | None
    taken: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Plan(Record):
    """How one logical batch is run.

    Attributes:
        micro_batch_size: Most samples in a piece of a batch; `None` runs batches whole.
        recompute: Segments of the model whose forward pass is computed again in the backward pass instead of being
            kept. Each is the label of a layer, or of the first and the last call of one: `"conv_1..relu_3"`. A layer
            that Keras named itself goes by its place, `"conv2d[2]"`: so a plan serves a model that is built again.
        head: Label of the call that the head of the model begins with. From there on, its loss and metrics included, it
            runs in parts, each differentiated at once, so that no more than one part of the last activations (the
            logits of a language model) is ever there. Nothing is computed twice. `None` runs it with the rest.
        head_parts: Into how many parts the head is cut, of each piece of the batch.
        jit_compile: Whether to compile the step with XLA; `None` leaves it as the model was compiled.
        precision: Dtype policy to train with; `None` keeps the model's own.
        lean_commit: Apply the update variable by variable from the host, where the device has no room for new values
            next to the old ones. Slower.
        caveats: How the result differs from training with unlimited memory.
        exactness: What training with this plan was proven to be; `None` before the proof.
        batch_size: Samples in the batch it was made for, or `None`.
        predicted: Bytes at the peak, or `None` where unknown.
        limit: Bytes it has to fit in, or `None`.
        relative_time: Time of a step, as a multiple of the plain step's, or `None`.
        segments: Into how many segments the model can be cut.
        recomputed: How many of these are recomputed. One entry of `recompute` may span several.
        alternatives: The other ways that were considered.
    """

    micro_batch_size: int | None = None
    recompute: tuple[str, ...] = ()
    head: str | None = None
    head_parts: int = 1
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
    def head_in_parts(self) -> tuple[str, int] | None:
        """Where the head begins and into how many parts it is cut, or `None` where it runs with the rest."""
        return None if self.head is None else (self.head, self.head_parts)

    @property
    def changes_model(self) -> bool:
        """Whether it changes the model itself, and not only how its batches are run."""
        return self.precision is not None or self.jit_compile is not None

    @property
    def sentence(self) -> str:
        """The plan in one line: what it does, and what it is predicted to take."""
        parts = [self._cut()]
        if self.recompute and self.segments:
            parts.append(f"recomputing {self.recomputed or len(self.recompute)} of {self.segments} segments")
        elif self.recompute:
            parts.append(f"recomputing {', '.join(self.recompute)}")
        if self.head_in_parts is not None:
            parts.append(f"the head ({self.head}) in {self.head_parts} parts")
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
        plain = self._cut().endswith(("whole", "whole batches")) and not self.recompute and not self.head_in_parts
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
