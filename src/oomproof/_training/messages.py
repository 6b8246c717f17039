"""The errors of a training: what happened, the numbers, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from oomproof._backends.base import Shortage
from oomproof._explain.api import explain
from oomproof._records.diagnosis import Diagnosis, short_of
from oomproof._records.run import Device
from oomproof._records.units import format_bytes
from oomproof._training.helpers import optional
from oomproof.errors import BackendError, CannotFitError, RecoveryFailedError

# With more than this share of all memory free nobody gives up at the first try, or blames memory alone.
NEARLY_ALL = 0.8
# They say the same where they are not installed as they should be.
_LIBRARIES = re.compile("cudnn|cublas|cusolver|algorithm", re.IGNORECASE)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())


def _explained(error: Any) -> Diagnosis | None:
    """An error is raised whether or not it can be explained."""
    with optional("Explaining the error"):
        return explain(error)
    return None


def budget_cannot_be_held(budget: int, device: Device, advice: str) -> BackendError:
    return BackendError(
        f"A budget of {format_bytes(budget)} cannot be kept on {device.name}: its allocator does not say how much "
        f"memory is in use. Train on a GPU, {advice}or use `micro_batch_size` instead."
    )


def model_does_not_fit(device: Device, resident: Mapping[str, int], said: str) -> CannotFitError:
    return CannotFitError(
        f"The model and its optimizer do not fit on {device}, before any data. Resident so far: {_listed(resident)}. "
        "Use a smaller model, an optimizer with less state (SGD, Adafactor), or a device with more memory. "
        f"The framework said: {said}",
        diagnosis=_explained([said]),
    )


def budget_below_resident(budget: int, resident: Mapping[str, int]) -> CannotFitError:
    return CannotFitError(
        f"Training needs at least {format_bytes(sum(resident.values()))} before any data: {_listed(resident)}. "
        f"The budget is {format_bytes(budget)}. Raise the budget, use an optimizer with less state "
        "(SGD, Adafactor), or freeze layers.",
        diagnosis=short_of(
            sum(resident.values()),
            budget,
            "The model and its optimizer are larger than the budget, before any data.",
            f"oomproof.guard(model, budget={sum(resident.values()) * 2})  # twice that",
            'model.compile("sgd", ...)  # an optimizer without state',
        ),
    )


def one_sample_over_budget(
    budget: int, need: int, taken: int, resident: Mapping[str, int], enough: float
) -> CannotFitError:
    return CannotFitError(
        f"One sample at a time needs {format_bytes(need)} on top of the {format_bytes(taken)} already in use "
        f"(weights {format_bytes(resident['weights'])}, optimizer {format_bytes(resident['optimizer'])}), and "
        f"the budget is {format_bytes(budget)}. Raise the budget to {format_bytes(enough)}, or make the inputs or "
        "the model smaller.",
        diagnosis=short_of(
            need + taken,
            budget,
            "One sample at a time is larger than the budget.",
            f"oomproof.guard(model, budget={int(enough)})  # what one sample needs, and 5 %",
        ),
    )


def batch_cannot_be_cut(size: int) -> CannotFitError:
    return CannotFitError(
        "The batch cannot be cut: its tensors do not all have the same number of samples in their first dimension, "
        f"or the model takes batches of {size} alone. Expected {size} samples everywhere. Give every input, target and "
        "weight a batch dimension, and give `keras.Input` a `shape` rather than a `batch_shape`."
    )


def cutting_is_not_allowed(size: int) -> CannotFitError:
    return CannotFitError(
        f'The batch of {size} needs to be cut, and `allow` does not name "microbatch". Allow it with '
        'allow="default", or lower the batch size.'
    )


def not_exact(size: int, pieces: int, why: Sequence[str], head_alone: bool = False) -> CannotFitError:
    how = "with the head of the model in parts" if head_alone else "with parts of the model recomputed"
    how = f"in {pieces} pieces" if pieces > 1 else how
    return CannotFitError(
        f"The batch of {size} runs {how}, which is not exact for this model: {'; '.join(why)}. "
        'Allow it with allow="default", lower the batch size, or replace what is named '
        "(GroupNormalization and LayerNormalization do not mix samples)."
    )


def gradient_does_not_fit(device: Device, shortage: Shortage) -> RecoveryFailedError:
    return RecoveryFailedError(
        f"The gradient of one sample does not fit on {device}. Nothing was written. Make the inputs or the model "
        f"smaller, or use a device with more memory. The framework said: {shortage.text}",
        diagnosis=_explained(shortage.error),
    )


def gave_up(
    what: str,
    device: Device,
    free: int | None,
    limit: int | None,
    splittable: bool,
    resident: Mapping[str, int],
    said: str,
) -> RecoveryFailedError:
    room = "" if free is None or limit is None else f" with {format_bytes(free)} of {format_bytes(limit)} free"
    cut = "" if splittable else " Its tensors differ in their first dimension, so it is not cut."
    advice = "Make inputs or layers smaller, use an optimizer with less state, or a device with more memory."
    if free is not None and limit is not None and free > NEARLY_ALL * limit and _LIBRARIES.search(said):
        advice += " Nearly all memory is free, so the reason may also be a library that does not work here."
    return RecoveryFailedError(
        f"{what} does not fit on {device.name}{room}.{cut} Resident: {_listed(resident)}. "
        "The model and its optimizer are as they were before this batch and can be saved. "
        f"{advice} The framework said: {said}",
        diagnosis=_explained([said]),
    )
