"""State that Keras variables do not hold: torch's random generators, and the buffers of torch modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from oomproof._backends.common.model import layers
from oomproof._compat.torch import get_device, mps_generator


class OutsideState:
    """Puts such state back when a step fails, and lets it advance once a batch however many pieces that has.

    Keras's random layers draw from seeds of their own; the generators matter to torch's layers, and to code of
    the user's. Buffers are what torch.nn.BatchNorm, for one, keeps its statistics in: it writes them in place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules: list[Any] | None = None
        self._generators: list[Any] = []
        self._numbers: list[Any] = []
        self._old: list[Any] = []
        self._passed = False

    def modules(self) -> list[Any]:
        """torch modules in the model that have buffers."""
        if self._modules is None:
            found = {id(module): module for layer in layers(self._model) for module in layer.modules()}
            self._modules = [module for module in found.values() if module._buffers]
        return self._modules

    def _buffers(self) -> list[Any]:
        return [buffer for module in self.modules() for buffer in module._buffers.values() if buffer is not None]

    @contextlib.contextmanager
    def unchanged_on_failure(self, keep: bool = True) -> Iterator[None]:
        """Around one step. Puts everything back if it fails, and without `keep` in any case."""
        self._generators = generators()
        self._numbers = [generator.get_state() for generator in self._generators]
        self._old = [buffer.clone() for buffer in self._buffers()]
        self._passed = False
        kept = False
        try:
            yield
            kept = keep
        finally:
            if not kept:
                self._put_back()
            self._old = []

    def _put_back(self) -> None:
        self._draw_again_from(self._numbers)
        self._reset_buffers()

    def draw_again(self) -> None:
        """Lets torch's generators draw the numbers that the step began with."""
        self._draw_again_from(self._numbers)

    def _draw_again_from(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _reset_buffers(self) -> None:
        with torch.no_grad():
            for buffer, old in zip(self._buffers(), self._old, strict=True):
                buffer.copy_(old)

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[Averages]:
        """Around a loop over all pieces. A second pass over them draws the same numbers as the first one."""
        ahead = [generator.get_state() for generator in self._generators] if self._passed else None
        self._draw_again_from(self._numbers)
        averages = Averages(self._buffers(), self._old)
        yield averages
        averages.write()
        if ahead is not None:
            self._draw_again_from(ahead)
        self._passed = True


class Averages:
    """Buffers averaged over pieces: exact for running means, and for what does not depend on data."""

    def __init__(self, buffers: list[Any], old: list[Any]) -> None:
        self._buffers = buffers
        self._old = old
        self._sums: list[Any] = []

    @contextlib.contextmanager
    def piece(self, share: float) -> Iterator[None]:
        for buffer, old in zip(self._buffers, self._old, strict=True):
            buffer.copy_(old)
        yield
        parts = [(b if b.is_floating_point() else b.double()) * share for b in self._buffers]
        self._sums = [a + b for a, b in zip(self._sums, parts, strict=True)] if self._sums else parts

    def write(self) -> None:
        for buffer, mean in zip(self._buffers, self._sums, strict=True):
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())


def generators() -> list[Any]:
    """The generators that unseeded numbers come from: the CPU's, and that of the device."""
    device = torch.device(get_device())
    if device.type in ("cuda", "xpu"):
        runtime = getattr(torch, device.type)
        index = runtime.current_device() if device.index is None else device.index
        return [torch.default_generator, runtime.default_generators[index]]
    if device.type == "mps":
        return [torch.default_generator, mps_generator()]
    return [torch.default_generator]
