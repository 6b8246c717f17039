"""What a backend must do, as protocols. The rest of oomproof sees frameworks only through these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from oomproof._records.exactness import Exactness
from oomproof._records.run import Device, Phase
from oomproof._records.trace import Workload

Data = Any
Logs = Any


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes in use on the device now, and the peak since the last reset."""

    current: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Shortage:
    """An out-of-memory error, boiled down so that the exception and its frames can be let go.

    Attributes:
        text: First line of the framework's message.
        where: `"commit"` when the optimizer's update ran out, `"step"` otherwise.
        needed: Bytes the whole program asked for, when the framework says so (XLA does).
        error: The exception without its traceback, to be the cause of what we may raise.
    """

    text: str
    where: Literal["step", "commit"]
    needed: int | None
    error: Exception


class DeviceMemory(Protocol):
    """The memory of the device the model trains on."""

    # What else a user can do to have memory measured: part of a sentence that ends in a comma and a blank, or nothing.
    advice: str

    def describe(self) -> Device: ...

    def usage(self) -> MemoryUse | None:
        """Current and peak use; `None` where the device cannot be measured."""

    def reset_peak(self) -> None: ...

    def release(self) -> None:
        """Gives back what a failed step left behind. Called outside of any `except` block."""

    def shortage(self, error: BaseException) -> Shortage | None:
        """What ran out, or `None` when the error is not about device memory."""


class Step(Protocol):
    """The transactional step of one model. A call that raises has changed nothing.

    `pieces` is into how many pieces the batch is cut. With `lean` the update is applied variable by variable.
    `spec` is what the backend's own `install` passed along with the batch: how it wants the batch traced.
    """

    # Bytes not to be exceeded, for steps that know what a program needs before it runs.
    budget: int | None
    # Whether a size that was never run before costs no more than to run it: nothing is traced or compiled for it.
    tries_are_cheap: bool
    # Whether the first run of a shape looks for the quickest kernels, in memory that no later run takes.
    searches_kernels: bool
    # Segments that are computed again in the backward pass. Setting it forgets programs that were made for others;
    # ValueError for labels that the model does not have.
    recompute: tuple[str, ...]
    # Where the head of the model begins, and into how many parts it is cut while training, if it is. Likewise.
    head: tuple[str, int] | None
    # What the model was when this step was made for it. Its caches are good for nothing else.
    fingerprint: Any
    # Whether Keras's own traces go on with the variables they were made with when the model has others.
    traces_hold_variables: bool
    # Waits for every step that was believed, and runs those again that failed. The driver's.
    settle: Callable[[], None]
    # What was learnt about how a batch may be cut, as JSON. Set where an earlier run has learnt it.
    learnt: dict[str, Any]
    # What the steps died of that `wait_for_pending` returned.
    failure: Exception | None

    @property
    def batches_on_device(self) -> int:
        """How many batches are there when a step begins: its own and those that are put there ahead of time."""

    def prepare(self, data: Data, phase: Phase) -> None:
        """Builds model, optimizer and metrics where they are not built yet."""

    def trace_key(self, phase: Phase, data: Data, spec: Any) -> Any:
        """What Keras's own function would look its trace up by; `None` where it keeps none."""

    def batch_size(self, data: Data) -> int: ...

    def sample_bytes(self, data: Data) -> int:
        """Bytes of data in one sample, at least 1: what a piece needs grows with it."""

    def splittable(self, data: Data) -> bool:
        """Whether every tensor of the batch has the same number of samples, so that it can be cut."""

    def train(self, data: Data, pieces: int, lean: bool, spec: Any) -> Logs: ...

    def test(self, data: Data, pieces: int, spec: Any) -> Logs: ...

    def predict(self, data: Data, pieces: int, spec: Any) -> Any: ...

    def loss(self, data: Data, pieces: int) -> float:
        """The loss of a batch as in evaluation. Writes nothing."""

    def wait_for_pending(self, everything: bool) -> Sequence[PendingStep]:
        """Waits for steps whose outcome was believed, all of them or all but the newest.

        Returns:
            Those that failed after all, in order, once everything they wrote is put back.
        """

    def probe(self, data: Data, samples: int, phase: Phase) -> None:
        """Runs the first samples and throws the outcome away. Writes nothing."""

    def equal_pieces_only(self) -> bool:
        """Whether each piece size is compiled by itself, so that few sizes should be used."""

    def caveats(self) -> tuple[str, ...]:
        """What is known of this model without a look at data: what a split batch does not compute as a whole one."""

    def prove(self, data: Data, samples: int, cut: bool) -> Exactness:
        """Runs some samples whole and in pieces (`cut`), with what is recomputed now, and compares all that is written.

        Nothing is written, and what was learnt on the way is kept in `learnt`.
        """

    def look(self, data: Data, pieces: int, again: bool = False, room: int | None = None) -> Exactness | None:
        """Compares what pieces of this very batch give with what smaller ones give; `None` if nothing differs.

        Asked `again` for a later batch, it looks only where what was found out of the model depends on the data. Larger
        pieces are looked at, too, where there is `room` for them.
        """

    def look_at_predictions(self, data: Data) -> Exactness | None:
        """Compares what a few samples are predicted to be together and apart; `None` if nothing differs."""

    def notes(self) -> tuple[str, ...]:
        """What is worth knowing about a split batch though it is exact, in words."""

    def resident(self) -> dict[str, int]:
        """Bytes that are on the device whatever the batch: weights, optimizer, gradients."""


class PendingStep(Protocol):
    """A step that was believed before it was done."""

    batch: tuple[Phase, Data, Any]

    def repeated_with(self, logs: Logs | None) -> None:
        """Its batch has been run again, or cannot be: whoever was given its logs reads these, or not a number."""


# Runs one logical batch: (phase, data, spec) -> what Keras expects back.
RunBatch = Callable[[Phase, Data, Any], Any]


@dataclasses.dataclass(frozen=True)
class Traits:
    """How training on one framework differs from training on the others.

    Attributes:
        uncompiled_mode: What a step is that is neither compiled nor run eagerly on request: `"graph"` or `"eager"`.
        compiles_by_default: Whether Keras compiles steps wherever the model runs, so that a model that asks for none
            of it was probably saved elsewhere.
        compiles_on_gpu_only: Whether Keras asks for no compilation on a machine without a GPU.
        offers_xla: Whether a step that is not compiled with XLA can be.
        compiles_each_size: Whether a compiled step takes pieces of one size only.
        measures_peaks: Whether it tells how much memory a step took at most.
        traces_are_exact: Whether the trace of an uncompiled step shows each allocation that the step makes.
        prefetches_batch: Whether Keras puts the next batch on the GPU while this one is trained on.
        pieces_wait_on_host: Whether a batch that is cut stays on the host but for the piece at hand.
        gradients_add_in_place: Whether the gradients of a piece are added to those before as they are made.
        update_waits: Whether a guarded step updates weights once it has all gradients, where Keras's own begins before.
        sparse_gradients: Whether gradients of embeddings are the rows that were looked up, not whole tables.
        holds_results: Whether the results of a compiled step have their place from its beginning, and gradients of a
            piece are added to the sum one by one.
        search_share: One part in so many of the memory is left to the search for kernels that an uncompiled step on a
            GPU makes when a shape is first run; 0 where it makes none.
        updates_at_once: Whether an update computes the new values of all weights together.
    """

    uncompiled_mode: Literal["graph", "eager"] = "eager"
    compiles_by_default: bool = False
    compiles_on_gpu_only: bool = False
    offers_xla: bool = False
    compiles_each_size: bool = True
    measures_peaks: bool = True
    traces_are_exact: bool = False
    prefetches_batch: bool = False
    pieces_wait_on_host: bool = False
    gradients_add_in_place: bool = False
    update_waits: bool = False
    sparse_gradients: bool = False
    holds_results: bool = False
    search_share: int = 0
    updates_at_once: bool = False


class Backend(Protocol):
    """One framework."""

    name: str
    traits: Traits

    def versions(self) -> dict[str, str]: ...

    def memory(self) -> DeviceMemory: ...

    def check_model(self, model: Any) -> None:
        """Raises UnsupportedModelError for a model whose training cannot be taken over."""

    def step(self, model: Any) -> Step: ...

    def segments(self, model: Any) -> tuple[str, ...]:
        """Labels of the calls that can be recomputed, in order; none for a model with code of its own."""

    def recomputing(self, model: Any, segments: Sequence[str]) -> AbstractContextManager[None]:
        """While it lasts, the model computes the segments again wherever it is differentiated. For plain steps."""

    def install(self, model: Any, run: RunBatch, settle: Callable[[], None]) -> Sequence[str]:
        """Puts `run` where Keras looks for its train, test and predict functions; returns the phases it took.

        `settle` is to be called before anybody else reads the model's values.
        """

    def reading(self) -> AbstractContextManager[None]:
        """Around `fit`, `evaluate` and `predict`: an error while Keras reads a batch says that it is none of a step."""

    def uninstall(self, model: Any) -> None: ...

    def batch_size_of(self, x: Any) -> int | None:
        """The batch size `fit` will use for this data when none is given, or `None` when it is not known yet."""

    def samples_in(self, data: Any) -> int: ...

    def as_batch(self, x: Any, y: Any, sample_weight: Any) -> Data: ...

    def part_of(self, data: Data, start: int, stop: int) -> Data: ...

    def nothing_written(self, model: Any) -> AbstractContextManager[Any]:
        """A scope in which the model can be called and no variable changes."""

    def inside_graph(self) -> bool:
        """Whether this code is being traced, so that errors cannot be caught when they happen."""

    # What `gradients` can be by, beside Keras's variables.
    own_variables: tuple[type, ...]

    def gradients(
        self, loss_fn: Callable[..., Any], variables: Sequence[Any], data: Any, micro: int | None, has_aux: bool
    ) -> Any:
        """(loss, gradients) of the whole batch, with at most `micro` samples at a time.

        With `has_aux` the loss function returns (loss, auxiliary outputs), and such a pair stands for the loss here.
        """

    def batch_on_device(self, model: Any, workload: Workload) -> float:
        """The part of a batch that is on the device, for all samples, while its pieces run."""
