"""The allocators' rules, by hand, and what must hold whatever is asked for."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomproof._estimation.allocator import RULES, Heap, goes_through, places, replay
from oomproof._records.trace import Buffer, Op, Trace

MIB = 2**20


def traced(allocator, count, *spans):
    buffers = tuple(Buffer(size, start, end, "temporary", "") for size, start, end in spans)
    return Trace(allocator, tuple(Op("op", "forward", "") for _ in range(count)), buffers)


def test_bfc_rounds_to_256_bytes():
    heap = Heap(RULES["bfc"])
    heap.take(1)
    heap.take(257)
    assert heap.in_use == 256 + 512


def test_bfc_hands_out_a_block_whole_that_is_not_twice_the_request():
    heap = Heap(RULES["bfc"])
    first, _ = heap.take(100 * MIB), heap.take(MIB)
    heap.give(first)
    heap.take(60 * MIB)
    assert heap.in_use == 101 * MIB


def test_bfc_splits_a_block_of_twice_the_request():
    heap = Heap(RULES["bfc"])
    first, _ = heap.take(100 * MIB), heap.take(MIB)
    heap.give(first)
    heap.take(50 * MIB)
    assert heap.in_use == 51 * MIB
    heap.take(50 * MIB)
    assert heap.reserved == 101 * MIB


def test_bfc_splits_off_a_rest_of_128_mib():
    heap = Heap(RULES["bfc"])
    first, _ = heap.take(500 * MIB), heap.take(MIB)
    heap.give(first)
    heap.take(372 * MIB)
    assert heap.in_use == 373 * MIB


def test_on_a_cpu_what_is_left_of_a_region_is_handed_out_whole():
    heap = Heap(RULES["bfc-growing"])
    heap.take(MIB)
    assert heap.in_use == MIB  # Half of the first region, of 2 MiB.
    heap.take(3 * MIB)
    assert heap.in_use == 5 * MIB  # A region of 4 MiB.
    heap.take(20 * MIB)
    assert heap.in_use == 37 * MIB  # One of 32 MiB, the next that is large enough.
    heap.take(20 * MIB)
    assert (heap.in_use, heap.reserved) == (69 * MIB, 70 * MIB)


def test_neighbours_that_are_free_become_one():
    heap = Heap(RULES["bfc"])
    blocks = [heap.take(10 * MIB) for _ in range(3)]
    heap.take(MIB)
    for block in (blocks[0], blocks[2], blocks[1]):
        heap.give(block)
    heap.take(30 * MIB)
    assert heap.reserved == 31 * MIB


def test_torch_takes_segments():
    heap = Heap(RULES["caching"])
    heap.take(100)
    assert (heap.in_use, heap.reserved) == (512, 2 * MIB)
    heap.take(3 * MIB)
    assert heap.reserved == 22 * MIB
    heap.take(11 * MIB)
    assert heap.reserved == 22 * MIB  # The rest of the segment before has room for it.
    heap.take(25 * MIB + 1)
    assert heap.reserved == 22 * MIB + 26 * MIB


def test_torch_keeps_a_large_block_whole_for_a_rest_of_one_mib():
    heap = Heap(RULES["caching"])
    heap.give(heap.take(30 * MIB))
    heap.take(29 * MIB)
    assert heap.in_use == 30 * MIB


def test_torch_gives_no_block_of_one_pool_to_the_other():
    heap = Heap(RULES["caching"])
    heap.give(heap.take(30 * MIB))
    heap.take(1000)
    assert heap.reserved == 32 * MIB


@pytest.mark.parametrize("allocator", ["bfc", "bfc-growing", "xla", "caching", "expandable"])
def test_the_moment_of_the_peak(allocator):
    trace = traced(allocator, 3, (4 * MIB, -1, 3), (8 * MIB, 0, 1), (16 * MIB, 1, 2))
    found = replay(trace)
    assert found.at == 1
    assert found.peak == 28 * MIB
    assert len(found.live) == 3
    assert found.timeline == (12 * MIB, 28 * MIB, 20 * MIB)


def test_xla_packs_what_does_not_meet_into_one_place():
    found = replay(traced("xla", 4, *((MIB, op, op) for op in range(4))))
    assert found.peak == MIB


def test_nothing_at_all():
    assert replay(traced("bfc", 0)).peak == 0
    assert replay(traced("xla", 0)).peak == 0


spans = st.lists(
    st.tuples(st.integers(1, 40 * MIB), st.integers(0, 30), st.integers(0, 30)).map(
        lambda span: (span[0], min(span[1:]), max(span[1:]))
    ),
    max_size=60,
)


@given(spans, st.sampled_from(["bfc", "xla", "caching", "expandable"]))
def test_what_holds_whatever_is_asked_for(spans, allocator):
    found = replay(traced(allocator, 31, *spans))
    live = [sum(size for size, start, end in spans if start <= op <= end) for op in range(31)]
    assert found.peak >= max(live)
    assert found.reserved >= found.peak
    # Never more than twice what is asked for, and the rounding.
    assert found.peak <= 2 * max(live) + 512 * len(spans) + (0 if allocator != "xla" else 40 * MIB * len(spans))


@given(spans)
def test_blocks_in_use_never_overlap(spans):
    heap = Heap(RULES["bfc"])
    blocks = {}
    for op in range(31):
        for index, (size, start, _) in enumerate(spans):
            if start == op:
                blocks[index] = heap.take(size)
        held = sorted((block.start, block.start + block.size) for block in blocks.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(held))
        assert heap.in_use == sum(block.size for block in blocks.values())
        for index, (_, _, end) in enumerate(spans):
            if end == op:
                heap.give(blocks.pop(index))


@given(spans)
def test_what_xla_packs_never_overlaps(spans):
    buffers = traced("xla", 31, *spans).buffers
    lying = list(zip(buffers, places(buffers), strict=True))
    for (a, at), (b, there) in itertools.combinations(lying, 2):
        if a.start <= b.end and b.start <= a.end:
            assert at + a.size <= there or there + b.size <= at


@pytest.mark.parametrize("allocator", ["bfc", "caching", "expandable"])
def test_what_the_step_before_left_behind_is_there_until_it_is_let_go_of(allocator):
    # Old gradients, until the second op; then new ones, until the end.
    step = traced(allocator, 4, (60 * MIB, -1, 1), (40 * MIB, 0, 1), (60 * MIB, 2, 4), (20 * MIB, 3, 3))
    found = replay(step)
    assert [size // MIB for size in found.timeline] == [100, 100, 60, 80]
    assert found.peak == 100 * MIB


# Whether a step goes through within a limit


def test_of_free_blocks_of_a_size_the_one_at_the_lowest_address_is_taken():
    heap = Heap(RULES["bfc"])
    low, _, high, _ = (heap.take(size * MIB) for size in (4, 1, 4, 1))
    heap.give(low)
    heap.give(high)
    assert [heap.take(4 * MIB).start for _ in range(2)] == [low.start, high.start]


def test_what_was_needed_to_make_weights_leaves_gaps():
    # One table of 10 MiB is drawn with two more of its size, whose gap of 20 MiB the second is too large to share.
    lasting = [Buffer(size * MIB, -1, 1, "weights", "", drawn=drawn) for size, drawn in ((10, True), (12, False))]
    trace = Trace("bfc", (Op("op", "forward", ""),), tuple(lasting))
    assert replay(trace).peak == 30 * MIB
    plain = Trace("bfc", trace.ops, tuple(Buffer(b.size, -1, 1, "weights", "") for b in lasting))
    assert replay(plain).peak == 22 * MIB


def test_what_the_first_step_makes_lies_where_there_was_room_then():
    # The slot gets its place while both tensors are there. Afterwards it parts the room into 11 and 9 MiB, and the
    # larger tensor takes more than the rest of it.
    ops = tuple(Op("op", "forward", "") for _ in range(3))
    slot = Buffer(MIB, -1, 3, "optimizer", "", first=1)
    tensors = (Buffer(11 * MIB, 0, 1, "temporary", ""), Buffer(9 * MIB, 2, 2, "temporary", ""))
    assert replay(Trace("bfc", ops, (slot, *tensors))).timeline == (12 * MIB, 12 * MIB, 12 * MIB)
    before = Buffer(MIB, -1, 3, "optimizer", "")
    assert replay(Trace("bfc", ops, (before, *tensors))).timeline == (12 * MIB, 12 * MIB, 10 * MIB)


def test_torch_gives_segments_back_that_nobody_uses_before_it_runs_out():
    # 30 MiB, then 40: the first segment is too small for the second request, and in its way.
    step = traced("caching", 2, (30 * MIB, 0, 0), (40 * MIB, 1, 1))
    assert replay(step).reserved == 70 * MIB
    assert goes_through(step, 40 * MIB)
    assert not goes_through(step, 39 * MIB)


def test_torch_cannot_use_what_is_free_beside_what_is_used():
    # 20 MiB stay of the segment of 60 that they were cut from, so of 100 MiB there are 40 left, and 40 in two parts.
    step = traced("caching", 3, (60 * MIB, 0, 0), (20 * MIB, 1, 2), (60 * MIB, 2, 2))
    assert replay(step).peak == 80 * MIB
    assert not goes_through(step, 100 * MIB)
    assert goes_through(step, 120 * MIB)


def test_segments_that_grow_lend_what_is_free_between_blocks():
    # The same as above: the free part of the first segment is given back page by page.
    step = traced("expandable", 3, (60 * MIB, 0, 0), (20 * MIB, 1, 2), (60 * MIB, 2, 2))
    assert replay(step).peak == 80 * MIB
    assert goes_through(step, 80 * MIB)
    assert not goes_through(step, 79 * MIB)


def test_pages_that_nobody_uses_are_given_back_before_it_runs_out():
    # The first 40 MiB are too small for the last request, and 20 MiB lie behind them.
    step = traced("expandable", 2, (40 * MIB, 0, 0), (20 * MIB, 0, 1), (60 * MIB, 1, 1))
    assert replay(step).reserved == 120 * MIB
    assert goes_through(step, 80 * MIB)
    assert not goes_through(step, 79 * MIB)


def test_a_page_is_taken_whole():
    step = traced("expandable", 1, (21 * MIB, 0, 0), (512, 0, 0))
    assert replay(step).reserved == 40 * MIB + 2 * MIB
    assert not goes_through(step, 41 * MIB)


@pytest.mark.parametrize("allocator", ["caching", "expandable"])
@given(st.lists(st.tuples(st.integers(1, 50 * MIB), st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_what_goes_through_without_a_limit_goes_through_with_all_that_it_took(allocator, spans):
    step = traced(allocator, 6, *[(size, min(a, b), max(a, b)) for size, a, b in spans])
    took = replay(step)
    assert goes_through(step, took.reserved)
    assert not spans or not goes_through(step, took.peak - 1)
