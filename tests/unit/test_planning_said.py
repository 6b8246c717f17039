"""What plans and refusals say, compared with the files in golden."""

from __future__ import annotations

import dataclasses

import pytest
from planning_ways import CAVEATS, EVERYTHING, EXACT, GIB, GOLDEN, MIB, MIXED, OWN, XLA, asked

from oomproof._planning import search
from oomproof._records.exactness import Exactness
from oomproof._records.plan import Plan
from oomproof.errors import CannotFitError

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
