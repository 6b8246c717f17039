"""Plans that are looked at: which one is taken when its own trace says more, or less, than was predicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomproof._planning import trial
from oomproof._records.plan import Alternative, Plan
from oomproof._records.trace import Buffer, Op, Trace
from oomproof.errors import CannotFitError

GIB = 2**30
LIMIT = 10 * GIB
ROOM = LIMIT / trial._BEYOND_TRACE
PAGE = 20 * 2**20


class Planner:
    """Plans that are predicted to take all that the margin leaves, and take `off` times that.

    The more of the limit a plan may take the faster it is: its pieces are as many samples as it takes MiB.
    """

    def __init__(self, off, least_margin=0.0, grain=1):
        self.off, self.least_margin, self.grain = off, least_margin, grain
        self.looks = []

    def fastest(self, margin):
        if margin > 2:
            raise CannotFitError("too much")
        predicted = int(LIMIT / max(margin, self.least_margin)) // self.grain * self.grain
        row = Alternative("some", predicted, 1.0, True, True, "")
        return Plan(micro_batch_size=predicted // 2**20, predicted=predicted, alternatives=(row,))

    def trace_of(self, plan):
        self.looks.append(plan)
        size = int(plan.predicted * self.off)
        return Trace("expandable", (Op("op", "forward", ""),), (Buffer(size, 0, 0, "temporary", ""),))

    def make(self, least=0):
        return trial.fastest_tried(trial.MARGIN, LIMIT, self.fastest, self.trace_of, lambda plan: least)


def test_a_plan_that_fills_the_room_is_taken_at_once():
    planner = Planner(off=1.0)
    plan = planner.make()
    assert len(planner.looks) == 1
    assert plan.micro_batch_size == planner.looks[0].micro_batch_size


def test_where_it_takes_less_than_predicted_a_faster_one_is_found():
    planner = Planner(off=0.8)
    plan = planner.make()
    assert len(planner.looks) == 2
    assert trial._FULL * ROOM < plan.predicted <= ROOM
    # What is said is what was seen, in the table, too.
    assert plan.predicted == pytest.approx(0.8 * planner.looks[-1].predicted, rel=1e-6)
    assert [row.predicted for row in plan.alternatives] == [plan.predicted]


def test_where_it_takes_more_one_is_found_that_goes_through():
    planner = Planner(off=1.3)
    plan = planner.make()
    assert len(planner.looks) == 2
    assert plan.predicted <= ROOM


def test_between_one_that_goes_through_and_one_that_does_not_the_middle_is_looked_at():
    # The first leaves room, the next is too bold by what sizes come in.
    planner = Planner(off=0.9)
    planner.fastest = lambda margin: Planner.fastest(planner, margin if margin > 1 else margin * 0.9)
    plan = planner.make()
    first, bold, last = (look.predicted * 0.9 for look in planner.looks)
    assert first < last < bold
    assert plan.predicted == pytest.approx(last if last <= ROOM else first, rel=1e-6)


def test_and_so_it_is_when_the_bold_one_came_first():
    planner, margins = Planner(off=1.0), []
    sizes = iter([1.2 * ROOM, 0.6 * ROOM, 0.8 * ROOM])

    def fastest(margin):
        margins.append(margin)
        return Planner.fastest(planner, LIMIT / next(sizes))

    planner.fastest = fastest
    assert planner.make().predicted == pytest.approx(0.8 * ROOM, rel=1e-6)
    assert margins[2] == pytest.approx((margins[0] * margins[1]) ** 0.5)


def test_the_same_plan_is_not_looked_at_twice():
    planner = Planner(off=0.5, least_margin=1.0)
    planner.fastest = lambda margin: Planner.fastest(planner, 1.1)
    planner.make()
    assert len(planner.looks) == 1


def test_where_nothing_else_fits_the_last_plan_is_tried_all_the_same():
    planner = Planner(off=3.0)
    plan = planner.make()
    assert len(planner.looks) == 1
    assert plan.micro_batch_size == planner.looks[0].micro_batch_size
    # And says that it will not.
    assert plan.predicted == pytest.approx(3.0 * planner.looks[0].predicted, rel=1e-2)
    assert plan.predicted > LIMIT


def test_what_a_plan_takes_anyway_counts():
    planner = Planner(off=0.5)
    plan = planner.make(least=int(0.99 * ROOM))
    assert len(planner.looks) == 1
    assert plan.predicted == int(0.99 * ROOM)


def test_a_plan_that_takes_too_much_anyway_is_not_seen_to_fit():
    planner = Planner(off=0.7)
    first = planner.fastest(trial.MARGIN).micro_batch_size
    plan = trial.fastest_tried(
        trial.MARGIN,
        LIMIT,
        planner.fastest,
        planner.trace_of,
        lambda plan: 0 if plan.micro_batch_size == first else int(1.3 * ROOM),
    )
    assert len(planner.looks) > 1
    assert plan.micro_batch_size == first


@given(off=st.floats(0.5, 1.5), grain=st.integers(1, 3 * GIB))
def test_what_was_seen_to_go_through_is_what_is_taken(off, grain):
    planner = Planner(off, grain=grain)
    plan = planner.make()
    assert len(planner.looks) <= 3
    taken = [look.predicted * off for look in planner.looks]
    # Pages are taken whole.
    fitting = [size for size in taken if -(-size // PAGE) * PAGE <= ROOM]
    if fitting:
        assert plan.predicted == pytest.approx(max(fitting), rel=1e-6)


def test_a_lean_update_is_not_the_one_that_was_traced():
    ops = Op("forward", "forward", ""), Op("update", "update", ""), Op("after", "update", "")
    weight, kept = Buffer(100, -1, 3, "weights", ""), Buffer(30, 1, 3, "optimizer", "")
    trace = Trace("bfc", ops, (weight, Buffer(50, 0, 0, "activations", ""), Buffer(500, 1, 2, "temporary", ""), kept))
    lean = trial.with_update_of(trace, 7)
    assert {(b.size, b.start, b.end) for b in lean.buffers} == {(100, -1, 3), (50, 0, 0), (7, 1, 1), (30, 1, 3)}
    forward = Trace("bfc", ops[:1], trace.buffers[:2])
    assert trial.with_update_of(forward, 7) is forward
