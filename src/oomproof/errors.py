"""The exceptions oomproof raises.

    OomproofError(Exception)
    ├─ CannotFitError         before the first step: what it needs, what there is, what would make it fit
    ├─ RecoveryFailedError    during training: the model is as it was before the failed batch
    ├─ UnsupportedModelError  names the method or layer, and what to write instead
    └─ BackendError           a backend, version or device that cannot do what was asked
    InexactWarning(UserWarning)   training goes on in a way that is not exact; said once, whatever `verbose` is

Bad arguments raise `ValueError` or `TypeError`, in Keras's wording. Every message says what happened,
the numbers, and what to do next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomproof._records.diagnosis import Diagnosis
    from oomproof._records.run import Run


class OomproofError(Exception):
    """Base class of everything oomproof raises on purpose."""


class CannotFitError(OomproofError):
    """Raised before the first step when no plan fits the memory that is there.

    Attributes:
        diagnosis: What is short and what to do, as a `Diagnosis`, or `None` where there are no numbers.
    """

    def __init__(self, message: str = "", *, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class RecoveryFailedError(OomproofError):
    """Raised during training when even the smallest piece of a batch does not fit.

    The model, its optimizer and its metrics are as they were before the failed batch, so they can be saved.
    `__cause__` is the framework's own error.

    Attributes:
        run: The `Run` so far.
        history: The Keras `History` so far, or `None` outside of `fit`.
        diagnosis: What the framework's error means and what to do, as a `Diagnosis`.
    """

    def __init__(
        self, message: str, *, run: Run | None = None, history: Any = None, diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(message)
        self.run = run
        self.history = history
        self.diagnosis = diagnosis


class UnsupportedModelError(OomproofError):
    """Raised for a model whose training oomproof cannot take over without changing its result."""


class BackendError(OomproofError):
    """Raised when the backend, its version or its device cannot do what was asked."""


class InexactWarning(UserWarning):
    """Training goes on in a way that is not the training that was asked for, or could not be proven to be.

    `warnings.simplefilter("error", oomproof.InexactWarning)` makes it an error; `allow="exact"` refuses to go on.
    """
