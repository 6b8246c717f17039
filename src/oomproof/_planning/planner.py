"""Makes the plans of one model, and remembers them on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from keras import tree

from oomproof import _simulators as simulators
from oomproof._backends.base import Backend, DeviceMemory
from oomproof._backends.common.fingerprint import Fingerprint
from oomproof._backends.common.footprint import bytes_of_outputs, bytes_of_state
from oomproof._backends.common.model import statistics_caveat, unpack
from oomproof._backends.common.precision import computed_in, policy_of
from oomproof._backends.common.rows import work_of_update
from oomproof._compat.keras import standardize_dtype
from oomproof._estimation.allocator import UNSPLIT, replay
from oomproof._estimation.bands import band_of
from oomproof._estimation.modes import mode_of
from oomproof._estimation.naming import described
from oomproof._estimation.workloads import with_next_batch
from oomproof._machine import gpus
from oomproof._planning import plan_cache, search, trial
from oomproof._planning.chain import chain_of
from oomproof._planning.options import Request
from oomproof._planning.timing import SPEED_OF_MIXED_PRECISION, SPEED_OF_XLA, host_share, piece_cost, run_cost
from oomproof._planning.ways import Way, least
from oomproof._records.patience import look_at_the_clock, patience
from oomproof._records.plan import Plan
from oomproof._records.run import Device
from oomproof._records.trace import Spec, Target, Trace, Workload
from oomproof._records.units import tensor_bytes
from oomproof.errors import CannotFitError

logger = logging.getLogger("oomproof")

# How many samples the loss is compared on before the precision is changed, and by what share it may differ.
_LOOKED_AT = 16
_SAME_LOSS = 0.05
# How much of the margin is left to a plan that is exact where a sure one is not.
_HARDLY = 1.03
# By how much more is left to a plan that no trace shows, where others are looked at. A guess.
_UNSEEN = 1.05
# By how much less than estimated a step may need at best.
_HOPEFUL = 0.7
# How much more a step takes of an allocator than its trace, where no trace of the plan is played through its rules. On
# an H200 graphs that were planned for 1.10 times their trace ran out, some in their third step.
_BROKEN_UP = 1.06
# And what it does not split off a block, but no more than this share of a small card. Of 18 plans for a quarter of what
# a step takes, 0.3 to 12 GiB, two ran out in their second step, on the smallest cards.
_MOST_UNSPLIT = 3
# Below this share of the limit, by a rough upper bound, nobody needs a plan.
_PLENTY = 0.5


class Planner:
    """Makes plans for one model.

    Args:
        backend: The framework.
        model: Built and compiled.
        levers: What may be used.
        named_levers: Whether the user named them one by one. Only then is a step compiled that was not to be.
        micro_batch_size: No piece may have more samples, or `None`.
        cache: Look up and remember plans on disk.
    """

    def __init__(
        self,
        backend: Backend,
        model: Any,
        levers: frozenset[str],
        *,
        named_levers: bool = False,
        micro_batch_size: int | None = None,
        cache: bool = True,
    ) -> None:
        self._backend = backend
        self._model = model
        self._levers = levers if named_levers else levers - {"xla"}
        self._micro = micro_batch_size
        self._cache = cache
        self._ways: tuple[tuple[Workload, Fingerprint], list[Way]] | None = None
        self._keys: dict[Plan, str] = {}
        self._first: Plan | None = None
        self._failed = False

    def make(self, workload: Workload, limit: int, caution: float = 1.0) -> Plan:
        """The plan for a step within `limit` bytes.

        Args:
            workload: The step, whole.
            limit: Bytes for the model and everything the step needs.
            caution: By how much the usual margin is raised, after a plan that was not kept.
        """
        key = plan_cache.key(self._backend, self._model, workload, limit, sorted(self._levers), self._micro, caution)
        if self._cache and (known := plan_cache.recall(key)) is not None:
            self._keys[known] = key
            return known
        asked = workload, Fingerprint(self._model)
        if self._ways is None or self._ways[0] != asked:
            self._ways = asked, list(self._all_ways(workload))
        request = Request(
            batch_size=_samples(workload),
            limit=limit,
            margin=self._margin(workload, limit) * caution,
            allowed=self._levers,
            caveats=statistics_caveat(self._model),
            micro_batch_size=self._micro,
        )
        if self._is_tried(workload) and caution >= 1:
            found = self._tried(request, workload, caution)
        else:
            found = self._fastest(request, self._ways[1])
        self._keys[found] = key
        if self._cache:
            plan_cache.remember(key, found)
        return found

    def _fastest(self, request: Request, ways: list[Way]) -> Plan:
        # What new values of weights and optimizer take beside the old ones is known, and not estimated.
        if 2 * bytes_of_state(self._model) <= request.limit:
            with contextlib.suppress(CannotFitError):
                return search.fastest(request, ways)
        # On JAX one program makes the update, in the place of what it updates.
        update = None if self._backend.traits.holds_results else work_of_update(self._model)
        lean = [dataclasses.replace(way, commit=0, update=update) for way in ways]
        return dataclasses.replace(search.fastest(request, lean), lean_commit=True)

    def _margin(self, workload: Workload, limit: int) -> float:
        if self._is_tried(workload):
            return trial.MARGIN
        mode, share = mode_of(self._backend, workload.jit, self._model), self._backend.traits.search_share
        margin = 1 + band_of("trace", self._backend.name, mode).above
        if not self._breaks_up(workload):
            return margin
        convolves = any(hasattr(layer, "kernel_size") for layer in self._model._flatten_layers())
        unsplit = limit / max(limit - min(UNSPLIT, limit // _MOST_UNSPLIT), 1) if limit > 0 else 1.0
        return margin * _BROKEN_UP * (share / (share - 1) if convolves else 1) * unsplit

    def _breaks_up(self, workload: Workload) -> bool:
        """Whether the step's allocator comes to have its memory in pieces, and no trace shows which."""
        return not workload.jit and workload.target.gpu and bool(self._backend.traits.search_share)

    def _is_tried(self, workload: Workload) -> bool:
        """Whether a trace shows what this very step allocates."""
        return self._backend.traits.traces_are_exact and workload.target.gpu and not workload.jit

    def _tried(self, request: Request, workload: Workload, caution: float) -> Plan:
        assert self._ways is not None
        ways = self._ways[1]
        headed = self._with_head(request, ways)
        request = dataclasses.replace(request, allowed=request.allowed - {"head"})
        try:
            found = self._seen(request, workload, caution)
        except CannotFitError:
            if headed is None:
                raise
            return headed
        if headed is None:
            return found
        # What is exact comes first, however long it takes.
        return min(found, headed, key=lambda plan: (bool(plan.caveats), plan.relative_time or 0.0))

    def _with_head(self, request: Request, ways: list[Way]) -> Plan | None:
        """The fastest plan with the head in parts, if that is the fastest way: no trace shows what its parts take."""
        if "head" not in request.allowed:
            return None
        try:
            found = self._fastest(dataclasses.replace(request, margin=request.margin * _UNSEEN), ways)
        except CannotFitError:
            return None
        return found if found.head is not None else None

    def _seen(self, request: Request, workload: Workload, caution: float) -> Plan:
        assert self._ways is not None
        ways = self._ways[1]
        # Weights and their optimizer are the same in all ways.
        updating = least(ways[0], request.batch_size)
        return trial.fastest_tried(
            request.margin,
            request.limit / caution,
            fastest=lambda margin: self._fastest(dataclasses.replace(request, margin=margin), ways),
            trace_of=lambda plan: self._trace_of(plan, workload),
            least_of=lambda plan: 0 if plan.lean_commit else updating,
        )

    def _trace_of(self, plan: Plan, workload: Workload) -> Trace:
        size = plan.micro_batch_size or _samples(workload)
        x, y = tree.map_structure(lambda spec: _first(spec, size), (workload.x, workload.y))
        pieces = plan.micro_batch_size is not None
        step = dataclasses.replace(workload, x=x, y=y, recompute=plan.recompute, later_piece=pieces)
        look_at_the_clock()
        with simulators.one_at_a_time(), computed_in(self._model, plan.precision):
            found = simulators.trace(self._backend, self._model, step)
        return trial.with_update_of(found, work_of_update(self._model)) if plan.lean_commit else found

    def propose(self, data: Any, device: Device, limit: int, caution: float) -> Plan | None:
        """A plan for this very batch; `None` where none is needed, none can be made, or nothing is predicted to fit.

        Estimates are far off at times, so nobody is refused on their word: what does not fit will say so. And whatever
        fails here fails for planning alone: training goes on without a plan, and measures.
        """
        if self._failed:
            return None  # What failed, or took too long, would again.
        try:
            with patience():
                return self._proposed(data, device, limit, caution)
        except CannotFitError as error:
            # After a failure, what fails next is told by the driver.
            logger.log(
                logging.WARNING if caution <= 1 else logging.DEBUG,
                f"oomproof: Predicted not to fit; trying anyway. {error}",
            )
        except Exception as error:
            self._failed = True
            logger.warning(f"oomproof: Planning failed; training without a plan ({described(error)}).")
        return None

    def _proposed(self, data: Any, device: Device, limit: int, caution: float) -> Plan | None:
        # In steps of a percent: a second run, with a few bytes more or less in use, finds the plan of the first.
        limit -= limit % (1 << max(0, limit.bit_length() - 7))
        x, y, _ = unpack(data)
        gpu = gpus.local() if not device.name.upper().startswith("CPU") else None
        target = Target(gpu is not None, gpu.capability if gpu is not None else (8, 0))
        compiled = bool(self._model.jit_compile) and not self._model.run_eagerly
        x, y = (tree.map_structure(_spec, part) for part in (x, y))
        workload = Workload(x, y, "train", compiled, target, guarded=True)
        if caution <= 1 and self._is_plenty(workload, limit):
            return None
        found = self._for_training(workload, limit, caution)
        self._first = self._first or found
        return found

    def learned(self, plan: Plan) -> None:
        """Remembers what training ended with in the place of a plan that its first step did not keep."""
        if self._cache and self._first is not None:
            plan_cache.remember(self._keys[self._first], plan)

    def _for_training(self, workload: Workload, limit: int, caution: float) -> Plan:
        """As `make`, where a plan that is not kept costs a failed step and nothing else.

        A plan that is exact if the estimate is right comes before one that surely fits and is not exact. And what does
        not fit if the estimate is right may still fit; what would not if it were far too high need not be tried.
        """
        try:
            found = self.make(workload, limit, caution)
        except CannotFitError:
            if caution > 1:
                raise  # It did fail, so the estimate was not too high.
            # What fits if the estimate is right comes before what fits if it is far too high.
            with contextlib.suppress(CannotFitError):
                return self.make(workload, limit, _HARDLY / self._margin(workload, limit))
            return self.make(workload, limit, _HOPEFUL)
        # What was looked at was seen to fit, or not to.
        if found.caveats and not self._is_tried(workload):
            with contextlib.suppress(CannotFitError):
                hardly = _HARDLY * _BROKEN_UP if self._breaks_up(workload) else _HARDLY
                exact = self.make(workload, limit, caution / self._margin(workload, limit) * hardly)
                return found if exact.caveats else exact
        return found

    @property
    def changes_models(self) -> bool:
        """Whether a lever is allowed that changes the model and not just how its batches are run."""
        return bool(self._levers & {"mixed_precision", "xla"})

    def propose_for(self, arguments: Mapping[str, Any], memory: DeviceMemory, budget: int | None) -> Plan | None:
        """A plan before `fit` begins, from the arrays it is given; `None` for data that does not say its shapes."""
        x, y, size = arguments.get("x"), arguments.get("y"), arguments.get("batch_size") or 32
        leaves = [leaf for leaf in tree.flatten((x, y)) if leaf is not None]
        device, use = memory.describe(), memory.usage()
        limit = budget if budget is not None else device.limit
        if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves) or limit is None or use is None:
            return None
        few = tree.map_structure(lambda leaf: leaf if leaf is None else leaf[:size], (x, y))
        found = self.propose(few, device, limit - use.current + bytes_of_state(self._model), 1.0)
        if found is None or found.precision is None:
            return found
        before, after = self._losses(few, found.precision)
        if abs(after - before) <= _SAME_LOSS * max(abs(before), 1e-6):
            return found
        logger.warning(
            f"oomproof: Not training in {found.precision}: the loss of the first batch would be {after:.4g} instead of "
            f"{before:.4g}."
        )
        self._levers -= {"mixed_precision"}
        self._ways = None
        return self.propose_for(arguments, memory, budget)

    def _losses(self, data: Any, precision: str) -> tuple[float, float]:
        """The loss of a few samples in the model's own precision and in another."""
        x, y = tree.map_structure(lambda leaf: leaf if leaf is None else leaf[:_LOOKED_AT], data)
        few = self._backend.as_batch(x, y, None)
        step = self._backend.step(self._model)
        step.prepare(few, "train")
        before = step.loss(few, 1)
        with simulators.one_at_a_time(), computed_in(self._model, precision):
            return before, self._backend.step(self._model).loss(few, 1)

    def _is_plenty(self, workload: Workload, limit: int) -> bool:
        """Whether a rough upper bound is far below the limit, so that tracing the step would be a waste of time."""
        outputs = bytes_of_outputs(self._model, _samples(workload))
        if outputs is None:
            return False
        return 4 * bytes_of_state(self._model) + 4 * outputs < _PLENTY * limit

    def _all_ways(self, workload: Workload) -> Iterable[Way]:
        yield self._way(workload, own=True)
        capability = workload.target.capability
        mixed = "mixed_bfloat16" if capability >= (8, 0) else "mixed_float16"
        if "mixed_precision" in self._levers and policy_of(self._model).name == "float32":
            yield self._way(workload, precision=mixed, speed=SPEED_OF_MIXED_PRECISION)
        if "xla" in self._levers and self._backend.traits.offers_xla and not workload.jit:
            compiled = dataclasses.replace(workload, jit=True)
            yield self._way(compiled, speed=SPEED_OF_XLA)

    def _way(self, workload: Workload, *, own: bool = False, precision: str | None = None, speed: float = 1.0) -> Way:
        backend, model = self._backend, self._model
        with simulators.one_at_a_time(), computed_in(model, precision) as policy:
            trace = with_next_batch(simulators.trace(backend, model, workload), workload, _samples(workload), backend)
            look_at_the_clock()
            chain = chain_of(model, workload, trace, replay(trace).peak, backend)
            look_at_the_clock()
        mode = mode_of(backend, workload.jit, model)
        host = host_share(chain, workload) if mode == "eager" else 0.0
        return Way(
            jit=workload.jit,
            own=own,
            precision=policy,
            exact=precision is None,
            chain=chain,
            speed=speed,
            piece_cost=piece_cost(backend.name, mode),
            host=host,
            run_cost=run_cost(chain, host),
            equal_pieces_only=workload.jit and backend.traits.compiles_each_size,
            adds_up=not backend.traits.gradients_add_in_place,
            holds_results=workload.jit and backend.traits.holds_results,
            batch_on_device=backend.batch_on_device(model, workload),
            commit=bytes_of_state(model) + self._while_updating(),
        )

    def _while_updating(self) -> int:
        """Bytes that an update computes in between, where that is for all weights at once.

        Two sets at least: Adam did not fit where there was room for one and a half.
        """
        weights = self._model.trainable_variables if self._backend.traits.updates_at_once else ()
        return 2 * sum(tensor_bytes(tuple(v.shape), str(v.dtype)) for v in weights)


def _samples(workload: Workload) -> int:
    return int(next(leaf for leaf in tree.flatten(workload.x) if leaf is not None).shape[0])


def _first(spec: Spec | None, samples: int) -> Spec | None:
    return spec if spec is None else dataclasses.replace(spec, shape=(samples, *spec.shape[1:]))


def _spec(leaf: Any) -> Spec | None:
    if leaf is None:
        return None
    return Spec(tuple(int(size) for size in leaf.shape), standardize_dtype(leaf.dtype))
