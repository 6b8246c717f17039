"""The estimate of one batch size: an engine's answer, completed with what the step shares the device with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from oomproof._backends import current
from oomproof._backends.base import Backend
from oomproof._backends.common.precision import computed_in
from oomproof._estimation import naming, shares
from oomproof._estimation.allocator import UNSPLIT, replay
from oomproof._estimation.bands import band_of
from oomproof._estimation.cards import card_of, limit_of
from oomproof._estimation.engines.base import Answer, Question, engine_for
from oomproof._estimation.modes import is_compiled, mode_of, notes_on_jit
from oomproof._estimation.workloads import InputShape, batch_bytes, describe, in_words, with_next_batch
from oomproof._machine.gpus import Gpu
from oomproof._records.estimate import Estimate
from oomproof._records.run import Phase
from oomproof._records.trace import Buffer, Target, Workload
from oomproof._records.units import tensor_bytes
from oomproof._simulators import one_at_a_time
from oomproof.errors import OomproofError, UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a user asks to be estimated, whatever the batch size. See `oomproof.estimate`."""

    model: Any
    gpu: str | None
    memory: int | str | None
    engine: str
    phase: Phase
    precision: str | None
    jit: bool | None
    input_shape: InputShape
    micro_batch_size: int | None = None
    recompute: Sequence[str] = ()

    @property
    def here(self) -> bool:
        """Whether it is for the card in this machine."""
        return self.gpu is None and self.memory is None

    def in_pieces(self, batch_size: int) -> bool:
        return self.micro_batch_size is not None and self.micro_batch_size < batch_size


@dataclasses.dataclass(frozen=True)
class _Answered:
    """What was found out about a step."""

    backend: Backend
    card: Gpu | None
    engine: str
    answer: Answer
    compiled: bool
    precision: str
    settled: bool


def estimated(asked: Asked, batch_size: int) -> tuple[Estimate, bool]:
    """The estimate, and whether it is settled that a step fits whose `expected` does."""
    began = time.perf_counter()
    found = _answered(asked, batch_size)
    return _estimate(asked, batch_size, found, began), found.settled


def _answered(asked: Asked, batch_size: int) -> _Answered:
    """Asks the engine for the step, and adds what is on the device beside it."""
    backend, card, model = current(), card_of(asked.gpu, asked.memory), asked.model
    target = Target(True, card.capability) if card is not None else Target()
    with one_at_a_time(), computed_in(model, asked.precision) as policy:
        compiled = is_compiled(model, backend) if asked.jit is None else asked.jit
        workload = _workload(asked, batch_size, compiled, target, backend)
        question = Question(backend, model, workload, card)
        engine, module = engine_for(asked.engine, question)
        answer = _answer(module, question)
    if asked.in_pieces(batch_size):
        answer = _in_pieces(answer, model, workload, batch_size, backend)
    answer = _with_next_batch(answer, workload, batch_size, backend)
    # It went through, or XLA planned it for this limit. A process keeps to the kernels its autotuner chose.
    settled = answer.measured or (answer.tuned and asked.here)
    return _Answered(backend, card, engine, answer, compiled, policy, settled)


def _workload(asked: Asked, batch_size: int, compiled: bool, target: Target, backend: Backend) -> Workload:
    """The step, or that of a piece."""
    pieces, size = asked.in_pieces(batch_size), min(batch_size, asked.micro_batch_size or batch_size)
    workload = describe(asked.model, size, asked.phase, compiled, target, asked.input_shape)
    if asked.phase != "train":
        return workload
    # Pieces and recomputation are what `guard` runs.
    guarded = pieces or bool(asked.recompute)
    if guarded:
        backend.check_model(asked.model)
    return dataclasses.replace(workload, recompute=tuple(asked.recompute), guarded=guarded, later_piece=pieces)


def _estimate(asked: Asked, batch_size: int, found: _Answered, began: float) -> Estimate:
    """The answer as figures a user can act on."""
    answer, backend, card = found.answer, found.backend, found.card
    replayed = replay(answer.trace)
    peak = replayed.peak if answer.peak is None else answer.peak
    mode = mode_of(backend, found.compiled, asked.model)
    tuned = answer.tuned and asked.here
    known = asked.jit is not None or answer.measured  # Whether it is compiled.
    band = band_of(found.engine, backend.name, mode, measured=answer.measured, tuned=tuned)
    high = int((peak + answer.unknown[1]) * (1 + band.above))
    if mode == "graph" and card is not None and not answer.measured:
        # A block that is not split counts as used whole, and which one is not depends on what ran before: on an H200
        # 5 of 19 unseen models took 28 to 54 MiB more than the band alone says.
        high += UNSPLIT
    limit = None if card is None else limit_of(card, backend, here=asked.here)
    if found.settled and limit is not None:
        high = min(high, max(limit, peak))
    return Estimate(
        model=asked.model.name,
        backend=backend.name,
        mode=mode,
        phase=asked.phase,
        precision=found.precision,
        batch_size=batch_size,
        micro_batch_size=asked.micro_batch_size if asked.in_pieces(batch_size) else None,
        engine=found.engine,
        low=int((peak - answer.unknown[0]) * (1 - band.below)),
        expected=peak,
        high=high,
        confidence=band.confidence,
        gpu=None if card is None else str(card),
        limit=limit,
        driver=None if card is None else card.shown(backend.name, max(peak, replayed.reserved)),
        by_category=shares.by_category(replayed, peak),
        by_layer=shares.by_layer(replayed, peak),
        peak_at=shares.moment(answer.trace, replayed),
        timeline=shares.thinned(replayed.timeline),
        seconds=time.perf_counter() - began,
        notes=answer.notes if known else (*notes_on_jit(asked.model, backend), *answer.notes),
    )


def _answer(module: Any, question: Question) -> Answer:
    """What the engine answers. What goes wrong in a step of the user's comes with what the step was given."""
    try:
        return module.answer(question)  # type: ignore[no-any-return]
    except (OomproofError, MemoryError):
        raise
    except Exception as error:
        given = f"A step of {question.model.name} was tried with {in_words(question.workload)}."
        if isinstance(error, ValueError | TypeError):
            error.add_note(given)
            raise
        raise UnsupportedModelError(f"{given} It failed: {naming.described(error)}") from error


def _in_pieces(answer: Answer, model: Any, workload: Any, batch_size: int, backend: Backend) -> Answer:
    """The step of a piece as part of its batch, whose rest is there too, and what gradients are added up in."""
    end = len(answer.trace.ops)
    more = []
    if not backend.traits.pieces_wait_on_host:
        rest = batch_bytes(workload, batch_size) - batch_bytes(workload, None)
        more.append(Buffer(rest, -1, end, "input", ""))
    if workload.phase == "train" and not backend.traits.gradients_add_in_place:
        more += [
            Buffer(tensor_bytes(tuple(v.shape), v.dtype), 0, end - 1, "gradients", _layer_of(v))
            for v in model.trainable_weights
        ]
    trace = dataclasses.replace(answer.trace, buffers=(*answer.trace.buffers, *more))
    peak = None if answer.peak is None else answer.peak + sum(buffer.size for buffer in more)
    return dataclasses.replace(answer, trace=trace, peak=peak)


def _with_next_batch(answer: Answer, workload: Workload, batch_size: int, backend: Backend) -> Answer:
    """With the batch that `fit` puts on the device ahead of time, where it does."""
    trace = with_next_batch(answer.trace, workload, batch_size, backend)
    more = sum(buffer.size for buffer in trace.buffers[len(answer.trace.buffers) :])
    return dataclasses.replace(answer, trace=trace, peak=None if answer.peak is None else answer.peak + more)


def _layer_of(variable: Any) -> str:
    return str(variable.path).rpartition("/")[0]
