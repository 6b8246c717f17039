"""`estimate` and `max_batch_size`: from a model and a batch size to figures a user can act on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oomproof._backends.common.model import check_is_model
from oomproof._estimation.cards import card_of
from oomproof._estimation.estimating import Asked, estimated
from oomproof._estimation.search import largest
from oomproof._estimation.workloads import InputShape, check_batch_size
from oomproof._records.estimate import Estimate
from oomproof._records.run import Phase
from oomproof._records.units import format_bytes
from oomproof.errors import CannotFitError


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
        recompute: Segmentes of the model that are computed again in the backward pass, as in `Plan.recompute`.

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
    check_batch_size(batch_size)
    check_model(model, phase)
    if micro_batch_size is not None:
        check_batch_size(micro_batch_size, "micro_batch_size")
    asked = Asked(
        model, gpu, memory, engine, phase, precision, jit, input_shape, micro_batch_size, recompute=tuple(recompute)
    )
    return estimated(asked, batch_size)[0]


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

    check_model(model, phase)
    asked = Asked(model, gpu, memory, engine, phase, precision, jit, input_shape)
    first, settled = estimated(asked, 1)
    assert first.limit is not None
    if not first.fits:
        raise CannotFitError(
            f"One sample at a time needs {format_bytes(first.expected)}, up to {format_bytes(first.high)}, and "
            f"{format_bytes(first.limit)} can be used on {first.gpu}. Largest: "
            + ", ".join(f"{name} {format_bytes(size)}" for name, size in list(first.by_category.items())[:3])
            + ". Use an optimizer with less state, a smaller model or inputs, or a card with more memory."
        )

    def need(batch_size: int) -> int:
        found, known = estimated(asked, batch_size)
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
