"""The order of an epoch: every sample once, the same for the same seed and epoch, at any position."""

from __future__ import annotations

import numpy as np
import pytest

from oomproof.data.order import InOrder, Shuffled, ShuffledBlocks, _keys, permuted

ORDERS = [
    InOrder(1000),
    Shuffled(1000, 3),
    Shuffled(2**20 + 7, 3),
    ShuffledBlocks([100, 1, 250, 17, 632], 3, mix=2),
    ShuffledBlocks([1000], 3, mix=4),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{type(order).__name__} {order.count}")
def test_every_sample_once_an_epoch(order) -> None:
    parts = [order.samples(2, start, start + 4099) for start in range(0, order.count, 4099)]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(order.count))


@pytest.mark.parametrize("order", ORDERS[1:4], ids=lambda order: f"{type(order).__name__} {order.count}")
def test_a_position_gives_the_same_samples_whoever_asks(order) -> None:
    whole = order.samples(5, 0, 1000)
    np.testing.assert_array_equal(order.samples(5, 333, 777), whole[333:777])
    assert (order.samples(6, 0, 1000) != whole).any()


def test_seed_and_epoch_are_not_mixed_up() -> None:
    orders = [tuple(Shuffled(50, seed).samples(epoch, 0, 50)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


@pytest.mark.parametrize("count", [2, 3, 5, 64, 1000, 4097])
def test_the_network_is_a_permutation(count) -> None:
    found = permuted(np.arange(count), count, _keys(1, 1))
    np.testing.assert_array_equal(np.sort(found), np.arange(count))


def test_the_network_mixes() -> None:
    """Where a sample goes, over many epochs, is spread evenly (chi-squared, 64 bins), and neighbours part."""
    count, epochs = 2**20 + 7, 2000
    places = np.array([permuted(np.array([5, 6]), count, _keys(9, epoch)) for epoch in range(epochs)])
    hits = np.bincount(places[:, 0] * 64 // count, minlength=64)
    chi_squared = ((hits - epochs / 64) ** 2 / (epochs / 64)).sum()
    assert chi_squared < 110  # 63 degrees of freedom: beyond this once in 4,000 tries.
    correlation = np.corrcoef(places[:, 0], places[:, 1])[0, 1]
    assert abs(correlation) < 0.1


def test_blocks_are_mixed_a_few_at_a_time() -> None:
    order = ShuffledBlocks([10] * 12, 1, mix=3)
    blocks = order.samples(0, 0, 120) // 10
    for group in blocks.reshape(4, 30):
        assert len(set(group.tolist())) == 3
        assert (np.diff(group) != 0).sum() > 10  # Not one block after the other.
    assert (order.samples(1, 0, 120) // 10 != blocks).any()
