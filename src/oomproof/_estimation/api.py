"""`estimate` and `max_batch_size`: from a model and a batch size to figures a user can act on."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

from oomproof._backends import current
from oomproof._backends.base import Backend
from oomproof._backends.common.model import check_is_model
from oomproof._backends.common.precision import computed_in
from oomproof._compat.keras import model_supports_jit
from oomproof._estimation import naming
from oomproof._estimation.allocator import Replay, replay
from oomproof._estimation.bands import band_of
from oomproof._estimation.engines.base import Answer, Question, engine_for
from oomproof._estimation.search import largest
from oomproof._estimation.workloads import (
    InputShape,
    batch_bytes,
    check_batch_size,
    describe,
    in_words,
    with_next_batch,
)
from oomproof._machine import gpus
from oomproof._records.estimate import Estimate
from oomproof._records.run import Phase
from oomproof._records.trace import Buffer, Target, Trace, Workload
from oomproof._records.units import format_bytes, tensor_bytes
from oomproof._simulators import ONE_AT_A_TIME
from oomproof.errors import CannotFitError, OomproofError, UnsupportedModelError

_POINTS = 500
_LEAST_CARD = 2**20


def estimate(
    model: Any,
    batch_size: int,
    *,
    gpu: str | None = None,
    memory: int | str | None = None,
    engine: str = "auto",
    phase: Phase = "train",
    precision: str | None = None,
    micro_batch_size: int | None = None,
    jit: bool | None = None,
    input_shape: InputShape = None,
    recompute: Sequence[str] = (),
) -> Estimate:
    """Says how much memory a step will take, without running it. The GPU need not be there.

    Args:
        model: A Keras model, compiled unless `phase` is `"predict"`. It stays as it was; one that is not built yet is
            built.
        batch_size: Samples in a batch.
        gpu: A card of the catalogue, such as `"rtx-4090"`; `oomproof gpus` lists them. The one in this machine when
            neither this nor `memory` is given.
        memory: The memory of a card that is not in the catalogue, in bytes or as `"24GiB"`.
        engine: `"trace"`, `"compile"`, `"probe"` (real steps at small sizes on the device at hand), or `"auto"` for the
            most exact one that works here and runs nothing.
        phase: `"train"`, `"test"` (evaluate) or `"predict"`.
        precision: Another dtype policy than the model has, such as `"mixed_bfloat16"`.
        micro_batch_size: Estimate for batches that are run in pieces of at most this size, as `guard` does.
        jit: Whether the step is compiled; by default as Keras would decide on a machine with that GPU.
        input_shape: The shape of a sample, where the model leaves it open: a tuple, a list of them for several inputs,
            or a dict by name. A dtype may stand last: `(128, "int32")`.
        recompute: Segments of the model that are computed again in the backward pass, as in `Plan.recompute`.

    Returns:
        An `Estimate`. Printed, it is a table.

    Raises:
        TypeError, ValueError: For arguments that make no sense, shapes that are open, a card that is not known.
        UnsupportedModelError: For a model that cannot be traced.
        BackendError: For an engine that cannot be used here.

    Example:
        >>> e = oomproof.estimate(model, 256, gpu="a100-40gb")
        >>> e.fits, e.by_layer[:5]
    """
    return _estimated(
        model,
        batch_size,
        gpu=gpu,
        memory=memory,
        engine=engine,
        phase=phase,
        precision=precision,
        micro_batch_size=micro_batch_size,
        jit=jit,
        input_shape=input_shape,
        recompute=recompute,
    )[0]


def _estimated(
    model: Any,
    batch_size: int,
    *,
    gpu: str | None,
    memory: int | str | None,
    engine: str,
    phase: Phase,
    precision: str | None,
    jit: bool | None,
    input_shape: InputShape,
    micro_batch_size: int | None = None,
    recompute: Sequence[str] = (),
) -> tuple[Estimate, bool]:
    """The estimate, and whether it is settled that a step fits whose `expected` does."""
    began = time.perf_counter()
    check_batch_size(batch_size)
    check_model(model, phase)
    if micro_batch_size is not None:
        check_batch_size(micro_batch_size, "micro_batch_size")
    backend = current()
    card = card_of(gpu, memory)
    pieces = micro_batch_size is not None and micro_batch_size < batch_size
    size = min(batch_size, micro_batch_size or batch_size)
    target = Target(True, card.capability) if card is not None else Target()
    with ONE_AT_A_TIME, computed_in(model, precision) as policy:
        compiled = is_compiled(model, backend) if jit is None else jit
        workload = describe(model, size, phase, compiled, target, input_shape)
        if phase == "train":
            # Pieces and recomputation are what `guard` runs.
            as_guarded = pieces or bool(recompute)
            if as_guarded:
                backend.check_model(model)
            workload = dataclasses.replace(workload, recompute=tuple(recompute), guarded=as_guarded, later_piece=pieces)
        question = Question(backend, model, workload, card)
        name, module = engine_for(engine, question)
        answer = _answer(module, question)
    mode = mode_of(backend, compiled, model)
    if pieces:
        answer = _in_pieces(answer, model, workload, batch_size, backend)
    answer = _with_next_batch(answer, workload, batch_size, backend)
    replayed = replay(answer.trace)
    peak = replayed.peak if answer.peak is None else answer.peak
    live = _scaled(replayed, peak)
    here = gpu is None and memory is None
    band = band_of(name, backend.name, mode, measured=answer.measured, tuned=answer.tuned and here)
    high = int((peak + answer.unknown[1]) * (1 + band.above))
    reserved = max(peak, replayed.reserved)
    limit = None if card is None else _limit(card, backend, here=here)
    # It went through, or XLA planned it for this limit. A process keeps to the kernels its autotuner chose.
    settled = answer.measured or (answer.tuned and here)
    if settled and limit is not None:
        high = min(high, max(limit, peak))
    estimated = Estimate(
        model=model.name,
        backend=backend.name,
        mode=mode,
        phase=phase,
        precision=policy,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size if pieces else None,
        engine=name,
        low=int((peak - answer.unknown[0]) * (1 - band.below)),
        expected=peak,
        high=high,
        confidence=band.confidence,
        gpu=None if card is None else str(card),
        limit=limit,
        driver=None if card is None else card.shown(backend.name, reserved),
        by_category=_summed(((buffer.category, size) for buffer, size in live), peak, "temporary"),
        by_layer=tuple(_summed(((buffer.layer, size) for buffer, size in live), peak, "").items()),
        peak_at=_moment(answer.trace, replayed),
        timeline=_thinned(replayed.timeline),
        seconds=time.perf_counter() - began,
        notes=answer.notes if jit is not None else (*_jit_turned_off(model, backend), *answer.notes),
    )
    return estimated, settled


def max_batch_size(
    model: Any,
    *,
    gpu: str | None = None,
    memory: int | str | None = None,
    engine: str = "auto",
    phase: Phase = "train",
    precision: str | None = None,
    jit: bool | None = None,
    input_shape: InputShape = None,
) -> int:
    """The largest batch whose step fits on the card even if its peak is as high as it may be.

    Args:
        model: As for `estimate`, like everything else.
        gpu: As for `estimate`.
        memory: As for `estimate`.
        engine: As for `estimate`.
        phase: As for `estimate`.
        precision: As for `estimate`.
        jit: As for `estimate`.
        input_shape: As for `estimate`.

    Raises:
        CannotFitError: When not even one sample fits.
        ValueError: When no card is named and none is in this machine.
    """
    card = card_of(gpu, memory)
    if card is None:
        raise ValueError('Expected a card to fit into: gpu="rtx-4090" or memory="24GiB". This machine has none.')

    measure = functools.partial(
        _estimated,
        model,
        gpu=gpu,
        memory=memory,
        engine=engine,
        phase=phase,
        precision=precision,
        jit=jit,
        input_shape=input_shape,
    )
    first, settled = measure(1)
    assert first.limit is not None
    if not first.fits:
        raise CannotFitError(
            f"One sample at a time needs {format_bytes(first.expected)}, up to {format_bytes(first.high)}, and "
            f"{format_bytes(first.limit)} can be used on {first.gpu}. Largest: "
            + ", ".join(f"{name} {format_bytes(size)}" for name, size in list(first.by_category.items())[:3])
            + ". Use an optimizer with less state, a smaller model or inputs, or a card with more memory."
        )

    def need(batch_size: int) -> int:
        found, known = measure(batch_size)
        return found.expected if known else found.high

    return largest(need, first.limit, first.expected if settled else first.high)


def check_model(model: Any, phase: str) -> None:
    check_is_model(model)
    if phase not in ("train", "test", "predict"):
        raise ValueError(f'Expected `phase` to be "train", "test" or "predict". Received: phase={phase!r}')
    if phase != "predict" and not model.compiled:
        raise ValueError(
            f"{model.name} is not compiled, so its optimizer and its loss are not known. Call `model.compile(...)` "
            'first, or estimate with phase="predict".'
        )


def card_of(gpu: str | None, memory: int | str | None) -> gpus.Gpu | None:
    if gpu is not None and memory is not None:
        raise ValueError(f"Expected `gpu` or `memory`, not both. Received: gpu={gpu!r}, memory={memory!r}")
    if memory is not None:
        return _card_with(memory)
    return gpus.find(gpu) if gpu is not None else gpus.local()


def _card_with(memory: int | str) -> gpus.Gpu:
    wrong = f'Expected `memory` to be the memory of a card, such as "24GiB". Received: memory={memory!r}'
    try:
        card = gpus.of_memory(memory)
    except ValueError as error:
        raise ValueError(wrong) from error
    if card.memory < _LEAST_CARD:
        # "24" is 24 bytes, and hardly meant.
        raise ValueError(f"{wrong}, which is {format_bytes(card.memory)}")
    return card


def is_compiled(model: Any, backend: Backend) -> bool:
    """Whether Keras would compile the step on a machine with a GPU. It says no to TensorFlow on one without."""
    if model.run_eagerly:
        return False
    if backend.name == "tensorflow" and gpus.local() is None:
        return bool(model_supports_jit(model))
    return bool(model.jit_compile)


def _jit_turned_off(model: Any, backend: Backend) -> tuple[str, ...]:
    """Saved on TensorFlow without a GPU, a model says that nothing is to be compiled, which JAX takes at its word."""
    if backend.name != "jax" or not model.compiled or model.jit_compile or model.run_eagerly:
        return ()
    return ("jit_compile=False, as in files from TensorFlow without a GPU: run op by op. --jit: as if compiled.",)


def mode_of(backend: Backend, compiled: bool, model: Any) -> str:
    if compiled:
        return "compiled"
    return "graph" if backend.name == "tensorflow" and not model.run_eagerly else "eager"


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
    # On torch the batch waits on the host, and gradients are added up where the step has them anyway.
    if backend.name != "torch":
        rest = batch_bytes(workload, batch_size) - batch_bytes(workload, None)
        more.append(Buffer(rest, -1, end, "input", ""))
    if backend.name != "torch" and workload.phase == "train":
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


def _limit(card: gpus.Gpu, backend: Backend, *, here: bool) -> int:
    """Bytes there are to fit into; on the card in this machine that may be less, by a limit or by other processes."""
    usable = card.usable(backend.name)
    limit = backend.memory().describe().limit if here else None
    return usable if limit is None else min(usable, limit)


def _layer_of(variable: Any) -> str:
    return str(variable.path).rpartition("/")[0]


def _scaled(replayed: Replay, peak: int) -> list[tuple[Buffer, int]]:
    """What is alive at the peak, with sizes that do not add up to more than it.

    What is there before the step is known exactly. Where an engine knows the peak and the trace only who takes it, the
    rest is taken in proportion.
    """
    fixed = sum(buffer.size for buffer in replayed.live if buffer.start < 0)
    moving = sum(buffer.size for buffer in replayed.live if buffer.start >= 0)
    factor = max(0, peak - fixed) / moving if moving else 0.0
    if peak == replayed.peak:
        # The difference is what the allocator rounds up and cannot use, which is nobody's.
        factor = min(1.0, factor)
    return [(b, b.size if b.start < 0 else int(b.size * factor)) for b in replayed.live]


def _summed(pairs: Any, peak: int, nobody: str) -> dict[str, int]:
    """Sums by name, largest first; what is missing to the peak goes to `nobody`."""
    sums: collections.Counter[str] = collections.Counter()
    for name, size in pairs:
        sums[name] += size
    sums[nobody] += max(0, peak - sum(sums.values()))
    return {name: size for name, size in sums.most_common() if size}


def _moment(trace: Trace, replayed: Replay) -> str:
    if not trace.ops:
        return "step"
    op = trace.ops[replayed.at]
    stage = {"forward": "forward pass", "backward": "backward pass", "update": "update"}[op.stage]
    return f"{stage} of {op.layer}" if op.layer else stage


def _thinned(timeline: Sequence[int]) -> tuple[int, ...]:
    """At most 500 points, each the most of its stretch."""
    if len(timeline) <= _POINTS:
        return tuple(timeline)
    edges = [len(timeline) * index // _POINTS for index in range(_POINTS + 1)]
    return tuple(max(timeline[start:stop]) for start, stop in itertools.pairwise(edges))
