"""The exceptions oomproof raises.

    OomproofError(Exception)
    ├─ CannotFitError         before the first step: what it needs, what is available, what would make it fit
    ├─ RecoveryFailedError    during training: the model is as it was before the failed batch
    ├─ UnsupportedModelError  names the method or layer, and what to write instead
    └─ BackendError           a backend, version or device cannot do what was requested
    InexactWarning(UserWarning)   training goes on but is not exact; issued once, whatever `verbose` is

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
    """Raised before the first step when no plan fits the available memory.

    Attributes:
        diagnosis: A `Diagnosis`: what is needed, what is available and what to do. `None` where there are no numbers.
    """

    def __init__(self, message: str = "", *, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class RecoveryFailedError(OomproofError):
    """Raised during training when even the smallest piece of a batch does not fit.

    The model, its optimizer and its metrics are as they were before the failed batch, so you can save them. `__cause__`
    is the framework's own error.

    Attributes:
        run: The `Run` so far.
        history: The Keras `History` so far, or `None` outside of `fit`.
        diagnosis: A `Diagnosis` of the framework's error.
    """

    def __init__(
        self, message: str, *, run: Run | None = None, history: Any = None, diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(message)
        self.run = run
        self.history = history
        self.diagnosis = diagnosis


class UnsupportedModelError(OomproofError):
    """Raised for a model that oomproof cannot train without changing the result."""


class BackendError(OomproofError):
    """Raised when the backend, its version or its device cannot do what was requested."""


class InexactWarning(UserWarning):
    """Issued when training goes on but differs from plain training, or cannot be proven to be the same.

    `warnings.simplefilter("error", oomproof.InexactWarning)` turns it into an error; `allow="exact"` refuses to train.
    """
