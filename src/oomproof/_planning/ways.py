"""Ways to compute a step, and what each takes: bytes and time of pieces of any size, from the segments of one step."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from oomproof._backends.pieces import piece_count
from oomproof._planning import heads, remat
from oomproof._planning.heads import Head
from oomproof._records.trace import Chain, Segment

# Where the estimate and the sum of the parts differ by more, the parts miss the moment of the peak.
_FAR_OFF = 4
# What recomputing everything adds to the time the host takes: on torch, two thirds of what was there.
_STARTED_AGAIN = 0.66
# What the host takes to start loss and metrics, in segments. A guess.
_LOSS_AND_METRICS = 2


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
        equal_pieces_only: Whether numbers of pieces are those of `usual_count`.
        adds_up: Whether the gradients of a piece are made beside the sum over pieces, not in it.
        holds_results: Whether the new values have their place from the beginning of the step, where the sum over pieces
            is kept meanwhile. Gradients of a piece are then added to it one by one.
        batch_on_device: The part of the batch that is on the device, for all samples, while its pieces run.
        commit: Bytes of new values that are made beside the old ones before they take their place.
        update: Bytes that the optimizer takes while it runs, where that is not what it takes in the plain step.
        head: The head that runs in parts, of each piece, or `None`.
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
    holds_results: bool = False
    batch_on_device: float = 1.0
    commit: int = 0
    update: int | None = None
    head: Head | None = None

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of all weights."""
        return _gradients(self.chain)

    @property
    def recomputable(self) -> int:
        """How many of its segments can be recomputed."""
        segments = self.chain.segments if self.head is None else self.chain.segments[: self.head.start]
        return sum(segment.recomputable for segment in segments)

    def pieces(self, batch_size: int, micro: int) -> int:
        """Into how many pieces it cuts a batch for none to have more than `micro` samples."""
        return piece_count(batch_size, micro, few_numbers=self.equal_pieces_only)


def predict(way: Way, micro: int, batch_size: int, runs: remat.Runs = ()) -> int:
    """Bytes at the peak of a step in pieces of at most `micro` samples that recomputes `runs` of its segments."""
    piece = Piece.of(way, micro, batch_size)
    return piece.predicted(remat.peak(piece.segments, runs))


def least(way: Way, batch_size: int) -> int:
    """Bytes that the update takes, with its new values beside the old ones, however the step is run."""
    return Piece.of(way, batch_size, batch_size).least


def time_of(way: Way, pieces: int, runs: remat.Runs = ()) -> float:
    """Time of a step, as a multiple of the plain step of the user's own way."""
    recomputed = sum(way.chain.segments[at].cost for run in runs for at in range(*run)) + way.run_cost * len(runs)
    device = 1 + way.forward_share * recomputed + way.piece_cost * (pieces - 1)
    started = 1.0
    if way.head is not None:
        segments, more = way.chain.segments, way.head.parts - 1
        device += way.piece_cost * more * sum(segment.cost for segment in segments[way.head.start :])
        started += more * (len(segments) - way.head.start + _LOSS_AND_METRICS) / len(segments)
    # Pieces are smaller, but there is as much to start in each.
    host = way.host * pieces * (started + _STARTED_AGAIN * recomputed)
    # Host and device wait for each other now and then: longer than the slower of the two, shorter than both.
    return way.speed * math.hypot(device, host) / math.hypot(1, way.host)


@dataclasses.dataclass(frozen=True)
class Piece:
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
    def of(cls, way: Way, micro: int, batch_size: int) -> Piece:
        chain, gradients = way.chain, way.gradients
        plain = cls._made(chain, chain.batch_size)
        inside = remat.peak(plain.segments, ())
        sum_of_parts = plain.predicted(inside)
        base, factor = chain.resident + gradients + chain.update, Fraction(0)
        if sum_of_parts > base:
            factor = Fraction(chain.peak - base, sum_of_parts - base)
        if not Fraction(1, _FAR_OFF) <= factor <= _FAR_OFF:
            base, factor = 0, Fraction(max(1, chain.peak), max(1, sum_of_parts))
        if way.update is not None:
            # What is compiled takes little. The update that is made instead runs op by op.
            update = way.update if way.jit else min(way.update, chain.update)
            base = base and base + update - chain.update
            if update < way.chain.update and plain.updating >= plain.beside + inside:
                # Then the peak tells nothing of the segments.
                base, factor = 0, Fraction(1)
            chain = dataclasses.replace(chain, update=update)
        if way.head is not None:
            # If the peak is while the head runs, what its parts miss is the head's.
            if remat.busiest(chain.segments) >= way.head.start:
                base, factor = 0, Fraction(1)
            chain = heads.with_head(chain, way.head)
        batch = math.ceil(way.batch_on_device * remat.share(chain.inputs, batch_size, chain.batch_size))
        rows = remat.share(chain.rows, batch_size, chain.batch_size)  # The update needs those of all pieces.
        there = chain.resident + gradients + rows + batch
        least = there + way.commit if way.commit else 0
        # Those of a part are made beside their sum, however few samples it has.
        apart = chain.segments[-1].gradients if way.head is not None and way.adds_up else 0
        if micro >= batch_size:
            piece = cls._made(chain, batch_size, apart=apart)
            return dataclasses.replace(piece, updating=piece.updating + rows, base=base, factor=factor, least=least)
        if way.holds_results:
            piece = cls._made(chain, micro, in_sum=True, apart=apart)
            extra = max(0, way.commit - gradients) + max((one.gradients for one in chain.segments), default=0)
        else:
            piece = cls._made(chain, micro, in_sum=not way.adds_up, apart=apart)
            extra = gradients if way.adds_up else 0
        extra += rows + batch
        return dataclasses.replace(
            piece, updating=piece.updating + rows, extra=extra, base=base, factor=factor, least=least
        )

    @classmethod
    def _made(cls, chain: Chain, samples: int, in_sum: bool = False, apart: int = 0) -> Piece:
        """As a step of its own. With `in_sum` the gradients are all there from the beginning, and made nowhere else.

        The last segment works with so many bytes `apart`, whatever the number of samples.
        """
        gradients = _gradients(chain)
        inputs, outside = (remat.share(size, samples, chain.batch_size) for size in (chain.inputs, chain.outside))
        segments = remat.scaled(chain.segments, samples, chain.batch_size, with_gradients=not in_sum)
        if apart:
            segments = (*segments[:-1], dataclasses.replace(segments[-1], work=segments[-1].work + apart))
        return cls(
            segments=segments,
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


def _gradients(chain: Chain) -> int:
    return sum(segment.gradients for segment in chain.segments)
