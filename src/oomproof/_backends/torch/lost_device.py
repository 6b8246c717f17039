"""What can still be done when a CUDA error has made the GPU unusable for this process: save, and say so."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from oomproof.errors import BackendError

FILE = "oomproof-rescue.keras"


def lost_device(model: Any, on_host: Mapping[int, Any], finished: int, error: BaseException) -> BackendError:
    """The error to raise instead. Saves the model first, if its values can still be had.

    Args:
        model: The model.
        on_host: Values that are on the host anyway, by the id of their variable.
        finished: Batches that were trained completely.
        error: What torch raised.
    """
    path = os.path.abspath(FILE)
    try:
        with _values_on_host(model, on_host):
            model.save(path)
        outcome = f"The model was saved to {path}, as it was after {finished} batches of this process."
    except Exception as failure:
        outcome = (
            f"The model could not be saved ({_first_line(failure)}): use your last checkpoint. The last batch that "
            f"was finished is number {finished} of this process."
        )
    return BackendError(
        "A CUDA error that is not about memory has made the GPU unusable for this process: nothing can be computed on "
        f"it any more, so training cannot go on here and needs a new process. {outcome} Run with "
        f"CUDA_LAUNCH_BLOCKING=1 to see which operation failed. torch said: {_first_line(error)}"
    )


@contextlib.contextmanager
def _values_on_host(model: Any, on_host: Mapping[int, Any]) -> Iterator[None]:
    """Puts the values of all variables on the host while they are saved."""
    variables = [*model.variables, *(model.optimizer.variables if model.optimizer is not None else ())]
    originals = [(variable, variable._value) for variable in variables]
    copies = [_on_host(value, on_host.get(id(variable))) for variable, value in originals]
    try:
        for (variable, _), value in zip(originals, copies, strict=True):
            variable._value = value
        yield
    finally:
        for variable, value in originals:
            variable._value = value


def _on_host(value: Any, known: Any) -> Any:
    try:
        return value.detach().cpu()
    except RuntimeError:
        if known is None:
            raise
        return torch.clone(known)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
