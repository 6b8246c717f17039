"""What only torch has: graphs of Python objects and C++ ones, in which memory stays that nobody wants any more."""

import collections
import gc
import weakref

import keras
import numpy as np
import pytest
import recompute_models
from here import crossed, only, out_of_memory
from hypothesis import given, settings
from hypothesis import strategies as st

import oomproof
from oomproof import _backends as backends

pytestmark = only("torch", because="graphs of Python objects")


DATA = {
    "residual": (recompute_models.IMAGES, recompute_models.CLASSES),
    "transformer": (recompute_models.WORDS, recompute_models.TAGS),
}
SEGMENTS = {
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


@pytest.mark.parametrize(("name", "pieces"), crossed(DATA, [1, 2]))
def test_nothing_is_left_of_steps_wherever_they_fail(name, pieces):
    backend, fails_at = backends.current(), modes()
    model = getattr(recompute_models, name)()
    data = tuple(backend.as_batch(*DATA[name], None))
    step, memory = backend.step(model), backend.memory()
    step.prepare(data, "train")
    step.recompute = SEGMENTS[name]
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


@pytest.mark.parametrize(("name", "pieces"), crossed(DATA, [1, 2]))
def test_nothing_waits_for_the_garbage_collector(name, pieces):
    backend = backends.current()
    model = getattr(recompute_models, name)()
    data = tuple(backend.as_batch(*DATA[name], None))
    step = backend.step(model)
    step.prepare(data, "train")
    step.recompute = SEGMENTS[name]
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
    from oomproof._backends.torch.tree_walks import without_cycles

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


def test_models_trained_side_by_side_put_kerass_walks_back():
    from keras.src.tree import torchtree_impl

    from oomproof._backends.torch.tree_walks import without_cycles

    own = torchtree_impl.traverse
    first, second = without_cycles(), without_cycles()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torchtree_impl.traverse is not own
    second.__exit__(None, None, None)
    assert torchtree_impl.traverse is own


def engine(model):
    from oomproof._backends.torch.engine import TorchEngine

    return TorchEngine(model)


def alive_when_called(call):
    """Of the layers of a chain, how many results of those before are there when each is called."""
    results, counts = [], []

    class Spy(keras.layers.Layer):
        def call(self, inputs):
            counts.append(sum(result() is not None for result in results))
            outputs = inputs + 1
            results.append(weakref.ref(outputs))
            return outputs

    inputs = x = keras.Input((4,))
    for _ in range(6):
        x = Spy()(x)
    inner = keras.Sequential([keras.Input((4,)), Spy(), Spy(), Spy()])
    model = keras.Model(inputs, inner(x))
    results.clear()
    counts.clear()
    import torch

    with torch.no_grad():
        outputs = call(model, torch.zeros(2, 4))
    np.testing.assert_array_equal(outputs.numpy(), np.full((2, 4), 9.0))
    return counts


def test_a_graph_lets_go_of_each_tensor_after_its_last_use():
    """Keras holds all of them until the call is over. What an inner model is given stays with whoever calls it."""
    assert alive_when_called(lambda model, x: model(x)) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert alive_when_called(lambda model, x: engine(model).call(x, training=False)) == [0, 1, 1, 1, 1, 1, 1, 2, 2]


def test_a_model_is_as_it_was_after_a_call():
    model = recompute_models.residual()
    before = dict(vars(model))
    engine(model).call(keras.ops.zeros((2, *model.input_shape[1:])), training=False)
    assert "_run_through_graph" not in vars(model)
    assert vars(model).keys() == before.keys()


def test_a_sequential_model_that_is_built_again_is_run_by_its_new_graph():
    ours = []

    class Looks(keras.layers.Layer):
        def call(self, inputs):
            # While the model is built again there is no graph.
            ours.append(model._functional is not None and "_run_through_graph" in vars(model._functional))
            return inputs

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    runner = engine(model)
    runner.call(keras.ops.zeros((2, 4)), training=False)
    model.add(Looks())
    ours.clear()
    assert runner.call(keras.ops.zeros((2, 4)), training=False).shape == (2, 3)
    assert ours == [True]


def test_normalisers_are_counted_first_only_where_a_mask_reaches_a_loss():
    """Counting takes a forward pass of its own. A mask that pooling has used up is no reason for one."""
    calls = []

    class Counting(keras.layers.Layer):
        def call(self, inputs):
            calls.append(len(inputs))
            return inputs

    def calls_of_second_step(*last):
        words = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(10, 3, mask_zero=True)]
        model = keras.Sequential([*words, *last, Counting(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        oomproof.guard(model, plan=oomproof.Plan(micro_batch_size=4), verbose=0)
        x = np.arange(32).reshape(8, 4) % 10
        y = np.zeros(model.compute_output_shape((8, 4)))
        model.train_on_batch(x, y)
        calls.clear()
        model.train_on_batch(x, y)
        return calls

    assert calls_of_second_step(keras.layers.GlobalAveragePooling1D()) == [4, 4]
    assert calls_of_second_step(keras.layers.Activation("relu")) == [4, 4, 4, 4]


def test_a_mask_that_comes_up_later_counts_from_then_on():
    class Sometimes(keras.layers.Layer):
        supports_masking = True
        on = False

        def call(self, inputs):
            return inputs

        def compute_mask(self, inputs, previous_mask=None):
            return keras.ops.any(inputs > 0.5, axis=-1) if self.on else None

    def trained(guarded):
        keras.utils.set_random_seed(1)
        layer = Sometimes()
        model = keras.Sequential([keras.Input((5, 3)), layer, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.5), "mse")
        if guarded:
            oomproof.guard(model, plan=oomproof.Plan(micro_batch_size=3), verbose=0)
        rng = np.random.default_rng(0)
        x, y = rng.random((8, 5, 3)).astype("float32"), rng.random((8, 5, 2)).astype("float32")
        for on in (False, True, False, True):
            layer.on = on
            model.train_on_batch(x, y)
        return model.get_weights()

    for ours, keras_own in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(ours, keras_own, rtol=1e-5, atol=1e-6)


def test_an_estimate_of_pieces_is_of_what_guard_runs():
    """Keras holds the results of all layers through the forward pass, whether the backward pass needs them or not."""
    inputs = x = keras.Input((256,))
    for _ in range(6):
        x = keras.layers.Add()([keras.layers.Dense(256)(x), x])
    model = keras.Model(inputs, keras.layers.Dense(4)(x))
    model.compile("sgd", "mse")
    plain = oomproof.estimate(model, 8192, memory="8GiB", engine="trace").expected
    pieces = oomproof.estimate(model, 16384, micro_batch_size=8192, memory="8GiB", engine="trace").expected
    assert pieces < 0.8 * plain
