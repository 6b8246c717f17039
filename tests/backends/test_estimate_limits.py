"""Does it fit, and the largest batch that does."""

import types

import pytest
from estimated import MIB, conv_net, wide_net
from here import BACKEND

import oomproof
from oomproof import _simulators as simulators
from oomproof._estimation import estimating
from oomproof._estimation.cards import limit_of
from oomproof._estimation.engines.base import Answer
from oomproof._machine import gpus
from oomproof._records.run import Device

# What was measured, and what there is


@pytest.mark.parametrize(
    ("known", "here", "fits"),
    [
        ({"measured": True}, False, True),
        ({"tuned": True}, True, True),
        # Planned by another card's autotuner, or by none.
        ({"tuned": True}, False, False),
        ({}, True, False),
    ],
)
def test_a_step_that_went_through_fits_however_little_it_left(monkeypatch, known, here, fits):
    card = {} if here else {"memory": "4GiB"}
    monkeypatch.setattr(gpus, "local", lambda: gpus.of_memory("4GiB"))
    limit = oomproof.estimate(conv_net(), 8, engine="trace", **card).limit

    def answer(question):
        trace = simulators.trace(question.backend, question.model, question.workload)
        # On JAX the batch to come is put on the device, too.
        room = limit - 2 * MIB
        return Answer(trace, peak=room, **known)

    monkeypatch.setattr(
        estimating, "engine_for", lambda name, question: ("probe", types.SimpleNamespace(answer=answer))
    )
    found = oomproof.estimate(conv_net(), 8, engine="probe", **card)
    assert found.expected < limit
    assert found.fits == fits
    assert (found.high <= limit) == fits


@pytest.mark.parametrize("known", [{"tuned": True}, {"measured": True}])
def test_the_largest_batch_is_found_in_few_looks_where_all_that_fits_ends_at_the_limit(monkeypatch, known):
    monkeypatch.setattr(gpus, "local", lambda: gpus.of_memory("4GiB"))
    looked = []

    def answer(question):
        looked.append(question.workload.x.shape[0])
        trace = simulators.trace(question.backend, question.model, question.workload)
        return Answer(trace, peak=100 * MIB + 11 * MIB * looked[-1], **known)

    monkeypatch.setattr(
        estimating, "engine_for", lambda name, question: ("probe", types.SimpleNamespace(answer=answer))
    )
    model = wide_net("sgd")
    found = oomproof.max_batch_size(model, engine="probe")
    limit = oomproof.estimate(model, 1, engine="probe").limit
    assert 0.97 * (limit - 100 * MIB) < 11 * MIB * found <= limit - 100 * MIB
    assert len(looked) <= 9


def test_the_card_at_hand_may_have_less_than_others_of_its_kind():
    card = gpus.find("t4")
    usable = card.usable(BACKEND)

    def limit(at_hand, here=True):
        memory = types.SimpleNamespace(describe=lambda: Device("GPU:0", at_hand, True))
        return limit_of(card, types.SimpleNamespace(name=BACKEND, memory=lambda: memory), here=here)

    assert limit(usable // 2) == usable // 2
    assert limit(2 * usable) == usable
    assert limit(None) == usable
    assert limit(usable // 2, here=False) == usable


# The largest batch


def test_the_largest_batch_fits_and_a_percent_more_does_not():
    model = conv_net()
    # Half a gigabyte is taken by the context on torch, a quarter is left out by JAX.
    options = {"memory": "3GiB", "engine": "trace"}
    size = oomproof.max_batch_size(model, **options)
    assert oomproof.estimate(model, size, **options).fits
    assert not oomproof.estimate(model, size + max(2, size // 50), **options).fits


def test_not_even_one_sample():
    # Hardly more than the frameworks keep back: about 1 MiB is left on JAX, and less than that on the others.
    memory = {"tensorflow": "1786MiB", "jax": "2MiB", "torch": "501MiB"}[BACKEND]
    with pytest.raises(oomproof.CannotFitError, match="One sample at a time needs"):
        oomproof.max_batch_size(wide_net("adam"), memory=memory, engine="trace")


def test_no_card_to_fit_into():
    with pytest.raises(ValueError, match="This machine has none"):
        oomproof.max_batch_size(conv_net())
