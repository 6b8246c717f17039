"""What is predicted of a plan: bytes and time."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_ways import CHAIN, GIB, MIB, OWN, XLA, asked
from test_remat import chains

from oomproof._planning import search
from oomproof._planning.ways import predict, time_of
from oomproof._records.trace import Chain

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


def test_a_program_has_a_place_for_its_results_all_the_time_and_the_sum_of_gradients_is_in_it():
    gradients, one = 9 * 16 * MIB, 16 * MIB
    in_the_sum = dataclasses.replace(OWN, adds_up=False)
    for commit, beside in ((3 * gradients, 2 * gradients), (gradients, 0), (0, 0)):
        way = dataclasses.replace(OWN, holds_results=True, commit=commit)
        assert predict(way, 256, 1024) == predict(in_the_sum, 256, 1024) + beside + one


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


def test_an_update_by_rows_takes_less_and_changes_no_other_figure():
    whole = dataclasses.replace(CHAIN, update=20 * GIB, peak=22 * GIB)
    way = dataclasses.replace(OWN, chain=whole)
    rows = dataclasses.replace(way, update=64 * MIB)
    assert predict(way, 1024, 1024) == 22 * GIB
    assert predict(rows, 1024, 1024) < 14 * GIB
    # It never takes more than the update that was traced.
    assert predict(dataclasses.replace(way, update=30 * GIB), 1024, 1024) == 22 * GIB
