"""`plan`: from a model and the memory there is to a way to run the batch that was asked for. Remembered on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import keras
from keras import tree

from oomproof import _simulators as simulators
from oomproof._backends import current
from oomproof._backends.base import Backend, DeviceMemory
from oomproof._backends.common.call_graph import graphs
from oomproof._backends.common.fingerprint import Fingerprint
from oomproof._backends.common.model import statistics_caveat, unpack
from oomproof._backends.common.precision import computed_in, policy_of
from oomproof._compat.keras import standardize_dtype
from oomproof._estimation.allocator import replay
from oomproof._estimation.api import card_of, check_model, is_compiled, mode_of
from oomproof._estimation.bands import band_of
from oomproof._estimation.workloads import InputShape, check_batch_size, describe, with_next_batch
from oomproof._machine import gpus
from oomproof._planning import cache as plan_cache
from oomproof._planning import check as plan_looks
from oomproof._planning import search as planning
from oomproof._planning.chain import chain_of
from oomproof._records.plan import Plan
from oomproof._records.run import Device
from oomproof._records.trace import Chain, Spec, Target, Trace, Workload
from oomproof._records.units import parse_budget, tensor_bytes
from oomproof.errors import CannotFitError

logger = logging.getLogger("oomproof")

LEVERS = ("microbatch", "recompute", "xla", "mixed_precision", "batch_statistics")
_EXACT = frozenset({"microbatch", "recompute", "xla"})
_WORDS = {"exact": _EXACT, "default": _EXACT | {"batch_statistics"}}

# What each piece of a batch beyond the first adds to the time the device takes, as a share of it: medians over the rows
# of benchmarks/results/step-gpu-*pieces*.json, one GPU, two nets. TensorFlow compiled: one net in four pieces, no file.
# On torch it is the host that takes longer.
_PIECE_COST = {
    ("jax", "compiled"): 0.02,
    ("tensorflow", "compiled"): 0.05,
    ("tensorflow", "graph"): 0.03,
    ("torch", "eager"): 0.02,
}
_USUAL_PIECE_COST = 0.10
# Seconds the host takes for a layer, forward and back, where kernels are started one by one; how many layers could be
# computed again in the time that it takes to begin a run; and how fast cards are next to the one that costs are for, by
# compute capability. Fitted to 40 plans of four nets on one H200 (benchmarks/results/plan-times-gpu-torch-fit.json).
# The other cards are guesses.
_SECONDS_TO_START = 0.00046
_LAYERS_TO_BEGIN = 5.4
_SPEEDS = {(9, 0): 4.4, (8, 9): 1.9, (8, 6): 1.25, (8, 0): 2.5, (7, 5): 0.6}
# Guesses, on the slow side: on a conv net XLA took less than a quarter of the time of graph mode.
_SPEED_OF_XLA = 0.4
_SPEED_OF_MIXED_PRECISION = 0.6
# How many samples the loss is compared on before the precision is changed, and by what share it may differ.
_LOOKED_AT = 16
_SAME_LOSS = 0.05
# How much of the margin is left to a plan that is exact where a sure one is not.
_HARDLY = 1.03
# By how much less than estimated a step may need at best.
_HOPEFUL = 0.7
# Below this share of the limit, by a rough upper bound, nobody needs a plan.
_PLENTY = 0.5


def plan(
    model: Any,
    batch_size: int,
    *,
    budget: int | str | None = None,
    gpu: str | None = None,
    memory: int | str | None = None,
    allow: str | Iterable[str] = "default",
    input_shape: InputShape = None,
    cache: bool = True,
) -> Plan:
    """Says how a batch can be trained within a budget at the least cost in time. The GPU need not be there.

    Args:
        model: A compiled Keras model. It stays as it was; one that is not built yet is built.
        batch_size: Samples in a batch.
        budget: Memory to stay below: bytes, `"12GiB"`, or a share of the card such as `"90%"`; what the framework can
            use of the card when left out.
        gpu: A card of the catalogue, such as `"rtx-3060"`; the one in this machine when nothing is named.
        memory: The memory of a card that is not in the catalogue, in bytes or as `"24GiB"`.
        allow: `"default"`, `"exact"`, or a set of `"microbatch"`, `"recompute"`, `"xla"`, `"mixed_precision"` and
            `"batch_statistics"`.
        input_shape: As for `estimate`.
        cache: Look up and remember plans on disk.

    Returns:
        A `Plan`. Printed, it is a table of alternatives; `fit(..., plan=...)` follows it.

    Raises:
        CannotFitError: When nothing that is allowed fits. It says what comes closest.
        TypeError, ValueError: For arguments that make no sense, shapes that are open, a card that is not known.
        UnsupportedModelError: For a model whose training cannot be taken over.

    Example:
        >>> p = oomproof.plan(model, 1024, gpu="rtx-3060")
        >>> oomproof.fit(model, x, y, batch_size=1024, plan=p)
    """
    check_batch_size(batch_size)
    check_model(model, "train")
    backend = current()
    backend.check_model(model)
    levers = allowed(allow)
    # A budget by itself is as good as a card.
    card = card_of(gpu, memory) or (gpus.of_memory(budget) if budget is not None and not _share(budget) else None)
    if card is None:
        raise ValueError(
            'Expected something to fit into: budget="12GiB", gpu="rtx-4090" or memory="24GiB". This machine has no GPU.'
        )
    usable = card.usable(backend.name)
    named = gpu is not None or memory is not None
    limit = usable if budget is None else parse_budget(budget, usable if named or _share(budget) else None)
    assert limit is not None
    planner = Planner(backend, model, levers, named_levers=not isinstance(allow, str), cache=cache)
    with simulators.ONE_AT_A_TIME:
        workload = describe(
            model, batch_size, "train", is_compiled(model, backend), Target(True, card.capability), input_shape
        )
        return planner.make(dataclasses.replace(workload, guarded=True), limit)


def allowed(allow: str | Iterable[str]) -> frozenset[str]:
    """The levers that `allow` names."""
    if isinstance(allow, str) and allow in _WORDS:
        return _WORDS[allow]
    if isinstance(allow, set | frozenset | list | tuple) and set(allow) <= set(LEVERS):
        return frozenset(allow)
    raise ValueError(
        f'Expected `allow` to be "default", "exact" or a set of {sorted(LEVERS)}. Received: allow={allow!r}'
    )


def _share(budget: int | str) -> bool:
    return isinstance(budget, str) and budget.strip().endswith("%")


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
        self._ways: tuple[tuple[Workload, Fingerprint], list[planning.Way]] | None = None
        self._keys: dict[Plan, str] = {}
        self._first: Plan | None = None

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
        request = planning.Request(
            batch_size=_samples(workload),
            limit=limit,
            margin=self._margin(workload) * caution,
            allowed=self._levers,
            caveats=statistics_caveat(self._model),
            micro_batch_size=self._micro,
        )
        if self._is_looked_at(workload) and caution >= 1:
            found = self._looked_at(request, workload, caution)
        else:
            found = self._fastest(request, self._ways[1])
        self._keys[found] = key
        if self._cache:
            plan_cache.remember(key, found)
        return found

    def _fastest(self, request: planning.Request, ways: list[planning.Way]) -> Plan:
        # What new values of weights and optimizer take beside the old ones is known, and not estimated.
        if 2 * _resident(self._model) <= request.limit:
            with contextlib.suppress(CannotFitError):
                return planning.make(request, ways)
        lean = [dataclasses.replace(way, commit=0) for way in ways]
        return dataclasses.replace(planning.make(request, lean), lean_commit=True)

    def _margin(self, workload: Workload) -> float:
        if self._is_looked_at(workload):
            return plan_looks.MARGIN
        mode = mode_of(self._backend, workload.jit, self._model)
        return 1 + band_of("trace", self._backend.name, mode).above

    def _is_looked_at(self, workload: Workload) -> bool:
        """Whether traces are of this very step: on torch, where it runs op by op and the GPU's allocator is known."""
        return self._backend.name == "torch" and workload.target.gpu and not workload.jit

    def _looked_at(self, request: planning.Request, workload: Workload, caution: float) -> Plan:
        assert self._ways is not None
        ways = self._ways[1]
        # Weights and their optimizer are the same in all ways.
        least = planning.least(ways[0], request.batch_size)
        return plan_looks.looked_at(
            request.margin,
            request.limit / caution,
            fastest=lambda margin: self._fastest(dataclasses.replace(request, margin=margin), ways),
            trace_of=lambda plan: self._trace_of(plan, workload),
            least_of=lambda plan: 0 if plan.lean_commit else least,
        )

    def _trace_of(self, plan: Plan, workload: Workload) -> Trace:
        size = plan.micro_batch_size or _samples(workload)
        x, y = tree.map_structure(lambda spec: _first(spec, size), (workload.x, workload.y))
        pieces = plan.micro_batch_size is not None
        step = dataclasses.replace(workload, x=x, y=y, recompute=plan.recompute, later_piece=pieces)
        with simulators.ONE_AT_A_TIME, computed_in(self._model, plan.precision):
            return simulators.trace(self._backend, self._model, step)

    def propose(self, data: Any, device: Device, limit: int, caution: float) -> Plan | None:
        """A plan for this very batch, or `None` where nothing can be said about it, or nothing fits by the estimate.

        Estimates are far off at times, so nobody is refused on their word: what does not fit will say so.
        """
        # In steps of a percent: a second run, with a few bytes more or less in use, finds the plan of the first.
        limit -= limit % (1 << max(0, limit.bit_length() - 7))
        x, y, _ = unpack(data)
        gpu = gpus.local() if not device.name.upper().startswith("CPU") else None
        target = Target(gpu is not None, gpu.capability if gpu is not None else (8, 0))
        try:
            workload = Workload(
                tree.map_structure(_spec, x),
                tree.map_structure(_spec, y),
                "train",
                self._jit(),
                target,
                guarded=True,
            )
            if caution <= 1 and self._is_plenty(workload, limit):
                return None
            found = self._for_training(workload, limit, caution)
            self._first = self._first or found
            return found
        except CannotFitError as error:
            logger.warning(f"oomproof: by its estimate this will not fit, and is tried all the same. {error}")
            return None
        except Exception as error:
            # Whatever it is that cannot be traced is trained all the same, and measured.
            logger.info(f"oomproof: no plan could be made ({type(error).__name__}: {error})")
            return None

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
            return self.make(workload, limit, _HOPEFUL)
        # What was looked at was seen to fit, or not to.
        if found.caveats and not self._is_looked_at(workload):
            with contextlib.suppress(CannotFitError):
                exact = self.make(workload, limit, caution / self._margin(workload) * _HARDLY)
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
        found = self.propose(few, device, limit - use.current + _resident(self._model), 1.0)
        if found is None or found.precision is None:
            return found
        before, after = self._losses(few, found.precision)
        if abs(after - before) <= _SAME_LOSS * max(abs(before), 1e-6):
            return found
        logger.warning(
            f"oomproof: not trained in {found.precision}: the loss of the first batch would be {after:.4g} and not "
            f"{before:.4g}"
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
        with simulators.ONE_AT_A_TIME, computed_in(self._model, precision):
            return before, self._backend.step(self._model).loss(few, 1)

    def _jit(self) -> bool:
        return bool(self._model.jit_compile) and not self._model.run_eagerly

    def _is_plenty(self, workload: Workload, limit: int) -> bool:
        """Whether a rough upper bound is far below the limit, so that tracing the step would be a waste of time."""
        outputs = _bytes_of_outputs(self._model, _samples(workload))
        if outputs is None:
            return False
        return 4 * _resident(self._model) + 4 * outputs < _PLENTY * limit

    def _all_ways(self, workload: Workload) -> Iterable[planning.Way]:
        yield self._way(workload, own=True)
        capability = workload.target.capability
        mixed = "mixed_bfloat16" if capability >= (8, 0) else "mixed_float16"
        if "mixed_precision" in self._levers and policy_of(self._model).name == "float32":
            yield self._way(workload, precision=mixed, speed=_SPEED_OF_MIXED_PRECISION)
        if "xla" in self._levers and self._backend.name == "tensorflow" and not workload.jit:
            compiled = dataclasses.replace(workload, jit=True)
            yield self._way(compiled, speed=_SPEED_OF_XLA)

    def _way(
        self, workload: Workload, *, own: bool = False, precision: str | None = None, speed: float = 1.0
    ) -> planning.Way:
        backend, model = self._backend, self._model
        with simulators.ONE_AT_A_TIME, computed_in(model, precision) as policy:
            trace = with_next_batch(simulators.trace(backend, model, workload), workload, _samples(workload), backend)
            chain = chain_of(model, workload, trace, replay(trace).peak, backend)
        mode = mode_of(backend, workload.jit, model)
        host = _host_share(chain, workload) if mode == "eager" else 0.0
        return planning.Way(
            jit=workload.jit,
            own=own,
            precision=policy,
            exact=precision is None,
            chain=chain,
            speed=speed,
            piece_cost=_PIECE_COST.get((backend.name, mode), _USUAL_PIECE_COST),
            host=host,
            # The more the device is waited for, the less it matters.
            run_cost=_LAYERS_TO_BEGIN / max(1, chain.calls) * host / (1 + host),
            equal_pieces_only=workload.jit and backend.name != "torch",
            adds_up=backend.name != "torch",
            batch_on_device=backend.batch_on_device(model, workload),
            commit=_resident(model) + self._while_updating(),
        )

    def _while_updating(self) -> int:
        """Bytes that an update computes in between. On torch that is for all weights at once.

        Two sets at least: Adam did not fit where there was room for one and a half.
        """
        weights = self._model.trainable_variables if self._backend.name == "torch" else ()
        return 2 * sum(tensor_bytes(tuple(v.shape), str(v.dtype)) for v in weights)


def _host_share(chain: Chain, workload: Workload) -> float:
    """Time the host takes to start a step, as a multiple of the device's. CPUs are their own host."""
    if not workload.target.gpu or not chain.seconds:
        return 0.0
    capability = workload.target.capability
    speed = next((speed for known, speed in _SPEEDS.items() if capability >= known), 1.0)
    return _SECONDS_TO_START * chain.calls / (3 * chain.seconds / speed)


def _samples(workload: Workload) -> int:
    return int(next(leaf for leaf in tree.flatten(workload.x) if leaf is not None).shape[0])


def _first(spec: Spec | None, samples: int) -> Spec | None:
    return spec if spec is None else dataclasses.replace(spec, shape=(samples, *spec.shape[1:]))


def _spec(leaf: Any) -> Spec | None:
    if leaf is None:
        return None
    return Spec(tuple(int(size) for size in leaf.shape), standardize_dtype(leaf.dtype))


def _bytes_of_outputs(model: Any, samples: int) -> int | None:
    """Bytes of everything the layers of a functional model make of a batch, or `None` where that is not known."""
    total, found = 0, False
    # A loop over time keeps what each of its rounds makes, and may return no more than the last.
    if any(isinstance(layer, keras.layers.RNN) for layer in model._flatten_layers()):
        return None
    for graph in graphs(model):
        for call in graph.calls:
            for tensor in call.node.outputs:
                found = True
                shape = [samples, *tensor.shape[1:]]
                if any(size is None for size in shape):
                    return None
                total += tensor_bytes(tuple(shape), str(tensor.dtype))
    return total if found else None


def _resident(model: Any) -> int:
    """Bytes of weights and optimizer state."""
    slots = model.optimizer.variables if model.optimizer is not None else ()
    return sum(tensor_bytes(tuple(v.shape), str(v.dtype)) for v in [*model.variables, *slots])
