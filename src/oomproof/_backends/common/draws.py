"""Which random numbers of a batch belong to which of its samples.

A piece of a batch is to draw the numbers that the whole batch would have drawn for its samples. Shapes alone do not
say which those are: noise of shape (4, 8) may be a row for each of four samples or the same for all of them. So it is
learnt, from the shapes of all draws when the model is called on two different numbers of samples, and kept in a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from oomproof._backends.common.model import layers, seed_variables
from oomproof._compat.keras import global_state

Shape = tuple[int | None, ...]

# Rows per sample of what is drawn once for all samples.
SHARED = 0
# Keys of generators that are no part of the model.
_GLOBAL, _OTHER = "global", "other"


class Draw(NamedTuple):
    """One call of a random function.

    Attributes:
        generator: Whose numbers: the position of its state among `seed_variables`, or the seed.
        function: Name of the random function.
        shape: What was drawn, `None` for dimensions that are not known.
    """

    generator: str
    function: str
    shape: Shape


@dataclasses.dataclass
class DrawTable:
    """How many rows each draw of a model has for a sample.

    Attributes:
        draws: By generator, every draw of it as (function, shape, rows per sample): `SHARED` for what does not depend
            on the samples, `None` for what depends on them in another way.
        learnt: For which phases it is known, training or not.
        random: In which of them anything is drawn.
    """

    draws: dict[str, list[tuple[str, Shape, int | None]]] = dataclasses.field(default_factory=dict)
    learnt: set[bool] = dataclasses.field(default_factory=set)
    random: set[bool] = dataclasses.field(default_factory=set)

    def rows_per_sample(self, draw: Draw) -> int | None:
        """`None` where it is not known. Sequences may be longer or shorter than when it was learnt."""
        function, shape = draw.function, draw.shape
        like = [d for d in self.draws.get(draw.generator, ()) if d[0] == function and len(d[1]) == len(shape)]
        if len({rows for *_, rows in like}) > 1:
            like = [d for d in like if d[1][1:] == shape[1:]]
        found = {rows for *_, rows in like}
        return found.pop() if len(found) == 1 else None

    def is_shared(self, generator: str) -> bool:
        """Whether a generator draws nothing but what is the same for all samples."""
        return {rows for *_, rows in self.draws.get(generator, ())} == {SHARED}

    def add(self, other: DrawTable) -> None:
        for generator, draws in other.draws.items():
            known = self.draws.setdefault(generator, [])
            known += [draw for draw in draws if draw not in known]
        self.learnt |= other.learnt
        self.random |= other.random

    def to_dict(self) -> dict[str, Any]:
        draws = {generator: [list(draw) for draw in draws] for generator, draws in self.draws.items()}
        return {"draws": draws, "learnt": sorted(self.learnt), "random": sorted(self.random)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> DrawTable:
        draws = {
            generator: [(function, tuple(shape), rows) for function, shape, rows in draws]
            for generator, draws in stored["draws"].items()
        }
        return cls(draws, set(stored["learnt"]), set(stored["random"]))


def table_of(first: Sequence[Draw], n1: int, second: Sequence[Draw], n2: int, training: bool = True) -> DrawTable:
    """The table of a model that drew `first` for `n1` samples and `second` for another number `n2` of them."""
    if n1 == n2:
        raise ValueError(f"Expected two different numbers of samples. Received: n1={n1}, n2={n2}")
    few, more = _by_function(first), _by_function(second)
    table = DrawTable(learnt={training}, random={training} if first or second else set())
    for generator, function in dict.fromkeys([*few, *more]):
        shapes = few.get((generator, function), []), more.get((generator, function), [])
        known = table.draws.setdefault(generator, [])
        if len(shapes[0]) != len(shapes[1]):
            # How often it draws depends on the batch.
            known += [(function, shape, None) for shape in dict.fromkeys([*shapes[0], *shapes[1]])]
            continue
        for a, b in zip(*shapes, strict=True):
            draw = (function, b, _rows_per_sample(a, n1, b, n2))
            known += [] if draw in known else [draw]
    return table


def _by_function(draws: Sequence[Draw]) -> dict[tuple[str, str], list[Shape]]:
    found: dict[tuple[str, str], list[Shape]] = {}
    for generator, function, shape in draws:
        found.setdefault((generator, function), []).append(shape)
    return found


def _rows_per_sample(a: Shape, n1: int, b: Shape, n2: int) -> int | None:
    if a == b and None not in a[:1]:
        return SHARED
    if len(a) != len(b) or not a or a[1:] != b[1:] or a[0] is None or b[0] is None:
        return None
    rows, rest = divmod(a[0], n1)
    return rows if not rest and rows and b[0] == rows * n2 else None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Samples of a batch: those from `start` on, or any, in any order.

    Attributes:
        start: The first sample.
        size: Number of samples.
        batch_size: Samples in the whole batch.
        samples: Which samples, in the place of `start`. Only where the numbers of the whole batch are drawn.
    """

    start: Any
    size: Any
    batch_size: Any
    samples: Any = None

    @classmethod
    def of(cls, samples: Any, batch_size: int) -> Rows:
        """The samples with these indices."""
        return cls(0, len(samples), batch_size, samples)

    @property
    def is_batch(self) -> bool:
        """Whether it is known to be the whole batch, as it comes."""
        if self.samples is not None or not isinstance(self.start, int) or self.start != 0:
            return False
        known = isinstance(self.size, int) and isinstance(self.batch_size, int)
        # While a graph is traced sizes are tensors, of which there is one for each size.
        return self.size is self.batch_size or (known and self.size == self.batch_size)


class Generators:
    """Names for a model's random generators that mean the same in the next process."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._keys: dict[int, str] | None = None

    def key(self, seed: Any) -> str:
        """The generator of a draw, by the seed that the random function is given."""
        shared = global_state.get_global_attribute("global_seed_generator")
        if seed is None or (seed is shared):
            return _GLOBAL
        if isinstance(seed, int):
            return f"seed {seed}"
        if not isinstance(seed, keras.random.SeedGenerator):
            return _OTHER
        if self._keys is None:
            self._keys = {id(state): str(index) for index, state in enumerate(seed_variables(self._model))}
        return self._keys.get(id(seed.state), _OTHER)

    def names(self) -> dict[str, str]:
        """The layer that draws from each of the model's generators."""
        return {
            self.key(generator): layer.path or layer.name
            for layer in layers(self._model)
            for generator in getattr(layer, "_seed_generators", ())
        }


def name_of(generator: str, names: Mapping[str, str]) -> str:
    if generator in names:
        return names[generator]
    if generator == _GLOBAL:
        return "layers that draw from Keras's global generator"
    return "layers that draw from a generator of their own" if generator == _OTHER else f"draws with {generator}"
