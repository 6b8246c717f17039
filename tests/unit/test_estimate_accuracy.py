"""The statistics estimates are judged by, on numbers that can be checked by hand; and the search for a batch size."""

from __future__ import annotations

import pytest

from accuracy import by_stack, case, figures, latest, named_share, percentile, truth_of
from search import bracket, next_batch

RUN = {
    "id": "a",
    "model": "mlp",
    "family": "mlp",
    "kind": "dense",
    "half": "scoring",
    "stack": "torch",
    "precision": "float32",
    "batch": 8,
}


def measured(first, later=None, built=10, **more):
    row = {"id": "a", "outcome": "finished", "stack": "torch", "built": {"peak": built}, "first": {"peak": first}}
    return row | ({} if later is None else {"later": {"peak": later}}) | more


def answered(expected, low=0, high=10**9, named=1.0, seconds=1.0):
    return {"low": low, "expected": expected, "high": high, "named": named, "seconds": seconds}


def test_the_truth_is_the_largest_peak_of_any_step():
    assert truth_of(measured(100, 120)) == {"outcome": "finished", "truth": 120}
    assert truth_of(measured(130, 120)) == {"outcome": "finished", "truth": 130}


def test_runs_without_a_peak_say_why():
    assert truth_of({"id": "a", "outcome": "not finished"}) == {"outcome": "not finished", "truth": None}
    assert truth_of(measured(None, None)) == {"outcome": "not measured", "truth": None}


def test_what_tensorflow_takes_to_look_for_kernels_is_kept_beside_the_truth():
    found = truth_of(measured(130, 120, stack="tensorflow-graph"))
    assert found == {"outcome": "finished", "truth": 120, "with_search": 130}
    assert truth_of(measured(130, stack="tensorflow-graph")) == {"outcome": "finished", "truth": 130}


def test_a_peak_from_before_fit_is_no_truth_where_it_cannot_be_reset():
    assert truth_of(measured(100, 100, built=100, stack="jax")) == {"outcome": "peak before fit", "truth": None}
    assert truth_of(measured(101, 101, built=100, stack="jax"))["truth"] == 101
    assert truth_of(measured(90, 90, built=100, stack="torch"))["truth"] == 90


def test_of_several_rows_the_last_that_finished_counts():
    failed, first, second = {"id": "a", "outcome": "failed"}, measured(1), measured(2)
    assert latest([failed, first]) == [first]
    assert latest([first, failed]) == [first]
    assert latest([first, second]) == [second]


def test_figures_by_hand():
    # Errors: +10 %, -20 %, 0, +50 %; the second is above its high, the third below its low.
    cases = [
        case(RUN, measured(100), answered(110, low=90, high=120, named=1.0, seconds=1)),
        case(RUN, measured(100), answered(80, low=70, high=88, named=0.8, seconds=2)),
        case(RUN, measured(100), answered(100, low=101, high=150, named=0.6, seconds=3)),
        case(RUN, measured(100), answered(150, low=90, high=300, named=0.0, seconds=4)),
        case(RUN, {"id": "a", "outcome": "not finished"}, answered(1)),
        case(RUN, None, {}),
        case(RUN, measured(100), {"failed": "ValueError"}),
    ]
    found = figures(cases)
    assert (found["runs"], found["scored"]) == (7, 4)
    assert found["without_truth"] == {"not finished": 1, "not run": 1}
    assert found["without_estimate"] == 1
    assert found["median_absolute_error"] == pytest.approx(0.15)
    assert found["95th_percentile_of_absolute_error"] == pytest.approx(0.5)
    assert found["median_error"] == pytest.approx(0.05)
    assert found["share_with_truth_above_high"] == 0.25
    assert found["share_with_truth_below_low"] == 0.25
    # 120/110, 88/80, 150/100, 300/150: the middle two are 1.1 and 1.5.
    assert found["median_high_over_expected"] == pytest.approx(1.3)
    assert found["median_share_on_named_layers"] == pytest.approx(0.7)
    assert found["median_seconds"] == 2.5


def test_nothing_scored_has_counts_only():
    assert figures([case(RUN, None, {})]) == {
        "runs": 1,
        "scored": 0,
        "without_truth": {"not run": 1},
        "without_estimate": 0,
    }


def test_halves_and_stacks_are_kept_apart():
    cases = [
        case(RUN | {"half": half, "stack": stack}, measured(100, stack=stack), answered(100 + error))
        for half, stack, error in [("scoring", "torch", 1), ("scoring", "jax", 3), ("tuning", "torch", 50)]
    ]
    found = by_stack(cases, "scoring")
    assert list(found) == ["all", "torch", "jax"]
    assert found["torch"]["median_absolute_error"] == pytest.approx(0.01)
    assert found["jax"]["median_absolute_error"] == pytest.approx(0.03)
    assert found["all"]["median_absolute_error"] == pytest.approx(0.02)
    assert by_stack(cases, "tuning")["all"]["median_absolute_error"] == pytest.approx(0.5)


@pytest.mark.parametrize(("share", "value"), [(0.05, 1), (0.5, 10), (0.95, 19), (0.96, 20), (1.0, 20)])
def test_percentiles_are_by_nearest_rank(share, value):
    assert percentile(list(range(20, 0, -1)), share) == value


def test_share_on_named_layers():
    assert named_share([("dense", 30), ("", 10)]) == 0.75
    assert named_share([]) == 0.0


@pytest.mark.parametrize("largest", [1, 2, 3, 47, 100, 1000, 12345])
@pytest.mark.parametrize("start", [1, 16, 4096])
def test_the_search_ends_close_below_the_first_that_fails(largest, start):
    fits, fails = [], []
    while (batch := next_batch(fits, fails, start)) is not None:
        assert batch not in fits + fails
        assert bracket(fits, fails) is None
        (fits if batch <= largest else fails).append(batch)
    low, high = bracket(fits, fails)
    assert low <= largest < high
    assert high - low <= max(1, 0.02 * high)
    assert len(fits) + len(fails) < 30


def test_where_not_even_one_sample_fits_the_search_ends():
    assert next_batch([], [1], 16) is None
    assert bracket([], [1]) == (0, 1)
