"""A training step as a list of allocations: what backends trace, and what estimation replays. Nothing is run for it.

Time is counted in ops: op `i` allocates its results and its workspace, runs, and after it everything is freed that
nobody needs any more.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from oomproof._records.run import Phase

Category = Literal["weights", "gradients", "optimizer", "activations", "input", "temporary"]
Stage = Literal["forward", "backward", "update"]
# How memory is handed out: TensorFlow's and JAX's allocator op by op, the same in regions that are made as they are
# needed (TensorFlow's on a CPU), one program planned by XLA, torch's allocator as it comes and page by page.
Allocator = Literal["bfc", "bfc-growing", "xla", "caching", "expandable"]


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """Shape, batch included, and dtype of a tensor of the batch."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The device a step is traced for. It need not be there.

    Attributes:
        gpu: A GPU, or the CPU of this machine.
        capability: Compute capability of the GPU.
    """

    gpu: bool = True
    capability: tuple[int, int] = (8, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """One step that is to be traced.

    Attributes:
        x: The model's inputs, in the structure `fit` is given them in, with a `Spec` in the place of each tensor.
        y: The targets, likewise; `None` for `"predict"` and for models without.
        phase: Training, evaluation or prediction.
        jit: Whether the step is compiled (XLA on TensorFlow and JAX, torch.compile on torch).
        target: Where it is to run.
        recompute: Segments of the model that are computed again in the backward pass, as in `Plan.recompute`.
        guarded: Whether it is the step as `guard` runs it, which lets go of some things sooner than Keras's own.
        later_piece: Whether it is a piece of a batch, with the gradients of others there already.
    """

    x: Any
    y: Any
    phase: Phase
    jit: bool
    target: Target = Target()
    recompute: tuple[str, ...] = ()
    guarded: bool = False
    later_piece: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """A moment of the step.

    Attributes:
        name: What the framework calls the op.
        stage: The part of the step it belongs to.
        layer: Path of the layer it computes, such as `"encoder/block_1/dense"`; empty for none.
    """

    name: str
    stage: Stage
    layer: str


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """An allocation.

    Attributes:
        size: Bytes asked for. The allocator rounds.
        start: The op that allocates it; -1 for what is there before the step.
        end: The op after which it is free; the number of ops for what is there after the step.
        category: What it is for. What the forward pass makes and the backward pass needs is `"activations"`;
            a gradient with respect to a weight is one of the `"gradients"`; the rest is `"temporary"`.
        layer: The layer whose op made it, or whose weight or weight's gradient or slot it is; empty for none.
        fixed: Whether a kernel takes as much for a part of the batch.
        workspace: Whether it is what an autotuner is expected to choose, which only the GPU itself can tell.
        drawn: Whether it was made from numbers drawn at random, which took two more of its size for a moment.
        first: Of what is there before the step: the op that allocates it in the very first one, where that is so.
    """

    size: int
    start: int
    end: int
    category: Category
    layer: str
    fixed: bool = False
    workspace: bool = False
    drawn: bool = False
    first: int = -1


@dataclasses.dataclass(frozen=True)
class Trace:
    """A step, as it would run.

    Attributes:
        allocator: The rules memory is handed out by.
        ops: In the order they run.
        buffers: Every allocation.
        notes: What the trace could not know, in words.
    """

    allocator: Allocator
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiled step needs, in bytes, by XLA's own account.

    Attributes:
        arguments: State and batch.
        outputs: What the step returns.
        aliased: The part of the outputs that takes the place of arguments.
        temporary: One block for everything in between.
        tuned: Whether it was compiled on the GPU itself, so that the workspaces its autotuner chose are in `temporary`.
        seconds: How long tracing and compiling took.
        notes: What this cannot know, in words.
        trace: The same program as a trace, where lowering it once more would take long.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    tuned: bool
    seconds: float
    notes: tuple[str, ...] = ()
    trace: Trace | None = None

    @property
    def peak(self) -> int:
        return self.arguments + self.temporary + self.outputs - self.aliased


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """The model between two neighbouring places where it can be cut, for a batch of a certain size.

    Attributes:
        first: Label of its first call (see `backends.common.call_graph`).
        last: Label of its last call.
        kept: Bytes it makes that are alive when the forward pass is over, because some backward pass needs them.
        crossing: Bytes of its results that later segments need: after its own end, after the end of the next
            segment, and so on. What a recomputed segment keeps of itself.
        work: Most bytes alive beside `kept` and gradients of weights while its backward pass runs.
        gradients: Bytes of the gradients of its weights.
        cost: Time of its forward pass, as a share of the whole forward pass.
        recomputable: Whether it may be computed twice.
    """

    first: str
    last: str
    kept: int
    crossing: tuple[int, ...]
    work: int
    gradients: int
    cost: float
    recomputable: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """A training step as planning sees it: what is there whatever the plan, and segments that can be recomputed.

    Attributes:
        batch_size: Samples that `segments`, `inputs` and `outside` are for.
        segments: In the order of the forward pass.
        resident: Bytes of weights and optimizer state.
        inputs: Bytes of the batch.
        outside: Bytes kept for the backward pass by what is no segment: the loss, metrics.
        update: Most bytes beside `resident`, gradients and the batch while the optimizer runs.
        peak: Bytes at the peak of the plain step, as estimated. The rest explains it; this is what counts.
        seconds: About how long the forward pass takes on a usual card.
        calls: How many layers are called in it, those inside of others included.
        scratch: Most bytes that kernels take to work in whatever the size of a piece; no part of `segments`.
        rows: Bytes of gradients that are rows of tables, for `batch_size` samples. They are as many as the batch has
            words, and those of pieces are listed and not added up.
        heads: Numbers of the segments that a head can begin with that runs in parts.
    """

    batch_size: int
    segments: tuple[Segment, ...]
    resident: int
    inputs: int
    outside: int
    update: int
    peak: int
    seconds: float = 0.0
    calls: int = 0
    scratch: int = 0
    rows: int = 0
    heads: tuple[int, ...] = ()
