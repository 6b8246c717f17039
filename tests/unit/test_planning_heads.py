"""Plans whose head runs in parts: where it can begin, into how many parts it is cut, and what that takes."""

from __future__ import annotations

import dataclasses

import pytest
from planning_ways import CHAIN, EXACT, GIB, OWN, asked, row

from oomproof._planning import heads, remat, search
from oomproof._planning.heads import Head
from oomproof._planning.planner import Planner
from oomproof._planning.ways import Piece, predict, time_of
from oomproof._records.plan import Plan
from oomproof.errors import CannotFitError

# The last segment makes logits, and the loss as much again: two thirds of the peak.
LOGITS = dataclasses.replace(CHAIN.segments[-1], first="logits", last="logits", kept=8 * GIB, work=4 * GIB, crossing=())
LANGUAGE = dataclasses.replace(
    CHAIN, segments=(*CHAIN.segments[:-1], LOGITS), outside=4 * GIB, peak=26 * GIB, heads=tuple(range(1, 9))
)
WAY = dataclasses.replace(OWN, chain=LANGUAGE)
ALLOWED = EXACT | {"head"}


def test_a_head_is_cut_where_that_is_the_fastest():
    plan = search.fastest(asked(20, ALLOWED), [WAY])
    assert (plan.head, plan.micro_batch_size) == ("logits", None)
    assert plan.predicted <= 20 * GIB
    assert plan.relative_time < search.fastest(asked(20), [WAY]).relative_time
    assert row(plan, f"whole, head in {plan.head_parts}").taken
    assert f"the head (logits) in {plan.head_parts} parts" in plan.sentence


def test_no_more_parts_than_needed():
    parts = [search.fastest(asked(limit, ALLOWED), [WAY]).head_parts for limit in (20, 15, 12)]
    assert parts == sorted(parts)
    assert parts[0] < parts[-1]


def test_what_fits_is_left_as_it_is():
    assert search.fastest(asked(27, ALLOWED), [WAY]).head is None


def test_a_head_is_cut_only_where_that_is_allowed():
    assert search.fastest(asked(15), [WAY]).head is None
    with pytest.raises(CannotFitError):
        search.fastest(asked(3, frozenset({"head"})), [WAY])
    assert search.fastest(asked(15, frozenset({"head"})), [WAY]).head == "logits"


def test_together_with_recomputation_and_pieces():
    plan = search.fastest(asked(6, ALLOWED), [WAY])
    assert plan.predicted <= 6 * GIB
    without = search.fastest(asked(6), [WAY])
    assert plan.relative_time <= without.relative_time


def test_nothing_of_the_head_is_recomputed():
    plans = [search.fastest(asked(limit, frozenset({"head", "recompute"})), [WAY]) for limit in (20, 9, 8, 7)]
    assert {plan.head for plan in plans} == {"logits"}
    assert any(plan.recompute for plan in plans)
    assert "logits" not in " ".join(label for plan in plans for label in plan.recompute)


def test_a_small_head_is_left_alone():
    small = dataclasses.replace(LOGITS, kept=GIB // 4, work=GIB // 4)
    chain = dataclasses.replace(LANGUAGE, segments=(*CHAIN.segments[:-1], small), outside=0, peak=11 * GIB, heads=(8,))
    assert not list(heads.worth_trying(chain, 1024))
    assert not list(heads.worth_trying(dataclasses.replace(LANGUAGE, heads=()), 1024))
    assert not list(heads.worth_trying(LANGUAGE, 1))


def test_a_head_begins_where_little_crosses():
    wide = dataclasses.replace(CHAIN.segments[7], crossing=(4 * GIB, 0))
    chain = dataclasses.replace(LANGUAGE, segments=(*CHAIN.segments[:7], wide, LOGITS))
    assert {head.start for head in heads.worth_trying(chain, 1024)} == {7}
    assert {head.start for head in heads.worth_trying(LANGUAGE, 1024)} == {8}


@pytest.mark.parametrize("micro", [1024, 256])
def test_more_parts_take_less_and_longer(micro):
    ways = [dataclasses.replace(WAY, head=Head(8, parts)) for parts in (2, 4, 8, 64)]
    sizes = [predict(way, micro, 1024) for way in ways]
    times = [time_of(way, 1024 // micro) for way in ways]
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)
    assert sizes[0] < predict(WAY, micro, 1024)
    assert times[0] > time_of(WAY, 1024 // micro)


def test_what_the_parts_of_a_step_miss_is_the_heads_where_that_is_the_peak():
    above = dataclasses.replace(LANGUAGE, peak=LANGUAGE.peak + 6 * GIB)
    assert heads.bytes_of(above, 8) == heads.bytes_of(LANGUAGE, 8) + 6 * GIB
    early = dataclasses.replace(CHAIN.segments[0], work=40 * GIB)
    elsewhere = dataclasses.replace(above, segments=(early, *above.segments[1:]), peak=60 * GIB)
    assert heads.missing(elsewhere, 8) == 0


def test_where_gradients_of_parts_are_made_beside_their_sum_they_count_twice():
    in_place, beside = (dataclasses.replace(WAY, head=Head(8, 4), adds_up=adds) for adds in (False, True))
    assert predict(beside, 1024, 1024) - predict(in_place, 1024, 1024) == LOGITS.gradients
    # Fewer samples have no smaller gradients.
    one = heads.with_head(LANGUAGE, Head(8, 4)).segments[-1]
    for micro in (1024, 256):
        last = Piece.of(beside, micro, 1024).segments[-1]
        assert last.work == remat.share(one.work, micro, 1024) + LOGITS.gradients


@pytest.mark.parametrize(("caveats", "taken"), [((), "headed"), (("batch statistics",), "seen")])
def test_where_plans_are_looked_at_what_is_exact_comes_first(caveats, taken):
    """A quicker plan whose head is in parts is not looked at, and beside those that are only where it is as exact."""
    planner = object.__new__(Planner)
    seen = Plan(micro_batch_size=512, relative_time=1.3)
    headed = Plan(head="logits", head_parts=4, relative_time=1.1, caveats=caveats)
    planner._ways = None, []
    planner._seen = lambda *_: seen
    planner._with_head = lambda *_: headed
    assert planner._tried(asked(10, ALLOWED), None, 1.0) is {"seen": seen, "headed": headed}[taken]
