"""What is attached to a guarded model: Keras's methods, wrapped, and the drivers of its batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import numbers
from collections.abc import Callable
from typing import Any

from oomproof._backends.common.callbacks import epochs_told
from oomproof._backends.common.keras_functions import FUNCTIONS
from oomproof._backends.common.model import overrides
from oomproof._backends.common.precision import compiled, trained_in
from oomproof._explain.api import explain
from oomproof._planning.planner import Planner
from oomproof._records.plan import Plan
from oomproof._records.run import Phase
from oomproof._training.call_arguments import CallArguments
from oomproof._training.driver import Driver
from oomproof._training.drivers import Drivers
from oomproof._training.helpers import optional
from oomproof._training.settings import Settings
from oomproof.data.slices import feed_in_slices
from oomproof.errors import RecoveryFailedError

_WRAPPED = ("fit", "evaluate", "predict", "compile", "quantize", "train_on_batch", "test_on_batch", "predict_on_batch")
_MAKERS: dict[str, Phase] = {f"make_{function}": phase for phase, function in FUNCTIONS.items()}
_ATTRIBUTE = "_oomproof_guard"
logger = logging.getLogger("oomproof")


def guard_of(model: Any) -> GuardedModel | None:
    """What guards the model, or `None`."""
    found: GuardedModel | None = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    return found


class GuardedModel:
    """Runs the batches of one model by drivers of its own, from `attach` to `detach`."""

    def __init__(self, backend: Any, model: Any, settings: Settings, planner: Planner, verbose: int | str) -> None:
        self._backend = backend
        self._model = model
        self._settings = settings
        self._planner = planner
        self._changes = contextlib.ExitStack()
        self._verbose = verbose
        self._drivers = Drivers(backend, model, settings)
        self._followed = False
        self._depth = 0
        self._told: set[str] = set()
        self._taken: list[str] = []
        self._own: dict[str, Any] = {}

    def attach(self) -> None:
        # Not through Keras's __setattr__, which would track what it is given as part of the model.
        object.__setattr__(self._model, _ATTRIBUTE, self)
        # A maker of the user's own is left as it is.
        self._taken = [*_WRAPPED, *(maker for maker in _MAKERS if not overrides(self._model, maker))]
        # Keras puts some methods on the instance itself, and so may the user.
        self._own = {name: vars(self._model)[name] for name in self._taken if name in vars(self._model)}
        for name in self._taken:
            object.__setattr__(self._model, name, self._wrapped(name, getattr(self._model, name)))

    def detach(self) -> None:
        self._backend.uninstall(self._model)
        if self._settings.start is not None and self._settings.start.changes_model:
            # The step was made for the model as it was changed.
            self._start_over()
        self._changes.close()
        for name in (*self._taken, _ATTRIBUTE):
            vars(self._model).pop(name, None)
        vars(self._model).update(self._own)

    def _start_over(self) -> None:
        self._drivers.forget()
        self._followed = False

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if name in _MAKERS:

            @functools.wraps(method)
            def make(force: bool = False) -> Any:
                return self._make(_MAKERS[name], method, force)

            return make

        if name in ("compile", "quantize"):

            @functools.wraps(method)
            def change(*args: Any, **kwargs: Any) -> Any:
                # Another loss or optimizer, or other weights, are another step.
                if self._depth:
                    self._drivers.settle()
                self._start_over()
                self._changes.close()
                return method(*args, **kwargs)

            return change

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, method, args, kwargs)

        return call

    def _call(self, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._depth or not (self._model.compiled or name.startswith("predict")):
            # Validation inside of fit belongs to that run; an uncompiled model gets Keras's own error.
            return method(*args, **kwargs)
        arguments = CallArguments(method, args, kwargs)
        self._check_batch_size(name, arguments)
        verbose = self._verbose if self._verbose != "auto" else arguments.get("verbose", "auto")
        if name == "fit":
            self._before_fit(arguments, silent=verbose == 0)
        self._drivers.begin(silent=verbose == 0, may_grow=not name.endswith("on_batch"))
        self._ready()
        drivers = self._drivers
        self._depth += 1
        try:
            with contextlib.ExitStack() as around:
                around.enter_context(self._backend.reading())
                if name == "fit" and arguments.may_have("callbacks"):
                    told = epochs_told(arguments.get("callbacks"), drivers.begin_epoch)
                    arguments["callbacks"] = around.enter_context(told)
                result = arguments.passed_to(method)
        except RecoveryFailedError as error:
            # Keras re-raises "from None"; the framework's own error is what the user needs to see.
            error.__cause__ = drivers.last_error
            error.history = getattr(self._model, "history", None) if name == "fit" else None
            with optional("Explaining the error"):
                error.run = drivers.record()
                error.diagnosis = explain(drivers.last_error or error, model=self._model)
            raise
        except BaseException:
            # Steps that are still on their way must not fail unseen, with the model's values in them.
            with contextlib.suppress(Exception):
                drivers.settle()
            raise
        finally:
            self._depth -= 1
        if name == "fit" and result is not None:
            result.run = drivers.record()
            if any(event.kind == "oom" and event.phase == "train" and not event.step for event in result.run.events):
                with optional("Remembering the plan"):
                    self._planner.learned(result.run.plan)
        return result

    def _before_fit(self, arguments: dict[str, Any], silent: bool) -> None:
        if self._settings.start is None and self._planner.changes_models:
            with optional("Planning"):
                self._plan_changes(arguments)
        told = None
        with optional("Feeding the data in slices"):
            told = feed_in_slices(arguments)
        if told is not None and not silent:
            logger.warning(f"oomproof: {told}")

    @property
    def _driver(self) -> Driver:
        return self._drivers.ready()

    def _ready(self) -> Driver:
        """The driver, for a model that is as the plan wants it, with our functions where Keras looks for its own."""
        self._backend.check_model(self._model)
        if not self._followed:
            self._follow(self._settings.start)
            self._followed = True
        left_out = set(FUNCTIONS) - self._install()
        for phase in sorted(left_out - self._told):
            logger.warning(f"oomproof: The model has its own {phase}_step. It runs as in Keras, unguarded.")
        self._told |= left_out
        return self._driver

    def _install(self) -> set[str]:
        """Puts our functions in place; returns the phases they are for. One that was taken away is one made anew."""
        for phase, function in FUNCTIONS.items():
            if getattr(self._model, function, None) is None:
                self._drivers.remade(phase)
        return set(self._backend.install(self._model, self._drivers.run, self._drivers.settle))

    def _make(self, phase: Phase, method: Callable[..., Any], force: bool) -> Any:
        """In the place of Keras's makers: what was traced goes, our function stays. Also in the middle of `fit`."""
        if force:
            self._drivers.remade(phase)
        if phase not in self._install() or getattr(self._model, FUNCTIONS[phase]) is None:
            # A step of the user's own, or what Keras has an error of its own for.
            return method(force=force)
        return getattr(self._model, FUNCTIONS[phase])

    def _follow(self, plan: Plan | None) -> None:
        """Changes the model as a plan says, until `unguard` or another `compile`."""
        self._changes.close()
        if plan is not None and plan.precision is not None:
            self._changes.enter_context(trained_in(self._model, plan.precision))
        if plan is not None and plan.jit_compile is not None:
            self._changes.enter_context(compiled(self._model, plan.jit_compile))

    def _plan_changes(self, arguments: dict[str, Any]) -> None:
        """Precision and compilation are the model's own, so they are decided before Keras begins."""
        plan = self._planner.propose_for(arguments, self._backend.memory(), self._settings.budget)
        if plan is not None and plan.changes_model:
            logger.warning(f"oomproof: {plan.sentence}")
            self._settings = dataclasses.replace(self._settings, start=plan)
            self._drivers.settings = self._settings
            self._start_over()

    def _check_batch_size(self, name: str, arguments: dict[str, Any]) -> None:
        if name not in ("fit", "evaluate", "predict"):
            return
        batch_size = arguments.get("batch_size")
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Integral)):
            raise TypeError(f"Expected `batch_size` to be an int. Received: batch_size={batch_size!r}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"Expected `batch_size` to be at least 1. Received: batch_size={batch_size}")
        micro = self._settings.micro_batch_size
        if name == "fit" and micro is not None:
            size = batch_size if batch_size is not None else self._backend.batch_size_of(arguments.get("x"))
            if size is not None and micro > size:
                raise ValueError(
                    f"Expected `micro_batch_size` to be at most the batch size. Received: micro_batch_size={micro}, "
                    f"batch_size={size}"
                )
