"""What can be done so that a batch fits: for each way to compute a step, whole or cut, recomputing or not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from oomproof._backends.pieces import largest_piece, usual_count
from oomproof._planning import remat
from oomproof._planning.heads import worth_trying
from oomproof._planning.ways import Piece, Way, predict, time_of

# So many numbers of pieces are looked at one by one; beyond, each is a quarter larger than the one before.
_EVERY_NUMBER = 64


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        batch_size: Samples in a batch.
        limit: Bytes there are.
        margin: Predictions times this must be within the limit.
        allowed: Levers that may be used: `"microbatch"`, `"recompute"`, `"head"`, `"xla"`, `"mixed_precision"`,
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

    def missing(self, predicted: int) -> int:
        """Bytes too few for what is predicted to take so many; 0 where it fits."""
        if predicted <= self.most:
            return 0
        return max(1, math.ceil(predicted * self.margin) - self.limit)


@dataclasses.dataclass(frozen=True)
class Option:
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
        parts += [f"recomputing {self.recomputed} of {self.way.recomputable}"] if self.runs else []
        parts += [f"head in {self.way.head.parts}"] if self.way.head is not None else []
        parts += ["XLA" if self.way.jit else "no XLA"] if "xla" in self.levers else []
        parts += [self.way.precision] if "mixed_precision" in self.levers else []
        return ", ".join(parts)


def options_of(request: Request, own: Way, way: Way) -> Iterator[Option]:
    """For a way: whole and cut, each without and with recomputation, and all that with the head in parts."""
    sizes = list(_sizes(request, way))
    yield from _of_sizes(request, own, way, sizes)
    heads = list(worth_trying(way.chain, sizes[0])) if "head" in request.allowed else []
    for head in heads:
        apart = dataclasses.replace(way, head=head)
        fits = predict(apart, sizes[0], request.batch_size) <= request.most
        last = fits or head is heads[-1]
        large = [micro for micro in sizes if micro >= head.parts]
        yield from _of_sizes(request, own, apart, large if last else large[:1])
        if fits:
            return  # More parts take longer.


def _of_sizes(request: Request, own: Way, way: Way, sizes: Sequence[int]) -> Iterator[Option]:
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
    bound = math.inf if plain is None else time_of(way, way.pieces(request.batch_size, plain))
    for micro in sizes:
        pieces = way.pieces(request.batch_size, micro)
        if time_of(way, pieces) >= bound:
            return best  # More pieces take longer, so what is left cannot be faster.
        piece = Piece.of(way, micro, request.batch_size)
        runs = remat.choose(piece.segments, piece.room(request.most), way.run_cost)
        if runs and time_of(way, pieces, runs) < bound:
            best, bound = (micro, runs), time_of(way, pieces, runs)
    if best is None and (runs := remat.least(Piece.of(way, sizes[-1], request.batch_size).segments)):
        best = (sizes[-1], runs)
    return best


def _option(request: Request, own: Way, way: Way, micro: int, runs: remat.Runs) -> Option:
    pieces = way.pieces(request.batch_size, micro)
    levers = {
        "xla": way.jit != own.jit,
        "mixed_precision": way.precision != own.precision,
        "microbatch": pieces > 1,
        "batch_statistics": pieces > 1 and bool(request.caveats),
        "recompute": bool(runs),
        "head": way.head is not None,
    }
    caveats = request.caveats if pieces > 1 else ()
    return Option(
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
    pieces = first = way.pieces(batch, min(batch, request.micro_batch_size or batch))
    last = None
    while last != 1:
        micro = largest_piece(batch, pieces)
        if micro != last:
            yield micro
        last = micro
        many = pieces >= first + _EVERY_NUMBER
        pieces += pieces // 4 if many else 1
        if way.equal_pieces_only:
            pieces = usual_count(batch, pieces)
