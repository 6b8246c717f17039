"""Python's collector of cycles, at the moments at which it would run in a step that nobody traces.

Keras leaves cycles behind that hold tensors. They are freed when Python has made so and so many objects, and tracing
makes more of them than training does. So the collector is switched off and run as often as it runs in training.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from oomproof._simulators.collector import collector_off

# Objects that Keras leaves behind per op it calls: 6 to 8 in convolutional nets and transformers, with Keras 3.15.
_OBJECTS_PER_OP = 7


@contextlib.contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Switches the collector off, from a clean start."""
    gc.collect()
    with collector_off():
        yield


class Garbage:
    """Runs the collector after so many ops that Keras calls. Autograd makes no Python objects."""

    def __init__(self) -> None:
        self._objects = 0

    def op(self) -> None:
        self._objects += _OBJECTS_PER_OP
        if self._objects > gc.get_threshold()[0] > 0:
            self.collect()

    def collect(self) -> None:
        self._objects = 0
        gc.collect(1)
