"""Compiled programs, what memory they need, and whether that is there."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from oomproof._backends.jax.device import JaxMemory, NotEnoughMemoryError, Room
from oomproof._backends.jax.host_batches import is_on_host

# On CPUs XLA takes out what keeps it from merging a computation with the one that repeats it in the backward pass.
_BARRIERS_STAY: dict[str, Any] = {"xla_disable_hlo_passes": "cse_barrier_expander"}
# Where anything comes from the host while a program runs, XLA schedules all of it for speed: it then took 20 to 35 %
# more memory (compiled for an H200). A piece has to be there before its work begins, so nothing is lost.
_SCHEDULED_FOR_MEMORY: dict[str, Any] = {"xla_disable_hlo_passes": "latency-hiding-scheduler"}
# Percent of what it knows of that XLA takes if it is not told.
_AS_IT_COMES = 95
_STEP = 5


class EscapedTensorError(Exception):
    """A function uses a tensor of a loop that is over. JAX would take it for one more argument."""


class Program:
    """A function compiled for arguments of one signature; run as it is where Keras would not compile it.

    Args:
        function: What to compile. May be set later, before `compile`.
        variables: Those whose values it takes first, in this order, whatever order the model has them in by now.
        eager: Do not compile it.
        donate: Arguments that are given away.
        gradients: For a program that also runs the optimizer: bytes of the gradients, which it need not hand out.
        repeats: Whether it computes parts of the forward pass again in the backward pass.

    Attributes:
        written: Variables whose new values the function returns, in that order; known once it is traced.
        temporary: Bytes it needs while it runs, beyond arguments and results.
        proven: Whether it is known to have gone through.
        roomy: Whether there was room for one more set of its results, so that it need not be waited for.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        eager: bool,
        variables: Sequence[Any] = (),
        donate: tuple[int, ...] = (),
        gradients: int | None = None,
        repeats: bool = False,
    ) -> None:
        self.function = function
        self._variables = list(variables)
        self.written: list[Any] = []
        self.temporary = 0
        self.proven = False
        self.roomy = True
        self._eager = eager
        self._donate = donate
        self._repeats = repeats
        self.commits = gradients is not None
        self._gradients = gradients or 0
        self._results = 0
        self._compiled: Any = None

    def compile(self, *arguments: Any, room: Room | None = None) -> None:
        assert self.function is not None
        if self._eager:
            return
        on_cpu = jax.default_backend() == "cpu"
        traced = jax.jit(self.function, donate_argnums=self._donate).trace(*arguments)
        if len(traced.jaxpr.in_avals) > len(jax.tree.leaves(arguments)):
            raise EscapedTensorError
        lowered = traced.lower()
        options = _BARRIERS_STAY if self._repeats and on_cpu else {}
        if room is not None:
            options = scheduled_for(arguments) | limited_to(room, arguments, lowered.out_info)
        self._compiled = lowered.compile(compiler_options=options or None)
        analysis = self._compiled.memory_analysis()
        if analysis is not None:
            self.temporary = int(analysis.temp_size_in_bytes)
            self._results = int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)

    def values(self) -> list[Any]:
        """What its variables hold now."""
        return [variable._value for variable in self._variables]

    def needs(self, data: Any = ()) -> int:
        """Bytes it takes beyond what is on the device already. Data on the host has to be put there."""
        host = [leaf for leaf in jax.tree.leaves(data) if not isinstance(leaf, jax.Array)]
        return self.temporary + self._results + sum(getattr(leaf, "nbytes", 0) for leaf in host)

    def check_room(self, memory: JaxMemory, budget: int | None, data: Any, where: str = "step") -> None:
        """Raises rather than let a program run that cannot go through."""
        needed = self.needs(data)
        free = None if self._eager else memory.free(budget, wanted=needed)
        if free is None:
            return
        if needed > free:
            # With its results in the place of its arguments it might go through.
            lean = self.commits and needed - self._results + self._gradients <= free
            raise NotEnoughMemoryError(needed, free, "commit" if lean else where)
        block = memory.largest_block()
        if block is not None and self.temporary > block:
            # It works in one block: what is free in several is of no use to it.
            raise NotEnoughMemoryError(needed, block, where)
        self.roomy = needed + self._results <= free
        memory.ran(needed, memory.current())

    @contextlib.contextmanager
    def telling_its_needs(self, data: Any) -> Iterator[None]:
        """What is raised inside says how much the program needs: the allocator names one block of it."""
        try:
            yield
        except Exception as error:
            if not self._eager:
                error.needed = self.needs(data)  # type: ignore[attr-defined]
            raise

    def __call__(self, *arguments: Any) -> Any:
        assert self.function is not None
        return self.function(*arguments) if self._eager else self._compiled(*arguments)


def scheduled_for(arguments: Any) -> dict[str, Any]:
    """Options for how XLA orders a program on a GPU."""
    pieces = any(isinstance(leaf, jax.Array) and is_on_host(leaf) for leaf in jax.tree.leaves(arguments))
    return _SCHEDULED_FOR_MEMORY if pieces else {}


def limited_to(room: Room, arguments: Any, results: Any) -> dict[str, int]:
    """Options that tell XLA how much a program may take, so that it recomputes what there is no room for.

    By itself it counts with nearly all that JAX may ever take, less arguments and results. It knows nothing of a budget
    and of what else is there.
    """
    given = [leaf for leaf in jax.tree.leaves(arguments) if not (isinstance(leaf, jax.Array) and is_on_host(leaf))]
    coming = sum(leaf.nbytes for leaf in given if not isinstance(leaf, jax.Array))
    made = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(results))
    known, wanted = room.all - sum(leaf.nbytes for leaf in given) - made, room.free - coming - made
    # In steps, so that a second run, with a few bytes more or less in use, finds the program of the first on disk.
    percent = 100 * wanted // known // _STEP * _STEP if known > 0 else 0
    return {"xla_gpu_memory_limit_slop_factor": percent} if 0 < percent < _AS_IT_COMES else {}


def signature(data: Any) -> Any:
    """What decides which program fits the data."""
    leaves, structure = jax.tree.flatten(data)
    return structure, tuple((leaf.shape, str(leaf.dtype), getattr(leaf, "sharding", None)) for leaf in leaves)
