from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomproof._planning import remat
from oomproof._records.trace import Segment

Runs = tuple[tuple[int, int], ...]


def segment(label: str, kept: int = 10, crossing: tuple[int, ...] = (), **more: object) -> Segment:
    fields = {"work": 0, "gradients": 0, "cost": 0.1, **more}
    return Segment(label, label, kept, crossing, **fields)  # type: ignore[arg-type]


def uniform(count: int, **fields: object) -> list[Segment]:
    return [segment(f"layer_{index}", **fields) for index in range(count)]  # type: ignore[arg-type]


@st.composite
def chains(draw: st.DrawFn, least: int = 0, most: int = 7) -> list[Segment]:
    """Chains in which what is needed later never grows; in two graphs, and some of them not to be recomputed."""
    count = draw(st.integers(least, most))
    second = draw(st.integers(0, 2 * count))
    made = []
    for index in range(count):
        label = f"{'inner/' if index >= second else ''}layer_{index}"
        crossing = sorted(draw(st.lists(st.integers(0, 30), max_size=3)), reverse=True)
        made.append(
            Segment(
                label,
                label,
                kept=draw(st.integers(0, 30)),
                crossing=tuple(crossing),
                work=draw(st.integers(0, 20)),
                gradients=draw(st.integers(0, 10)),
                cost=draw(st.integers(0, 8)) / 64,
                recomputable=draw(st.sampled_from([True, True, True, False])),
            )
        )
    return made


def all_runs(segments: Sequence[Segment], start: int = 0) -> Iterator[Runs]:
    """Every set of runs that is allowed."""
    if start >= len(segments):
        yield ()
        return
    yield from all_runs(segments, start + 1)
    for end in range(start + 1, len(segments) + 1):
        inside = segments[start:end]
        graphs = {label.rpartition("/")[0] for each in inside for label in (each.first, each.last)}
        if len(graphs) > 1 or not all(each.recomputable for each in inside):
            return
        yield from (((start, end), *rest) for rest in all_runs(segments, end))


def simulated_peak(segments: Sequence[Segment], runs: Runs) -> int:
    """The same as `remat.peak`, the slow way: every moment on its own, and the end of the forward pass."""
    run_of = {at: run for run in runs for at in range(*run)}

    def crossing(at: int) -> int:
        further = run_of[at][1] - 1 - at
        return (*segments[at].crossing, *[0] * len(segments))[further]

    def remaining(at: int) -> int:
        return crossing(at) if at in run_of else segments[at].kept

    moments = [sum(remaining(at) for at in range(len(segments)))]
    for at in range(len(segments)):
        start, _ = run_of.get(at, (at, at + 1))
        # Of what was made again for a run, all that came before this segment is still there.
        own = sum(max(segments[i].kept, crossing(i)) if i in run_of else segments[i].kept for i in range(start, at + 1))
        moments.append(
            sum(remaining(i) for i in range(start))
            + own
            + segments[at].work
            + sum(each.gradients for each in segments[at:])
        )
    return max(moments)


def preference(segments: Sequence[Segment], runs: Runs, run_cost: float = 0.0) -> tuple[float, int, int]:
    recomputed = [at for run in runs for at in range(*run)]
    return sum(segments[at].cost for at in recomputed) + run_cost * len(runs), len(runs), len(recomputed)


@settings(max_examples=300, deadline=None)
@given(segments=chains())
def test_the_peak_is_the_largest_of_all_moments(segments):
    for runs in all_runs(segments):
        assert remat.peak(segments, runs) == simulated_peak(segments, runs)


@settings(max_examples=600, deadline=None)
@given(segments=chains(), share=st.floats(0, 1), run_cost=st.sampled_from([0.0, 1 / 64, 1 / 4]))
def test_the_choice_is_the_best_of_all(segments, share, run_cost):
    peaks = {runs: remat.peak(segments, runs) for runs in all_runs(segments)}
    lowest, highest = min(peaks.values()), max(peaks.values())
    room = int(lowest - 3 + share * (highest - lowest + 6))
    fitting = [runs for runs, peak in peaks.items() if peak <= room]
    chosen = remat.choose(segments, room, run_cost)
    if not fitting:
        assert chosen is None
    else:
        assert peaks[chosen] <= room
        best = min(preference(segments, runs, run_cost) for runs in fitting)
        assert preference(segments, chosen, run_cost) == best


@settings(max_examples=200, deadline=None)
@given(segments=chains())
def test_the_least_peak_is_the_least_of_all(segments):
    assert remat.peak(segments, remat.least(segments)) == min(remat.peak(segments, runs) for runs in all_runs(segments))


def test_nothing_is_recomputed_where_everything_fits():
    segments = uniform(5)
    assert remat.choose(segments, 50) == ()
    assert remat.choose([], 0) == ()
    assert remat.peak([], ()) == 0


def test_of_equal_costs_the_fewest_runs_and_then_the_shortest():
    # The first two fit one by one as well as together.
    segments = uniform(4, crossing=(1,))
    assert remat.peak(segments, ((0, 1), (1, 2))) == 22
    assert remat.choose(segments, 22) == ((0, 2),)
    free = [dataclasses.replace(each, cost=0.0) for each in uniform(4)]
    assert remat.choose(free, 30) == ((0, 1),)


def test_where_it_costs_to_begin_a_run_there_are_fewer():
    costs = (0.1, 0.12, 0.11)
    segments = [segment(f"layer_{index}", cost=cost) for index, cost in enumerate(costs)]
    segments.append(segment("end", kept=20, recomputable=False))
    # Twenty bytes have to go: the two cheapest, or two neighbours.
    assert remat.choose(segments, 30) == ((0, 1), (2, 3))
    assert remat.choose(segments, 30, run_cost=0.05) == ((0, 2),)


def test_a_run_keeps_what_is_needed_after_its_end():
    """A skip connection from the first segment to the last makes a long run keep it, and a longer one not."""
    segments = [segment("a", crossing=(8, 8)), segment("b", crossing=(1,)), segment("c"), segment("d")]
    assert remat.peak(segments, ((0, 2),)) == max(20, 9 + 20)
    assert remat.peak(segments, ((0, 3),)) == max(30, 0 + 10)


def test_gradients_of_weights_count_from_the_end():
    segments = uniform(3, gradients=5)
    assert remat.peak(segments, ()) == max(10 + 15, 20 + 10, 30 + 5)
    # In a run likewise: it lets go of what it made as its backward pass goes on.
    assert remat.peak(segments, ((0, 3),)) == max(10 + 15, 20 + 10, 30 + 5)


@pytest.mark.parametrize(
    "labels", [("a", "inner/b"), ("inner/a", "other/b"), ("inner/a", "inner/deeper/b")], ids=lambda labels: labels[1]
)
def test_a_run_stays_within_one_graph(labels):
    segments = [segment(label) for label in labels]
    # Room for what one run over both would need, and for nothing else.
    assert remat.choose([*segments, segment("end", kept=20, recomputable=False)], 20) == ((0, 1), (1, 2))
    crossing = Segment(*labels, kept=10, crossing=(), work=0, gradients=0, cost=0.1)
    assert remat.choose([crossing, segment("end", kept=20, recomputable=False)], 20) is None


def test_long_chains_get_an_answer_close_to_the_best():
    """With equal segments the best is known: all but what still fits besides one long run."""
    segments = uniform(200, kept=1000, crossing=(100,), cost=1 / 200)
    chosen = remat.choose(segments, 100_000)
    assert remat.peak(segments, chosen) <= 100_000
    assert preference(segments, chosen)[0] <= 101 / 200 + 0.02
    assert remat.choose(segments, remat.peak(segments, remat.least(segments))) is not None


def test_the_same_chain_gives_the_same_runs():
    segments = uniform(30, kept=7, crossing=(2, 1))
    assert len({remat.choose(segments, 90) for _ in range(3)}) == 1
