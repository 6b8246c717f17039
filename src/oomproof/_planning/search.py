"""How to make a batch fit at the least cost of time: a pure function from what a step is made of to a `Plan`.

The space is small: ways to compile and compute the step, numbers of pieces, and for each the segments to recompute,
which `step.remat` chooses. Of each combination of levers the fastest that fits is found, or what comes closest, and
the best of those is the plan. The others become the table that the plan prints.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from oomproof._backends.pieces import largest_piece, piece_count
from oomproof._planning import remat
from oomproof._records.diagnosis import Diagnosis, short_of
from oomproof._records.plan import Alternative, Plan
from oomproof._records.trace import Chain, Segment
from oomproof._records.units import format_bytes
from oomproof.errors import CannotFitError

# A step that fits as it is stays as it is, unless another way is faster than this. Estimates of time are not sharper.
_WORTH_A_CHANGE = 0.95
# So many numbers of pieces are looked at one by one; beyond, each is a quarter larger than the one before.
_EVERY_NUMBER = 64
# Where the estimate and the sum of the parts differ by more, the parts miss the moment of the peak.
_FAR_OFF = 4
_ROWS = 12
# What recomputing everything adds to the time the host takes: on torch, two thirds of what was there.
_STARTED_AGAIN = 0.66


@dataclasses.dataclass(frozen=True)
class Way:
    """A step compiled and computed in a certain way.

    Attributes:
        jit: Whether it is compiled with XLA.
        own: Whether this is how the user compiled the model.
        precision: Dtype policy it computes with.
        exact: Whether it computes what the user's own way does.
        chain: What the step is made of.
        speed: Time of its plain step, as a multiple of that of the user's own way.
        piece_cost: Time that each piece beyond the first adds, as a share of its plain step's.
        forward_share: Time of its forward pass, as a share of its plain step's.
        host: Time the host takes to start everything in a plain step, as a multiple of the device's; 0 where nothing
            is started one by one.
        run_cost: Time to begin a run of segments again, as a share of that of its plain step's forward pass.
        equal_pieces_only: Whether numbers of pieces are powers of two.
        adds_up: Whether the gradients of a piece are made beside the sum over pieces, not in it.
        batch_on_device: The part of the batch that is on the device, for all samples, while its pieces run.
        commit: Bytes of new values that are made beside the old ones before they take their place.
    """

    jit: bool
    own: bool
    precision: str
    exact: bool
    chain: Chain
    speed: float
    piece_cost: float
    forward_share: float = 1 / 3
    host: float = 0.0
    run_cost: float = 0.0
    equal_pieces_only: bool = False
    adds_up: bool = True
    batch_on_device: float = 1.0
    commit: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        batch_size: Samples in a batch.
        limit: Bytes there are.
        margin: Predictions times this must be within the limit.
        allowed: Levers that may be used: `"microbatch"`, `"recompute"`, `"xla"`, `"mixed_precision"`,
            `"batch_statistics"`.
        caveats: What cutting a batch changes for this model, in words; empty where it changes nothing.
        micro_batch_size: No piece may be larger, as the user wishes; `None` without a wish.
    """

    batch_size: int
    limit: int
    margin: float
    allowed: frozenset[str]
    caveats: tuple[str, ...] = ()
    micro_batch_size: int | None = None

    @property
    def most(self) -> int:
        """Bytes that a prediction may say."""
        return int(self.limit / self.margin)


def predict(way: Way, micro: int, batch_size: int, runs: remat.Runs = ()) -> int:
    """Bytes at the peak of a step in pieces of at most `micro` samples that recomputes `runs` of its segments."""
    piece = _Piece.of(way, micro, batch_size)
    return piece.predicted(remat.peak(piece.segments, runs))


def least(way: Way, batch_size: int) -> int:
    """Bytes that the update takes, with its new values beside the old ones, however the step is run."""
    return _Piece.of(way, batch_size, batch_size).least


def time_of(way: Way, pieces: int, runs: remat.Runs = ()) -> float:
    """Time of a step, as a multiple of the plain step of the user's own way."""
    recomputed = sum(way.chain.segments[at].cost for run in runs for at in range(*run)) + way.run_cost * len(runs)
    device = 1 + way.forward_share * recomputed + way.piece_cost * (pieces - 1)
    # Pieces are smaller, but there is as much to start in each.
    host = way.host * pieces * (1 + _STARTED_AGAIN * recomputed)
    # Host and device wait for each other now and then: longer than the slower of the two, shorter than both.
    return way.speed * math.hypot(device, host) / math.hypot(1, way.host)


def make(request: Request, ways: Sequence[Way]) -> Plan:
    """The fastest plan that is allowed and fits.

    What changes results is taken only where nothing exact fits, but for another precision: who allows that wants it
    wherever it is faster. A batch that fits as it is is run as it is, unless an allowed lever makes it clearly faster.

    Args:
        request: The batch, the memory and the levers.
        ways: How the step can be compiled and computed. One is the user's own; those that are not allowed are
            looked at to say what they would do.

    Raises:
        CannotFitError: When nothing that is allowed fits.
    """
    own = next((way for way in ways if way.own), None)
    if own is None:
        raise ValueError("Expected one of `ways` to be the user's own. Received none.")
    options = [option for way in ways for option in _options(request, own, way)]
    taken = _best(request, options)
    if taken is None:
        raise CannotFitError(_refusal(request, own, options), diagnosis=_short(request, options))
    chain = taken.way.chain
    return Plan(
        micro_batch_size=taken.micro if taken.pieces > 1 else None,
        recompute=tuple(remat.label(chain.segments[start:end]) for start, end in taken.runs),
        jit_compile=None if taken.way.jit == own.jit else taken.way.jit,
        precision=None if taken.way.precision == own.precision else taken.way.precision,
        caveats=taken.caveats,
        batch_size=request.batch_size,
        predicted=taken.predicted,
        limit=request.limit,
        relative_time=taken.time,
        segments=_recomputable(chain),
        recomputed=taken.recomputed,
        alternatives=_table(request, options, taken),
    )


def _short(request: Request, options: Sequence[_Option]) -> Diagnosis:
    tried = [option for option in options if option.levers <= request.allowed] or options
    return short_of(
        math.ceil(min(option.predicted for option in tried) * request.margin),
        request.limit,
        "Nothing that is allowed fits.",
        f"print(oomproof.max_batch_size(model, memory={request.limit}))  # the largest batch that does",
    )


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The memory of a step in pieces of a certain size, but for what `remat` chooses.

    Attributes:
        segments: Of the chain, for a piece.
        beside: Bytes beside them while they run.
        updating: Bytes while the optimizer runs.
        extra: Bytes beside all that, because there is more than one piece.
        base: The part of the sum that is known well.
        factor: What the rest is multiplied by, so that the plain step of the chain comes out as it was estimated.
        least: Bytes while new values are made beside the old ones.
    """

    segments: tuple[Segment, ...]
    beside: int
    updating: int
    extra: int = 0
    base: int = 0
    factor: Fraction = Fraction(1)
    least: int = 0

    @classmethod
    def of(cls, way: Way, micro: int, batch_size: int) -> _Piece:
        chain, gradients = way.chain, _gradients(way.chain)
        plain = cls._made(chain, chain.batch_size)
        sum_of_parts = plain.predicted(remat.peak(plain.segments, ()))
        base, factor = chain.resident + gradients + chain.update, Fraction(0)
        if sum_of_parts > base:
            factor = Fraction(chain.peak - base, sum_of_parts - base)
        if not Fraction(1, _FAR_OFF) <= factor <= _FAR_OFF:
            base, factor = 0, Fraction(max(1, chain.peak), max(1, sum_of_parts))
        batch = math.ceil(way.batch_on_device * remat.share(chain.inputs, batch_size, chain.batch_size))
        rows = remat.share(chain.rows, batch_size, chain.batch_size)  # The update needs those of all pieces.
        there = chain.resident + gradients + rows + batch
        least = there + way.commit if way.commit else 0
        if micro >= batch_size:
            piece = cls._made(chain, batch_size)
            return dataclasses.replace(piece, updating=piece.updating + rows, base=base, factor=factor, least=least)
        piece = cls._made(chain, micro, in_sum=not way.adds_up)
        extra = (gradients if way.adds_up else 0) + rows + batch
        return dataclasses.replace(
            piece, updating=piece.updating + rows, extra=extra, base=base, factor=factor, least=least
        )

    @classmethod
    def _made(cls, chain: Chain, samples: int, in_sum: bool = False) -> _Piece:
        """As a step of its own. With `in_sum` the gradients are all there from the beginning, and made nowhere else."""
        gradients = _gradients(chain)
        inputs, outside = (remat.share(size, samples, chain.batch_size) for size in (chain.inputs, chain.outside))
        return cls(
            segments=remat.scaled(chain.segments, samples, chain.batch_size, with_gradients=not in_sum),
            beside=chain.resident + inputs + outside + chain.scratch + (gradients if in_sum else 0),
            updating=chain.resident + gradients + chain.update + inputs,
        )

    def predicted(self, inside: int) -> int:
        """Bytes at the peak of the step, from those of its segments."""
        parts = max(self.updating, self.beside + inside)
        return max(self.least, self.extra + self.base + math.ceil((parts - self.base) * self.factor))

    def room(self, most: int) -> int:
        """The most that its segments may take for the peak of the step to be at most `most`."""
        parts = self.base + math.floor((most - self.extra - self.base) / self.factor)
        return parts - self.beside if self.updating <= parts and self.least <= most else -1


@dataclasses.dataclass(frozen=True)
class _Option:
    """The fastest step that fits with certain levers, or the one that comes closest."""

    way: Way
    micro: int
    pieces: int
    runs: remat.Runs
    levers: frozenset[str]
    caveats: tuple[str, ...]
    predicted: int
    time: float

    @property
    def recomputed(self) -> int:
        return sum(end - start for start, end in self.runs)

    @property
    def name(self) -> str:
        parts = ["whole" if self.pieces == 1 else f"{self.pieces} × {self.micro}"]
        parts += [f"recomputing {self.recomputed} of {_recomputable(self.way.chain)}"] if self.runs else []
        parts += ["XLA" if self.way.jit else "no XLA"] if "xla" in self.levers else []
        parts += [self.way.precision] if "mixed_precision" in self.levers else []
        return ", ".join(parts)


def _options(request: Request, own: Way, way: Way) -> Iterator[_Option]:
    """For a way: whole and cut, each without and with recomputation."""
    sizes = list(_sizes(request, way))
    whole = [micro for micro in sizes if micro == request.batch_size]
    for group in (whole, sizes[len(whole) :]):
        if not group:
            continue
        plain = next((micro for micro in group if predict(way, micro, request.batch_size) <= request.most), None)
        yield _option(request, own, way, plain or group[-1], ())
        if recomputing := _recomputing(request, way, group, plain):
            yield _option(request, own, way, *recomputing)


def _recomputing(request: Request, way: Way, sizes: Sequence[int], plain: int | None) -> tuple[int, remat.Runs] | None:
    """The size and the runs that are fastest, if faster than `plain` without any; the closest where nothing fits."""
    best = None
    bound = math.inf if plain is None else time_of(way, _pieces(way, request.batch_size, plain))
    for micro in sizes:
        pieces = _pieces(way, request.batch_size, micro)
        if time_of(way, pieces) >= bound:
            return best  # More pieces take longer, so what is left cannot be faster.
        piece = _Piece.of(way, micro, request.batch_size)
        runs = remat.choose(piece.segments, piece.room(request.most), way.run_cost)
        if runs and time_of(way, pieces, runs) < bound:
            best, bound = (micro, runs), time_of(way, pieces, runs)
    if best is None and (runs := remat.least(_Piece.of(way, sizes[-1], request.batch_size).segments)):
        best = (sizes[-1], runs)
    return best


def _option(request: Request, own: Way, way: Way, micro: int, runs: remat.Runs) -> _Option:
    pieces = _pieces(way, request.batch_size, micro)
    levers = {
        "xla": way.jit != own.jit,
        "mixed_precision": way.precision != own.precision,
        "microbatch": pieces > 1,
        "batch_statistics": pieces > 1 and bool(request.caveats),
        "recompute": bool(runs),
    }
    caveats = request.caveats if pieces > 1 else ()
    return _Option(
        way=way,
        micro=micro,
        pieces=pieces,
        runs=runs,
        levers=frozenset(lever for lever, used in levers.items() if used),
        caveats=caveats if way.exact else (*caveats, f"computed in {way.precision}, not in {own.precision}"),
        predicted=predict(way, micro, request.batch_size, runs),
        time=time_of(way, pieces, runs),
    )


def _sizes(request: Request, way: Way) -> Iterator[int]:
    """Sizes of pieces worth looking at, the largest first."""
    batch = request.batch_size
    pieces = first = _pieces(way, batch, min(batch, request.micro_batch_size or batch))
    last = None
    while last != 1:
        micro = largest_piece(batch, pieces)
        if micro != last:
            yield micro
        last = micro
        many = pieces >= first + _EVERY_NUMBER
        pieces += pieces if way.equal_pieces_only else pieces // 4 if many else 1


def _pieces(way: Way, batch_size: int, micro: int) -> int:
    pieces = piece_count(batch_size, micro)
    return min(batch_size, 1 << (pieces - 1).bit_length()) if way.equal_pieces_only else pieces


def _best(request: Request, options: Sequence[_Option]) -> _Option | None:
    fitting = [each for each in options if each.predicted <= request.most and each.levers <= request.allowed]
    fitting = [each for each in fitting if "batch_statistics" not in each.levers] or fitting
    # Of equal times, the one that changes less.
    best = min(fitting, key=lambda each: (round(each.time, 9), len(each.levers)), default=None)
    as_it_is = next((each for each in fitting if not each.levers), None)
    return as_it_is if as_it_is and best and best.time >= _WORTH_A_CHANGE else best


def _table(request: Request, options: Sequence[_Option], taken: _Option) -> tuple[Alternative, ...]:
    def rank(option: _Option) -> tuple[bool, bool, bool, bool, float]:
        allowed, fits = option.levers <= request.allowed, option.predicted <= request.most
        return option is not taken, bool(option.levers), not allowed, not fits, option.time

    told = sorted(options, key=rank)[:_ROWS]
    return tuple(
        Alternative(each.name, each.predicted, each.time, _exact(each), each is taken, _why(request, each, taken))
        for each in options
        if each in told
    )


def _exact(option: _Option) -> bool | None:
    """Plain steps are exact; what changes them has to be proven, unless it is known not to be."""
    return False if option.caveats else None if option.levers else True


def _too_much(request: Request, option: _Option) -> int:
    if option.predicted <= request.most:
        return 0
    return max(1, math.ceil(option.predicted * request.margin) - request.limit)


def _why(request: Request, option: _Option, taken: _Option) -> str:
    if missing := _too_much(request, option):
        return f"does not fit: {format_bytes(missing)} too much"
    if option is taken:
        if not taken.levers:
            return "taken: it fits as it is"
        if "batch_statistics" in taken.levers:
            return "taken: the fastest that fits; nothing exact does"
        return "taken: the fastest that fits"
    if not option.levers <= request.allowed:
        return f"not allowed: needs allow={_set(option.levers - request.allowed)}"
    times = f"({option.time:.2f}× against {taken.time:.2f}×)"
    if "batch_statistics" in option.levers and "batch_statistics" not in taken.levers:
        return "fits, but is not exact"
    if option.time > taken.time:
        return f"fits, slower {times}"
    if not taken.levers and option.time < taken.time:
        return f"fits, hardly faster {times}"
    return "fits, as fast with more levers"


def _refusal(request: Request, own: Way, options: Sequence[_Option]) -> str:
    """Why there is no plan, in numbers, and what would make one."""
    tried = [option for option in options if option.levers <= request.allowed]
    closest = min(tried or options, key=lambda option: option.predicted)
    there_is = f"there is {format_bytes(request.limit)}"
    if tried:
        need = {each.name: format_bytes(each.predicted * request.margin) for each in tried}
        happened = (
            f"Batch {request.batch_size} does not fit: at least {need[closest.name]} is needed ({closest.name}), and "
            f"{there_is}. Tried: {'; '.join(f'{name}: {size}' for name, size in need.items())}."
        )
    else:
        pieces = f"pieces of at most {request.micro_batch_size}"
        happened = f"Batch {request.batch_size} is to run in {pieces}, cutting is not allowed, and {there_is}."
    ways_out = [f"\n  {way_out}" for way_out in _ways_out(request, own, options, closest)]
    return f"{happened} What would make it fit:{''.join(ways_out)}"


def _ways_out(request: Request, own: Way, options: Sequence[_Option], closest: _Option) -> Iterator[str]:
    offered: list[frozenset[str]] = []
    for option in sorted(options, key=lambda option: (len(option.levers - request.allowed), option.time)):
        missing = option.levers - request.allowed
        # What needs more levers than another that fits is no news.
        if not _too_much(request, option) and not any(fewer <= missing for fewer in offered):
            offered.append(missing)
            exact = f"not exact: {'; '.join(option.caveats)}" if option.caveats else "to be proven on the first batch"
            size, time = format_bytes(option.predicted), f"{option.time:.2f}× step time"
            yield f"allow={_set(request.allowed | missing)}: {option.name}, {size}, {time} ({exact})"
    sizes = range(1, request.batch_size)
    batch = bisect.bisect_right(sizes, request.most, key=lambda size: predict(own, size, size))
    if closest.pieces == 1 and batch:
        yield f"a batch of {batch}, which fits as it is"
    if not _too_much(request, closest):
        return
    chain, gradients = closest.way.chain, _gradients(closest.way.chain)
    if (state := chain.resident - gradients) > 0:
        yield f"an optimizer with less state (SGD, Adafactor): up to {format_bytes(state)} less"
    yield f"fewer trained weights (frozen layers, LoRA): their gradients are {format_bytes(gradients)}"
    still = chain.resident + gradients + chain.update + (gradients if closest.pieces > 1 and closest.way.adds_up else 0)
    if still < request.most:
        share = (request.most - still) / (closest.predicted - still)
        yield f"smaller samples (images, sequences): {share:.0%} of the memory that they take now"
    yield f"a device with {format_bytes(closest.predicted * request.margin)} to use"


def _recomputable(chain: Chain) -> int:
    return sum(segment.recomputable for segment in chain.segments)


def _gradients(chain: Chain) -> int:
    return sum(segment.gradients for segment in chain.segments)


def _set(levers: frozenset[str]) -> str:
    return "{" + ", ".join(repr(lever) for lever in sorted(levers)) + "}"
