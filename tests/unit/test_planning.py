from __future__ import annotations

import dataclasses
import math
import pathlib
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_remat import all_runs, chains

from oomproof._backends.pieces import piece_count
from oomproof._planning import options, remat, search
from oomproof._planning.options import Request
from oomproof._planning.ways import Way, predict, time_of
from oomproof._records.exactness import Exactness
from oomproof._records.plan import Alternative, Plan
from oomproof._records.trace import Chain, Segment
from oomproof.errors import CannotFitError

GOLDEN = pathlib.Path(__file__).parent / "golden"
MIB, GIB = 2**20, 2**30
EXACT = frozenset({"microbatch", "recompute"})
EVERYTHING = frozenset({"microbatch", "recompute", "xla", "mixed_precision", "batch_statistics"})
CAVEATS = ("BatchNormalization 'bn' sees fewer samples",)

SEGMENTS = tuple(
    Segment(
        first=f"{index}_conv",
        last=f"{index}_add",
        kept=GIB,
        crossing=(GIB // 4,),
        work=GIB // 2,
        gradients=16 * MIB,
        cost=1 / 9,
    )
    for index in range(9)
)
CHAIN = Chain(
    batch_size=1024,
    segments=SEGMENTS,
    resident=GIB,
    inputs=GIB // 4,
    outside=GIB // 8,
    update=GIB // 2,
    peak=12 * GIB,
)
OWN = Way(jit=False, own=True, precision="float32", exact=True, chain=CHAIN, speed=1.0, piece_cost=0.04)
XLA = dataclasses.replace(OWN, jit=True, own=False, speed=0.8, equal_pieces_only=True)
MIXED = dataclasses.replace(
    OWN,
    own=False,
    precision="mixed_bfloat16",
    exact=False,
    chain=dataclasses.replace(CHAIN, segments=remat.scaled(CHAIN.segments, 512, 1024), peak=7 * GIB),
    speed=0.6,
)


def asked(limit: float, allowed: frozenset[str] = EXACT, **more: object) -> Request:
    fields = {"batch_size": 1024, "margin": 1.0, **more}
    return Request(limit=int(limit * GIB), allowed=allowed, **fields)  # type: ignore[arg-type]


def row(plan: Plan, name: str) -> Alternative:
    return next(each for each in plan.alternatives if each.name == name)


# What is predicted.


def test_the_plain_step_is_predicted_as_it_was_estimated():
    assert predict(OWN, 1024, 1024) == CHAIN.peak


@given(segments=chains(), sizes=st.tuples(*[st.integers(0, 99)] * 4), peak=st.integers(1, 1000))
def test_the_plain_step_is_predicted_as_it_was_estimated_whatever_the_parts_say(segments, sizes, peak):
    resident, inputs, outside, update = sizes
    assume(resident + inputs + outside + update > 0)
    chain = Chain(8, tuple(segments), resident, inputs, outside, update, peak)
    assert predict(dataclasses.replace(OWN, chain=chain), 8, 8) == peak


def test_a_piece_takes_its_share_beside_what_does_not_shrink():
    # The parts: nine segments, half of one more, a ninth of the gradients, what is beside them.
    parts = 9 * GIB + GIB // 2 + 16 * MIB + GIB + GIB // 4 + GIB // 8
    chain = dataclasses.replace(CHAIN, peak=parts)
    gradients, fixed = 9 * 16 * MIB, GIB + 16 * MIB
    quarter = fixed + (parts - fixed) // 4
    for adds_up, on_device, more in ((True, True, gradients + GIB // 4), (True, False, gradients)):
        way = dataclasses.replace(OWN, chain=chain, adds_up=adds_up, batch_on_device=on_device)
        assert predict(way, 256, 1024) == quarter + more
    # Made in their sum, all gradients are there all the time, and only once.
    way = dataclasses.replace(OWN, chain=chain, adds_up=False, batch_on_device=False)
    assert predict(way, 256, 1024) == quarter + gradients - 16 * MIB


def test_what_kernels_work_in_does_not_shrink_with_the_piece():
    chain = dataclasses.replace(CHAIN, scratch=2 * GIB, peak=CHAIN.peak + 2 * GIB)
    way = dataclasses.replace(OWN, chain=chain)
    more = [predict(way, size, 1024) - predict(OWN, size, 1024) for size in (1024, 256, 1)]
    assert all(1.5 * GIB < each < 2.5 * GIB for each in more)


def test_rows_of_tables_are_kept_for_the_whole_batch_however_small_its_pieces():
    way = dataclasses.replace(OWN, chain=dataclasses.replace(CHAIN, rows=GIB))
    for size in (256, 1):
        assert predict(way, size, 1024) >= predict(OWN, size, 1024) + GIB
    assert predict(way, 1, 512) < predict(way, 1, 1024)


def test_the_update_bounds_what_pieces_can_save():
    way = dataclasses.replace(OWN, chain=dataclasses.replace(CHAIN, update=6 * GIB), adds_up=False)
    way = dataclasses.replace(way, batch_on_device=False)
    assert predict(way, 1, 1024) >= (1 + 6) * GIB + 9 * 16 * MIB


def test_the_estimate_corrects_what_grows_with_the_samples_only():
    twice = dataclasses.replace(OWN, chain=dataclasses.replace(CHAIN, peak=20 * GIB))
    half = predict(twice, 512, 1024)
    extra = 9 * 16 * MIB + GIB // 4
    fixed = GIB + 9 * 16 * MIB + GIB // 2
    assert half - extra - fixed == pytest.approx((20 * GIB - fixed) / 2, rel=0.1)


def test_time_is_that_of_the_way_with_pieces_and_recomputation_on_top():
    assert time_of(OWN, 1) == 1.0
    assert time_of(XLA, 1) == 0.8
    assert time_of(OWN, 4) == pytest.approx(1 + 3 * 0.04)
    assert time_of(XLA, 4, ((0, 2), (5, 6))) == pytest.approx(0.8 * (1 + 3 * 0.04 + 3 / 9 / 3))


def test_beginning_a_run_takes_time():
    slow = dataclasses.replace(OWN, run_cost=0.5)
    assert time_of(slow, 1) == 1.0
    # Three of nine segments, and two runs.
    assert time_of(slow, 1, ((0, 2), (5, 6))) == pytest.approx(1 + (3 / 9 + 2 * 0.5) / 3)


def test_a_host_that_starts_everything_one_by_one_starts_it_for_each_piece_again():
    slow = dataclasses.replace(OWN, host=1.0)
    assert time_of(slow, 1) == pytest.approx(1.0)
    assert time_of(slow, 2) == pytest.approx(math.hypot(1.04, 2) / math.sqrt(2))
    # Recomputing three of nine segments: a ninth on the device, two ninths on the host.
    assert time_of(slow, 1, ((0, 3),)) == pytest.approx(math.hypot(1 + 1 / 9, 1.22) / math.sqrt(2))
    # So much that it is quicker to recompute than to cut, where it was quicker to cut.
    for way, cut in ((OWN, True), (slow, False)):
        chosen = search.fastest(asked(8), [way])
        assert (chosen.micro_batch_size is not None, bool(chosen.recompute)) == (cut, not cut)


# What is chosen.


def test_what_fits_stays_as_it_is():
    plan = search.fastest(asked(13), [OWN])
    assert (plan.micro_batch_size, plan.recompute, plan.jit_compile, plan.precision) == (None, (), None, None)
    assert plan.relative_time == 1.0
    assert plan.predicted == 12 * GIB
    assert row(plan, "whole").why == "taken: it fits as it is"


def test_the_margin_counts():
    assert search.fastest(asked(12, margin=1.0), [OWN]).micro_batch_size is None
    cautious = search.fastest(asked(12, margin=1.1), [OWN])
    assert cautious.predicted * 1.1 <= 12 * GIB
    assert row(cautious, "whole").why == "does not fit: 1.2 GiB too much"


def test_a_faster_way_is_taken_where_it_is_clearly_faster():
    assert search.fastest(asked(13, EXACT | {"xla"}), [OWN, XLA]).jit_compile is True
    hardly = dataclasses.replace(XLA, speed=0.96)
    plan = search.fastest(asked(13, EXACT | {"xla"}), [OWN, hardly])
    assert plan.jit_compile is None
    assert row(plan, "whole, XLA").why == "fits, hardly faster (0.96× against 1.00×)"
    # Where the plain step does not fit, any gain counts.
    assert search.fastest(asked(8, EXACT | {"xla"}), [OWN, dataclasses.replace(hardly, chain=MIXED.chain)]).jit_compile


def test_levers_that_are_not_allowed_are_only_told_of():
    plan = search.fastest(asked(6), [OWN, XLA, MIXED])
    assert plan.jit_compile is plan.precision is None
    assert row(plan, "2 × 512, mixed_bfloat16").why == "not allowed: needs allow={'mixed_precision'}"
    assert not row(plan, "2 × 512, mixed_bfloat16").exact
    assert search.fastest(asked(6, frozenset({"microbatch"})), [OWN]).recompute == ()
    assert search.fastest(asked(6, frozenset({"recompute"})), [OWN]).micro_batch_size is None


def test_mixed_precision_is_taken_wherever_it_is_allowed_and_faster():
    plan = search.fastest(asked(13, EXACT | {"mixed_precision"}), [OWN, MIXED])
    assert plan.precision == "mixed_bfloat16"
    assert plan.caveats == ("computed in mixed_bfloat16, not in float32",)
    assert row(plan, "whole, mixed_bfloat16").why == "taken: the fastest that fits"
    slow = dataclasses.replace(MIXED, speed=1.5)
    assert search.fastest(asked(6, EXACT | {"mixed_precision"}), [OWN, slow]).precision is None


def test_batch_statistics_are_cut_only_where_nothing_exact_fits():
    allowed = EXACT | {"batch_statistics"}
    slow = dataclasses.replace(OWN, forward_share=1.0)  # Cutting would be faster by far.
    plan = search.fastest(asked(6, allowed, caveats=CAVEATS), [slow])
    assert plan.recompute
    assert plan.micro_batch_size is None
    assert plan.caveats == ()
    assert row(plan, "3 × 342").why == "fits, but is not exact"
    assert search.fastest(asked(6, allowed), [slow]).micro_batch_size is not None

    tight = search.fastest(asked(2.5, allowed, caveats=CAVEATS), [slow])
    assert tight.micro_batch_size is not None
    assert tight.caveats == CAVEATS
    taken = next(each for each in tight.alternatives if each.taken)
    assert taken.why == "taken: the fastest that fits; nothing exact does"
    with pytest.raises(CannotFitError) as caught:
        search.fastest(asked(2.5, EXACT, caveats=CAVEATS), [slow])
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis.requested_bytes > caught.value.diagnosis.numbers["limit"]


def test_of_equal_times_the_one_with_fewer_levers_is_taken():
    free = dataclasses.replace(OWN, piece_cost=0.0, forward_share=0.0)
    plan = search.fastest(asked(6), [free, dataclasses.replace(free, own=False, jit=True)])
    assert plan.relative_time == 1.0
    assert bool(plan.micro_batch_size) + bool(plan.recompute) == 1
    assert plan.jit_compile is None


def test_a_size_the_user_fixed_is_never_exceeded():
    plan = search.fastest(asked(13, micro_batch_size=300), [OWN])
    assert plan.micro_batch_size == 256
    assert search.fastest(asked(13, micro_batch_size=300), [dataclasses.replace(OWN, equal_pieces_only=True)])
    assert search.fastest(asked(2.5, micro_batch_size=300), [OWN]).micro_batch_size < 256
    assert search.fastest(asked(13, micro_batch_size=4096), [OWN]).micro_batch_size is None


@given(
    batch=st.integers(1, 5000),
    equal=st.booleans(),
    fixed=st.none() | st.integers(1, 5000),
)
def test_sizes_begin_with_the_largest_and_end_with_one_sample(batch, equal, fixed):
    way = dataclasses.replace(OWN, equal_pieces_only=equal)
    sizes = list(options._sizes(asked(1, batch_size=batch, micro_batch_size=fixed), way))
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] <= min(batch, fixed or batch)
    assert sizes[-1] == 1
    assert len(sizes) < 100
    if fixed is None:
        assert sizes[0] == batch
    if batch <= 64 and not equal and fixed is None:
        assert {piece_count(batch, size) for size in range(1, batch + 1)} == {piece_count(batch, s) for s in sizes}


def test_recomputed_segments_are_named_by_their_first_and_last_call():
    single = dataclasses.replace(CHAIN.segments[0], first="0_conv", last="0_conv")
    chain = dataclasses.replace(CHAIN, segments=(single, *CHAIN.segments[1:]))
    plan = search.fastest(asked(11.5, frozenset({"recompute"})), [dataclasses.replace(OWN, chain=chain)])
    assert plan.recompute == ("0_conv",)
    assert (plan.recomputed, plan.segments) == (1, 9)
    plan = search.fastest(asked(8, frozenset({"recompute"})), [OWN])
    assert plan.recompute == ("1_conv..4_add",)


# Everything against all there is.


def random_ways(rng: random.Random) -> list[Way]:
    """The user's own way, and often XLA and mixed precision. Drawn evenly: what is simple shows little here."""
    own = Way(jit=False, own=True, precision="float32", exact=True, chain=random_chain(rng), speed=1.0, piece_cost=0.0)
    xla = dataclasses.replace(own, jit=True, own=False)
    mixed = dataclasses.replace(own, own=False, precision="mixed_bfloat16", exact=False)
    return [
        dataclasses.replace(
            way,
            chain=dataclasses.replace(way.chain, peak=way.chain.resident + rng.randint(50, 250)),
            speed=1.0 if way.own else rng.choice([0.5, 0.8, 0.97, 1.25]),
            piece_cost=rng.choice([0.0, 1 / 64, 1 / 16, 1 / 8]),
            host=rng.choice([0.0, 0.0, 0.5, 2.0]),
            run_cost=rng.choice([0.0, 1 / 64, 1 / 8]),
            forward_share=rng.choice([1 / 4, 1.0]),
            equal_pieces_only=rng.random() < 0.3,
            adds_up=rng.random() < 0.5,
            batch_on_device=rng.random() < 0.5,
        )
        for way in [own, xla, mixed][: rng.randint(1, 3)]
    ]


def random_chain(rng: random.Random) -> Chain:
    segments = tuple(
        Segment(
            first=f"layer_{index}",
            last=f"layer_{index}",
            kept=rng.randint(5, 40),
            crossing=tuple(sorted((rng.randint(0, 10) for _ in range(rng.randint(0, 2))), reverse=True)),
            work=rng.randint(0, 20),
            gradients=rng.randint(0, 8),
            cost=rng.randint(1, 16) / 64,
            recomputable=rng.random() < 0.9,
        )
        for index in range(rng.randint(1, 4))
    )
    resident, inputs, outside, update = (rng.randint(0, 20) for _ in range(4))
    return Chain(rng.choice([4, 8, 12]), segments, resident, inputs, outside, update, peak=0)


def random_request(rng: random.Random, ways: list[Way]) -> Request:
    request = Request(
        batch_size=rng.randint(1, 12),
        limit=0,
        margin=rng.choice([1.0, 1.1, 1.5]),
        allowed=rng.choice([EXACT, EVERYTHING, frozenset(rng.sample(sorted(EVERYTHING), 3))]),
        caveats=rng.choice([(), CAVEATS]),
        micro_batch_size=rng.choice([None, None, None, 3]),
    )
    # A limit that something just fits into shows most, and one that is a little too low for everything.
    predictions = sorted({each.predicted for each in everything(request, ways)})
    limit = math.ceil(rng.choice([predictions[0] - 1, *predictions]) * request.margin)
    return dataclasses.replace(request, limit=limit)


class Tried(NamedTuple):
    predicted: int
    time: float
    levers: frozenset[str]


def everything(request: Request, ways: list[Way]) -> Iterator[Tried]:
    """Every way to run the batch, allowed or not, found by trying all of them."""
    for way in ways:
        for micro in range(1, min(request.batch_size, request.micro_batch_size or request.batch_size) + 1):
            pieces = piece_count(request.batch_size, micro)
            if way.equal_pieces_only:
                pieces = min(request.batch_size, 2 ** math.ceil(math.log2(pieces)))
            for runs in all_runs(way.chain.segments):
                levers = {"xla"} if way.jit else set()
                levers |= set() if way.exact else {"mixed_precision"}
                levers |= {"recompute"} if runs else set()
                levers |= {"microbatch"} if pieces > 1 else set()
                levers |= {"batch_statistics"} if pieces > 1 and request.caveats else set()
                predicted = predict(way, micro, request.batch_size, runs)
                yield Tried(predicted, time_of(way, pieces, runs), frozenset(levers))


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_plan_is_better_than_the_one_that_is_made(seed):
    rng = random.Random(seed)
    ways = random_ways(rng)
    request = random_request(rng, ways)
    tried = everything(request, ways)
    found = [each for each in tried if each.predicted <= request.most and each.levers <= request.allowed]
    found = [each for each in found if "batch_statistics" not in each.levers] or found
    if not found:
        with pytest.raises(CannotFitError):
            search.fastest(request, ways)
        return
    plan = search.fastest(request, ways)
    best = min(each.time for each in found)
    if best >= 0.95 and any(not each.levers for each in found):
        best = 1.0
    assert plan.relative_time == pytest.approx(best, abs=1e-9)
    assert plan.predicted * request.margin <= request.limit * (1 + 1e-12)
    assert [each.taken for each in plan.alternatives].count(True) == 1
    assert len(plan.alternatives) <= 12
    assert plan == search.fastest(request, ways)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), more=st.integers(1, 100))
def test_more_memory_never_makes_a_slower_plan(seed, more):
    """But for the step as it is, which is kept where it fits though something else may be a little faster."""
    rng = random.Random(seed)
    ways = random_ways(rng)
    request = dataclasses.replace(random_request(rng, ways), caveats=())
    try:
        plan = search.fastest(request, ways)
    except CannotFitError:
        return
    roomier = search.fastest(dataclasses.replace(request, limit=request.limit + more), ways)
    levers = (roomier.micro_batch_size, roomier.recompute, roomier.jit_compile, roomier.precision)
    as_it_is = levers == (None, (), None, None)
    assert roomier.relative_time <= plan.relative_time + 1e-9 or (as_it_is and plan.relative_time >= 0.95)


# What is said.

PLANS = {
    "plan_pieces_and_recomputation": (asked(4), [dataclasses.replace(OWN, piece_cost=0.1), MIXED]),
    "plan_plain": (asked(13, EXACT), [OWN, XLA]),
    "plan_not_exact": (asked(3, EVERYTHING, caveats=CAVEATS), [OWN, XLA, MIXED]),
}
REFUSALS = {
    "plan_refused": (asked(1.5), [OWN, XLA]),
    "plan_refused_by_allow": (asked(3, frozenset({"recompute"}), caveats=CAVEATS, margin=1.1), [OWN, XLA, MIXED]),
    "plan_refused_size": (asked(13, frozenset({"recompute"}), micro_batch_size=64), [OWN]),
}


@pytest.mark.parametrize("name", PLANS)
def test_printed_plan(name):
    assert f"{search.fastest(*PLANS[name])}\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", REFUSALS)
def test_printed_refusal(name):
    with pytest.raises(CannotFitError) as caught:
        search.fastest(*REFUSALS[name])
    assert f"{caught.value}\n" == (GOLDEN / f"{name}.txt").read_text()


def test_what_is_said_to_make_it_fit_does():
    request, all_ways = REFUSALS["plan_refused_by_allow"]
    with pytest.raises(CannotFitError) as caught:
        search.fastest(request, all_ways)
    batch = int(str(caught.value).split("a batch of ")[1].split(",")[0])
    assert search.fastest(dataclasses.replace(request, batch_size=batch), all_ways).recompute == ()
    with pytest.raises(CannotFitError) as caught:
        search.fastest(dataclasses.replace(request, allowed=frozenset(), batch_size=batch + 1), all_ways)
    assert f"a batch of {batch}," in str(caught.value)


def test_one_way_has_to_be_the_users():
    with pytest.raises(ValueError, match="user's own"):
        search.fastest(asked(13), [XLA])


def test_a_plan_survives_json():
    plan = search.fastest(*PLANS["plan_not_exact"])
    assert Plan.from_json(plan.to_json()) == plan


SENTENCES = {
    "batch 1024 as 4 × 256, recomputing 3 of 9 segments: predicted 10.9 of 11.2 GiB, "
    "about 1.2× step time (to be proven on the first batch)": Plan(
        micro_batch_size=256,
        recompute=("a..b", "c"),
        batch_size=1024,
        predicted=int(10.9 * GIB),
        limit=int(11.2 * GIB),
        relative_time=1.18,
        segments=9,
        recomputed=3,
    ),
    "batch 1024 whole: predicted 900 MiB of 1.0 GiB, about 1.0× step time (exact)": Plan(
        batch_size=1024, predicted=900 * MIB, limit=GIB, relative_time=1.0
    ),
    "batch 64 as 2 × 32: predicted 1.0 of 2.0 GiB, about 1.1× step time (exact but for random numbers (drop))": Plan(
        micro_batch_size=32,
        exactness=Exactness("exact but for random numbers", ("drop",)),
        batch_size=64,
        predicted=GIB,
        limit=2 * GIB,
        relative_time=1.1,
    ),
    "batch 64 whole, compiled with XLA, in mixed_bfloat16: predicted 5.0 of 8.0 GiB, about 0.5× step time "
    "(not exact: one; two)": Plan(
        jit_compile=True,
        precision="mixed_bfloat16",
        caveats=("one", "two"),
        batch_size=64,
        predicted=5 * GIB,
        limit=8 * GIB,
        relative_time=0.5,
    ),
    "micro-batches of 128, lean commit": Plan(micro_batch_size=128, lean_commit=True),
    "whole batches, recomputing a..b, c, without XLA": Plan(recompute=("a..b", "c"), jit_compile=False),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentence(sentence):
    assert SENTENCES[sentence].sentence == sentence


def test_a_plan_without_figures_is_brief():
    assert str(Plan(micro_batch_size=128, caveats=("one",))) == "micro-batches of 128\n  not exact: one"
