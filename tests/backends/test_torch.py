"""What only torch has: graphs of Python objects and C++ ones, in which memory stays that nobody wants any more."""

import collections
import gc

import keras
import numpy as np
import pytest
import recompute_models
from here import only, out_of_memory
from hypothesis import given, settings
from hypothesis import strategies as st

from oomproof import backends

pytestmark = only("torch", because="graphs of Python objects")

DATA = {
    "residual": (recompute_models.IMAGES, recompute_models.CLASSES),
    "transformer": (recompute_models.WORDS, recompute_models.TAGS),
}
STRETCHES = {
    "residual": ("norm_0..add_0", "norm_1..add_1"),
    "transformer": ("before_0..sum_0", "before_1..sum_1"),
}


def modes():
    from torch.utils._python_dispatch import TorchDispatchMode

    class FailsAt(TorchDispatchMode):
        """Counts ops, and runs out of memory at one of them."""

        def __init__(self, at=None):
            super().__init__()
            self.count, self.at = 0, at

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            if self.count == self.at:
                raise out_of_memory()
            return func(*args, **(kwargs or {}))

    return FailsAt


def live():
    """Bytes of all tensors there are."""
    import torch

    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", DATA)
def test_nothing_is_left_of_steps_wherever_they_fail(name, pieces):
    backend, fails_at = backends.current(), modes()
    model = getattr(recompute_models, name)()
    data = tuple(backend.as_batch(*DATA[name], None))
    step, memory = backend.step(model), backend.memory()
    step.prepare(data, "train")
    step.recompute = STRETCHES[name]
    step.train(data, pieces, False)
    with fails_at() as counted:
        step.train(data, pieces, False)
    memory.release()
    before = live()
    for share in np.linspace(0.05, 0.95, 10):
        shortage = None
        try:
            with fails_at(int(counted.count * share)):
                step.train(data, pieces, False)
        except Exception as error:
            shortage = memory.shortage(error)
        assert shortage is not None
        del shortage
        memory.release()
        assert live() == before, share


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", DATA)
def test_nothing_waits_for_the_garbage_collector(name, pieces):
    backend = backends.current()
    model = getattr(recompute_models, name)()
    data = tuple(backend.as_batch(*DATA[name], None))
    step = backend.step(model)
    step.prepare(data, "train")
    step.recompute = STRETCHES[name]
    step.train(data, pieces, False)
    gc.collect()
    before = live()
    gc.disable()
    try:
        for _ in range(3):
            step.train(data, pieces, False)
        # Numbers of a few bytes may wait; activations have hundreds.
        assert live() < before + 256
    finally:
        gc.enable()


LEAVES = st.one_of(st.none(), st.integers(0, 3), st.text(max_size=2))
Pair = collections.namedtuple("Pair", "first second")
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("cab"), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(STRUCTURES, st.booleans())
def test_walks_without_cycles_find_what_kerass_own_find(structure, top_down):
    from oomproof.backends.torch.trees import without_cycles

    def change(node):
        return node + 1 if isinstance(node, int) else keras.tree.MAP_TO_NONE if node == "a" else None

    def found():
        return (
            keras.tree.flatten(structure),
            keras.tree.map_structure(str, structure),
            keras.tree.traverse(change, structure, top_down=top_down),
            keras.tree.lists_to_tuples(structure),
        )

    plain = found()
    with without_cycles():
        assert repr(found()) == repr(plain)
