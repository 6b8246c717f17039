"""Which size comes next: a pure function, so whole stories can be told in a millisecond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomproof._backends.pieces import usual_count
from oomproof._training import piece_sizes
from oomproof._training.piece_sizes import Evidence

FREE = 1_000_000
LINEAR = st.tuples(st.integers(0, FREE // 2), st.integers(1, 5000))  # fixed, slope


def measured(fixed: int, slope: int, *sizes: int) -> Evidence:
    evidence = Evidence()
    for size in sizes:
        evidence = evidence.with_need(size, fixed + slope * size)
    return evidence


@given(failed=st.integers(2, 10**6), free=st.none() | st.integers(0, 10**9), sizes=st.lists(st.integers(1, 4096)))
def test_the_next_size_is_strictly_smaller_and_at_least_one(failed, free, sizes):
    after = piece_sizes.smaller(measured(100, 7, *sizes).with_failure(failed, free), failed, free)
    assert 1 <= after < failed


@pytest.mark.parametrize("failed", [1, 8])
def test_nothing_is_smaller_than_the_smallest(failed):
    assert piece_sizes.smaller(Evidence(), failed, FREE, least=failed) is None


def test_with_nothing_measured_it_halves():
    assert piece_sizes.smaller(Evidence().with_failure(64, FREE), 64, FREE) == 32
    assert piece_sizes.smaller(Evidence().with_failure(64, None), 64, None) == 32


@given(line=LINEAR, batch=st.integers(64, 4096))
def test_a_step_that_is_linear_is_sized_right_the_first_time(line, batch):
    fixed, slope = line
    fits = min(batch, (FREE - fixed) // slope)  # The largest size that works.
    probed = max(1, min(fits // 3, batch // 2))
    evidence = measured(fixed, slope, 1, probed)
    size = evidence.largest(FREE, batch)
    assert fixed + slope * size <= FREE
    # Most of what is possible, where the two sizes are far enough apart to show the slope.
    if fits >= 30 and slope * probed > fixed:
        assert size >= 0.7 * fits


@given(line=LINEAR, sizes=st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_one_measurement_never_promises_too_much(line, sizes):
    fixed, slope = line
    size = measured(fixed, slope, *sizes).largest(FREE, 10**9)
    assert size == 0 or size <= max(sizes) or fixed + slope * size <= FREE


def test_of_measurements_of_one_size_the_largest_counts():
    evidence = Evidence().with_need(100, 50).with_need(101, 80).with_need(100, 60)
    assert evidence.predict(100) == 80
    assert len(evidence.needs) == 1


def test_a_size_that_failed_is_not_tried_again_in_the_same_memory():
    evidence = measured(0, 10, 100).with_failure(1000, FREE)
    assert evidence.largest(FREE, 2000) < 1000
    assert evidence.largest(int(FREE * 1.05), 2000) < 1000
    assert evidence.largest(FREE * 2, 2000) == 2000


@given(line=LINEAR, batch=st.integers(2, 4096))
def test_probes_end_and_stay_within_memory(line, batch):
    fixed, slope = line
    evidence, probes = Evidence(), 0
    while (size := piece_sizes.next_probe(evidence, FREE, batch, 1, 0.93)) is not None:
        # The one risk that is taken: two samples, where one needs more than half of what there is.
        assert size <= 2 or fixed + slope * size <= FREE
        evidence, probes = evidence.with_need(size, fixed + slope * size), probes + 1
        assert probes <= 30


def test_after_a_probe_that_failed_the_next_is_between_it_and_what_went_through():
    evidence = Evidence().with_need(4, 900).with_failure(100, FREE)
    assert piece_sizes.next_probe(evidence, FREE, 2000, 4, 0.93) == 20
    assert piece_sizes.next_probe(evidence.with_need(68, 900), FREE, 2000, 4, 0.93) is None
    # The batch itself has failed: that is why there are probes.
    whole = Evidence().with_need(4, 900).with_failure(2000, FREE)
    assert piece_sizes.next_probe(whole, FREE, 2000, 4, 0.93) == piece_sizes.next_probe(
        Evidence().with_need(4, 900), FREE, 2000, 4, 0.93
    )


def test_probes_are_whole_samples():
    evidence = Evidence().with_need(48, 1000)
    assert piece_sizes.next_probe(evidence, FREE, 48 * 64, 48, 0.93) % 48 == 0


def test_growing_wants_room_and_a_gain_that_is_worth_it():
    evidence = measured(0, 1000, 100, 400)
    assert piece_sizes.larger(evidence, 400, 1000 * 1000, 2000) >= 500
    assert piece_sizes.larger(evidence, 400, 1000 * 450, 2000) is None
    assert piece_sizes.larger(evidence, 400, 10**9, 2000) == 2000
    assert piece_sizes.larger(Evidence(), 400, 10**9, 2000) is None


def test_growing_does_not_oscillate():
    """A size that grew, failed and shrank does not grow again while memory is as it was."""
    evidence = measured(0, 1000, 100, 400).with_failure(800, FREE)
    size = piece_sizes.smaller(evidence, 800, FREE)
    for _ in range(10):
        grown = piece_sizes.larger(evidence, size, FREE, 2000)
        assert grown is None or size < grown < 800
        size = grown or size


def test_measurements_that_promised_too_much_are_believed_less_each_time():
    evidence = Evidence().with_need(10, 100)  # By this, 1000 would need 10,000.
    for size, most in ((1000, 900), (900, 675), (600, 300), (200, 100)):
        evidence = evidence.with_failure(size, 20_000)
        assert piece_sizes.smaller(evidence, size, 20_000) <= most


@given(batch=st.integers(1, 3000), least=st.integers(1, 3000))
def test_usual_counts_are_few_and_never_too_small(batch, least):
    count = usual_count(batch, min(least, batch))
    assert min(least, batch) <= count <= batch
    assert batch % count == 0 or count & (count - 1) == 0


def test_a_last_piece_of_another_size_is_left_out_where_it_can_be():
    assert [usual_count(100, n) for n in (2, 3, 5, 6, 9)] == [2, 4, 5, 8, 10]
    assert [usual_count(96, n) for n in (3, 5, 7, 9)] == [3, 6, 8, 12]
    assert usual_count(7, 3) == 4
    assert usual_count(7, 5) == 7
