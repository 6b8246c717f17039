"""How pieces draw: Keras's random functions stand aside for others while a piece of a batch is computed.

Every piece starts from the seeds that the batch started with. What has a row for each sample is drawn for the rows of
the piece alone; what all samples share is drawn as it is. What can be done neither way is drawn from another seed in
each piece, or all of them would draw the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from keras import ops

from oomproof._backends.common.draws import SHARED, Draw, DrawTable, Generators, Rows, Shape, name_of
from oomproof._compat.keras import Carried
from oomproof._compat.patches import Patch, Together

Function = Callable[..., Any]

FUNCTIONS = (
    "normal", "uniform", "truncated_normal", "randint", "dropout",
    "categorical", "gamma", "beta", "binomial", "shuffle",
)  # fmt: skip
_current = Carried("oomproof_drawing")


class RandomFunctions(Protocol):
    """Keras's random functions on one framework.

    Attributes:
        module: Where Keras has them.
        seed_function: The function in there that turns what it is given for a seed into numbers.
        by_rows: Those that can give some rows of a whole batch without making the others.
        replaced: Those that have to be replaced so that pieces draw as they should.
    """

    module: Any
    seed_function: str

    @property
    def by_rows(self) -> frozenset[str]: ...

    @property
    def replaced(self) -> tuple[str, ...]: ...

    def shape(self, shape: Any) -> Shape:
        """A shape as far as it is known."""

    def rows(self, function: str, plain: Function, arguments: dict[str, Any], first: Any, total: Any) -> Any:
        """What the function would give for all `total` rows from row `first` on, as many rows as are asked for."""

    def apart(self, seed: Any, start: Any) -> Any:
        """Another seed for each start of a piece, and the same one for 0."""


class Plain:
    """Draws as Keras does."""

    def draw(self, function: str, plain: Function, arguments: dict[str, Any]) -> Any:
        with drawing_by(Plain()):
            return plain(**arguments)

    def seed(self, seed: Any, drawn: Any) -> Any:
        return drawn


class WithSeed(Plain):
    """Draws as Keras does, from another seed.

    Args:
        change: Makes it from the one that was drawn.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change

    def draw(self, function: str, plain: Function, arguments: dict[str, Any]) -> Any:
        return plain(**arguments)  # What a random function calls is a part of it.

    def seed(self, seed: Any, drawn: Any) -> Any:
        return self._change(drawn)


class _Known(Plain):
    """Knows what is drawn."""

    def __init__(self, functions: RandomFunctions, generators: Generators) -> None:
        self._functions = functions
        self._generators = generators

    def _known(self, function: str, arguments: Mapping[str, Any]) -> Draw | None:
        """What is about to be drawn, or `None` for nothing."""
        shape = self._shape(function, arguments)
        generator = self._generators.key(arguments["seed"])
        return None if shape is None else Draw(generator, function, self._functions.shape(shape))

    def _shape(self, function: str, arguments: Mapping[str, Any]) -> Any:
        if function == "dropout":
            return noise_shape(arguments) if arguments["rate"] not in (0, 1) else None
        if function == "categorical":
            return (*arguments["logits"].shape[:-1], arguments["num_samples"])
        return arguments["x"].shape if function == "shuffle" else arguments["shape"]


class _Recorded(_Known):
    def __init__(self, functions: RandomFunctions, generators: Generators) -> None:
        super().__init__(functions, generators)
        self.draws: list[Draw] = []

    def draw(self, function: str, plain: Function, arguments: dict[str, Any]) -> Any:
        known = self._known(function, arguments)
        self.draws += [] if known is None else [known]
        return super().draw(function, plain, arguments)


class _InPieces(_Known):
    """Draws the numbers of a piece."""

    def __init__(
        self, functions: RandomFunctions, generators: Generators, table: DrawTable, rows: Rows, others: set[str]
    ) -> None:
        super().__init__(functions, generators)
        self._table = table
        self._others = others
        self.rows = rows

    def draw(self, function: str, plain: Function, arguments: dict[str, Any]) -> Any:
        known = self._known(function, arguments)
        per_sample = SHARED if known is None else self._table.rows_per_sample(known)
        if known is None or per_sample == SHARED:
            return super().draw(function, plain, arguments)
        if per_sample is None or not self._fits(known.shape[0], per_sample):
            self._others.add(known.generator)
            return self._unknown(plain, arguments)
        return self._of_samples(function, plain, arguments, per_sample)

    def _fits(self, found: int | None, per_sample: int) -> bool:
        size = self.rows.size
        return found is None or not isinstance(size, int) or found == per_sample * size

    def _of_samples(self, function: str, plain: Function, arguments: dict[str, Any], per_sample: int) -> Any:
        if function not in self._functions.by_rows:
            return self._unknown(plain, arguments)
        with drawing_by(Plain()):
            first, total = self.rows.start * per_sample, self.rows.batch_size * per_sample
            return self._functions.rows(function, plain, arguments, first, total)

    def _unknown(self, plain: Function, arguments: dict[str, Any]) -> Any:
        with drawing_by(WithSeed(self._apart)):
            return plain(**arguments)

    def _apart(self, drawn: Any) -> Any:
        return self._functions.apart(drawn, self.rows.start)

    def seed(self, seed: Any, drawn: Any) -> Any:
        # Asked for by a function that is not replaced: it can be told apart by its generator alone.
        return drawn if self._table.is_shared(self._generators.key(seed)) else self._apart(drawn)


class _OfWhole(_InPieces):
    """Draws the numbers of the whole batch and takes some rows: any, and on any framework. For small batches."""

    def _of_samples(self, function: str, plain: Function, arguments: dict[str, Any], per_sample: int) -> Any:
        if function == "shuffle":
            return self._unknown(plain, arguments)
        index, total = self._index(per_sample), per_sample * self.rows.batch_size
        shape = tuple(self._shape(function, arguments))
        whole = {name: _spread(value, index, total, len(shape)) for name, value in arguments.items()}
        if "shape" in whole:
            whole["shape"] = (total, *shape[1:])
        if whole.get("noise_shape") is not None:
            whole["noise_shape"] = (total, *shape[1:])
        return ops.take(super(_InPieces, self).draw(function, plain, whole), index, axis=0)

    def _index(self, per_sample: int) -> Any:
        rows = self.rows
        samples = ops.arange(rows.size, dtype="int32") + rows.start if rows.samples is None else rows.samples
        samples = ops.cast(ops.convert_to_tensor(samples), "int32")
        return ops.reshape(samples[:, None] * per_sample + ops.arange(per_sample, dtype="int32"), (-1,))

    def _unknown(self, plain: Function, arguments: dict[str, Any]) -> Any:
        with drawing_by(Plain()):
            return plain(**arguments)


def noise_shape(arguments: Mapping[str, Any]) -> Any:
    """The shape of what a dropout draws."""
    inputs, given = arguments["inputs"], arguments["noise_shape"]
    found = ops.shape(inputs)
    if given is None:
        return found
    return [size if size is not None else found[axis] for axis, size in enumerate(given)]


def _spread(value: Any, index: Any, total: int, rank: int) -> Any:
    """A tensor with a row for each row of the piece, as one for the whole batch; anything else as it is."""
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) < 1 or len(shape) < rank or shape[0] != index.shape[0]:
        return value
    whole = ops.ones((total, *shape[1:]), dtype=value.dtype)
    return ops.scatter_update(whole, index[:, None], value)


@contextlib.contextmanager
def drawing_by(drawing: Plain) -> Iterator[None]:
    """Who draws in this thread, where Keras's functions have been replaced."""
    before = _current.value
    _current.value = drawing
    try:
        yield
    finally:
        _current.value = before


@functools.cache
def _patch(module: Any, name: str, seeds: bool) -> Patch:
    return Patch(module, name, _seeding if seeds else _dispatching)


@functools.cache
def _asking(module: Any, names: tuple[str, ...], seed_function: str) -> Together:
    """Functions of a module that ask who draws in their thread."""
    return Together(*(_patch(module, name, False) for name in names), _patch(module, seed_function, True))


# Made once for each function: programs are compiled for the functions they call.
@functools.cache
def _dispatching(plain: Function) -> Function:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        drawing = _current.value
        if drawing is None:
            return plain(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return drawing.draw(plain.__name__, plain, dict(bound.arguments))

    return drawn


@functools.cache
def _seeding(plain: Function) -> Function:
    @functools.wraps(plain)
    def drawn(seed: Any) -> Any:
        drawing = _current.value
        return plain(seed) if drawing is None else drawing.seed(seed, plain(seed))

    return drawn


class RandomNumbers:
    """What an engine knows of the random numbers that its model draws.

    Args:
        model: The model.
        functions: Keras's random functions on its framework.

    Attributes:
        draws: How many rows the draws have for each sample. Empty until it is learnt.
        draws_whole: Whether pieces draw the numbers of the whole batch to take their rows. For small batches.
    """

    def __init__(self, model: Any, functions: RandomFunctions) -> None:
        self.draws = DrawTable()
        self.draws_whole = False
        self._random = functions
        self._generators = Generators(model)
        self._others: set[str] = set()

    @contextlib.contextmanager
    def drawing(self, rows: Rows, whole: bool | None = None) -> Iterator[None]:
        """While it lasts, the model draws in this thread what the whole batch would have drawn for these samples.

        Args:
            rows: The samples.
            whole: Draw the numbers of the whole batch and take theirs; if not given, as `draws_whole` says.
        """
        outer = _current.value
        if isinstance(outer, _OfWhole) and outer.rows.samples is not None and rows.samples is None:
            # Pieces of a batch in another order.
            rows = Rows.of(outer.rows.samples[rows.start : rows.start + rows.size], rows.batch_size)
        whole = rows.samples is not None or (self.draws_whole if whole is None else whole)
        if rows.is_batch or (self.draws.learnt and not self.draws.draws):
            yield
            return
        kind = _OfWhole if whole else _InPieces
        drawing = kind(self._random, self._generators, self.draws, rows, self._others)
        names = FUNCTIONS if whole else self._random.replaced
        with _asking(self._random.module, names, self._random.seed_function), drawing_by(drawing):
            yield

    @contextlib.contextmanager
    def recorded_draws(self) -> Iterator[list[Draw]]:
        """Collects everything that is drawn in this thread, in order."""
        recorded = _Recorded(self._random, self._generators)
        with _asking(self._random.module, FUNCTIONS, self._random.seed_function), drawing_by(recorded):
            yield recorded.draws

    def other_numbers(self) -> tuple[str, ...]:
        """Layers whose pieces draw other numbers than the whole batch; every random layer until that is known."""
        names = self._generators.names()
        if not self.draws.learnt:
            return tuple(dict.fromkeys(names.values()))
        able = self._random.by_rows
        found = {
            generator: None
            for generator, draws in self.draws.draws.items()
            if any(rows is None or (rows != SHARED and function not in able) for function, _, rows in draws)
        }
        return tuple(dict.fromkeys(name_of(generator, names) for generator in [*found, *sorted(self._others)]))
