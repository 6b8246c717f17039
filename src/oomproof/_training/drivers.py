"""One driver, with its step, for each thing a model has been: nothing that is cached outlives what it depends on.

A driver knows sizes, plans and what was measured; its step has programs, and what was found out about losses. All of it
is for one fingerprint of the model. A model that was changed gets a driver of its own, and one that is changed back
finds what it had. Where Keras would go on with what it traced before the change, so does this.
"""

from __future__ import annotations

from typing import Any

from oomproof._backends.base import Backend
from oomproof._backends.common.fingerprint import Fingerprint
from oomproof._records.run import Phase, Run
from oomproof._training.driver import Driver
from oomproof._training.run_log import RunLog
from oomproof._training.settings import Settings


class Drivers:
    """Runs the batches of one guarded model, each by the driver that is for it.

    Attributes:
        current: The driver of the last batch, or for the first.
        settings: What the user asked for. Drivers that are made already keep theirs.
    """

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        self.settings = settings
        self.current: Driver | None = None
        self._backend = backend
        self._model = model
        self._made: dict[Fingerprint, Driver] = {}
        # Which driver is for what Keras would have traced: by phase, and by what decides whether it traces anew.
        self._traced: dict[tuple[Phase, Any], Driver] = {}
        self._trained: Driver | None = None
        self._log = RunLog()
        self._may_grow = False

    # A run, from the begin of fit, evaluate or predict to its end

    def begin(self, silent: bool, may_grow: bool = False) -> None:
        self._log.start(silent)
        self._may_grow = may_grow
        # What keeps no traces is what the model is now.
        self._traced = {key: driver for key, driver in self._traced.items() if key[1] is not None}
        for driver in self._all():
            driver.begin(may_grow)

    def begin_epoch(self, epoch: int) -> None:
        self._may_grow = True
        self._log.epoch = epoch
        for driver in self._all():
            driver.begin_epoch(epoch)

    def _all(self) -> list[Driver]:
        """Also one to begin with, which is filed when its first batch has run."""
        made = list(self._made.values())
        return made if self.current is None or self.current in made else [*made, self.current]

    def ready(self) -> Driver:
        """The driver of the last batch. For a model that has run none yet, one to begin with."""
        self.current = self.current or self._new()
        return self.current

    def record(self) -> Run:
        driver = self._trained or self.ready()
        return driver.record(self._backend.name, self._backend.versions())

    @property
    def last_error(self) -> Exception | None:
        return None if self.current is None else self.current.training.last_error

    # One batch

    def run(self, phase: Phase, data: Any, spec: Any = None) -> Any:
        """Runs one logical batch and returns what Keras expects."""
        driver = self._traced.get(self._key(phase, data, spec))
        known = driver is not None
        if driver is None:
            driver = self._driver_of_today(phase, data)
        elif driver is not self.current:
            self._change_to(driver)
        if phase == "train":
            self._trained = driver
        result = driver.run(phase, data, spec)
        if not known:
            # A first step may build what belongs to the model, such as metrics.
            self._file(driver)
            self._traced[self._key(phase, data, spec)] = driver
        return result

    def settle(self) -> None:
        if self.current is not None:
            self.current.settle()

    def _key(self, phase: Phase, data: Any, spec: Any) -> tuple[Phase, Any]:
        return phase, self.ready().step.trace_key(phase, data, spec)

    # The driver of a batch

    def _driver_of_today(self, phase: Phase, data: Any) -> Driver:
        """The driver for the model as it is now."""
        driver = self._made.get(Fingerprint(self._model))
        if driver is None:
            driver = self._new() if self._made else self.ready()
        self._change_to(driver)
        driver.prepare(phase, data)
        self._file(driver)
        return driver

    def _new(self) -> Driver:
        driver = Driver(self._backend.step(self._model), self._backend.memory(), self.settings, self._log)
        driver.begin(self._may_grow)
        return driver

    def _change_to(self, driver: Driver) -> None:
        if driver is not self.current:
            # Steps that are on their way are run again, should they fail, by who began them.
            self.settle()
            self.current = driver

    def _file(self, driver: Driver) -> None:
        """Keeps a driver under what the model is now, and lets go of those whose variables are no longer in it."""
        now = Fingerprint(self._model)
        if driver.step.fingerprint == now:
            return
        driver.step.fingerprint = now
        others = [(key, other) for key, other in self._made.items() if other is not driver]
        if not driver.step.traces_hold_variables:
            others = [(key, other) for key, other in others if key.things == now.things]
        self._made = {**dict(others), now: driver}
        kept = {id(other) for other in self._made.values()}
        self._traced = {key: other for key, other in self._traced.items() if id(other) in kept}

    # What Keras does

    def remade(self, phase: Phase) -> None:
        """Keras has made its function anew, so that it will trace the model as it is now."""
        self._traced = {key: driver for key, driver in self._traced.items() if key[0] != phase}

    def forget(self) -> None:
        """All of it: another loss or optimizer, or other weights."""
        self._made.clear()
        self._traced.clear()
        self.current = self._trained = None
