"""guard, unguard and fit: Keras training that survives running out of memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from oomproof import _backends as backends
from oomproof._backends.pieces import checked_size
from oomproof._planning.levers import allowed
from oomproof._planning.planner import Planner
from oomproof._records.plan import Plan
from oomproof._records.units import parse_budget
from oomproof._training.guarded_model import GuardedModel, guard_of
from oomproof._training.proof_cache import ProofCache
from oomproof._training.settings import Settings


def guard(
    model: Any,
    *,
    budget: int | str | None = None,
    micro_batch_size: int | str = "auto",
    plan: Plan | None = None,
    allow: str | Iterable[str] = "default",
    verbose: int | str = "auto",
) -> Any:
    """Lets a Keras model train, evaluate and predict without running out of memory.

    A batch that does not fit runs again in smaller pieces, with the same result up to rounding. Batch size, callbacks,
    `History` and everything else stay as they are in Keras. `unguard` undoes it.

    Args:
        model: A Keras model. It may be unbuilt and uncompiled.
        budget: The most memory to use: bytes, `"8GiB"` or `"90%"`. `None` uses what the device has.
        micro_batch_size: The most samples to run at a time. `"auto"` finds out.
        plan: A plan to follow instead of making one: from `oomproof.plan`, or from an earlier run
            (`history.run.plan`).
        allow: What may be done so that a batch fits. `"default"` cuts batches, recomputes parts of the model and runs
            its head in parts; `"exact"` does so only where the result stays the same (it refuses to cut batches of a
            model with BatchNormalization). A set names each: `"microbatch"`, `"recompute"`, `"head"`, `"xla"`,
            `"mixed_precision"`, `"batch_statistics"`.
        verbose: `0` logs nothing, `1` and `2` log what changes, `"auto"` follows the `verbose` of `fit`.

    Returns:
        The same model.

    Raises:
        BackendError: If the device cannot keep to the budget, as its memory cannot be measured.
        UnsupportedModelError: If the model has its own `train_step`, or belongs to a tf.distribute strategy.
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.

    Example:

    ```python
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    oomproof.guard(model)
    history = model.fit(x, y, batch_size=1024)
    print(history.run)
    ```
    """
    backend = backends.current(trains=True)
    backend.check_model(model)
    device = backend.memory().describe()
    levers, micro = allowed(allow), checked_size(micro_batch_size)
    planner = Planner(backend, model, levers, named_levers=not isinstance(allow, str), micro_batch_size=micro)
    settings = Settings(
        budget=parse_budget(budget, device.limit),
        micro_batch_size=micro,
        may_split="microbatch" in levers,
        exact_only="batch_statistics" not in levers,
        start=_checked_plan(plan),
        propose=planner.propose,
        proofs=ProofCache(backend, model),
    )
    if verbose not in ("auto", 0, 1, 2):
        raise ValueError(f'Expected `verbose` to be "auto", 0, 1 or 2. Received: verbose={verbose!r}')
    unguard(model)
    GuardedModel(backend, model, settings, planner, verbose).attach()
    return model


def unguard(model: Any) -> Any:
    """Gives a guarded model back to Keras.

    Args:
        model: A Keras model. One that is not guarded stays as it is.

    Returns:
        The same model.

    Example:

    ```python
    oomproof.guard(model)
    model.fit(x, y, batch_size=1024)
    oomproof.unguard(model)
    ```
    """
    found = guard_of(model)
    if found is not None:
        found.detach()
    return model


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    budget: int | str | None = None,
    micro_batch_size: int | str = "auto",
    plan: Plan | None = None,
    allow: str | Iterable[str] = "default",
    **fit_kwargs: Any,
) -> Any:
    """Trains a model as `model.fit` does, guarded for this one call.

    Args:
        model: A compiled Keras model.
        x: As for `model.fit`.
        y: As for `model.fit`.
        batch_size: As for `model.fit`.
        budget: As for `guard`.
        micro_batch_size: As for `guard`. At most the batch size.
        plan: As for `guard`.
        allow: As for `guard`.
        **fit_kwargs: Everything else that `model.fit` takes.

    Returns:
        The Keras `History`. Its attribute `run` is the `Run`: what happened, and the plan in force at the end.

    Raises:
        CannotFitError: If the batch cannot be trained within the budget, or only in a way that is not allowed. Nothing
            was trained by then.
        RecoveryFailedError: If not even one sample fits. The model is as it was before that batch, and can be saved.
        UnsupportedModelError: If the model has its own `train_step`, or belongs to a tf.distribute strategy.
        TypeError: If an argument is of the wrong type, or unknown to `model.fit`.
        ValueError: If an argument is out of range.

    Example:

    ```python
    history = oomproof.fit(model, x, y, batch_size=1024, epochs=5)
    print(history.run)
    ```
    """
    backends.current(trains=True).check_model(model)
    known = inspect.signature(type(model).fit).parameters
    if unknown := [name for name in fit_kwargs if name not in known]:
        raise TypeError(
            f"Expected keyword arguments of `oomproof.fit` or of `{type(model).__name__}.fit`. "
            f"Received: {', '.join(unknown)}"
        )
    already = guard_of(model)
    guard(model, budget=budget, micro_batch_size=micro_batch_size, plan=plan, allow=allow)
    try:
        return model.fit(x, y, batch_size=batch_size, **fit_kwargs)
    finally:
        unguard(model)
        if already is not None:
            already.attach()


def _checked_plan(plan: Plan | None) -> Plan | None:
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"Expected `plan` to be an oomproof.Plan. Received: plan={plan!r}")
    return plan
