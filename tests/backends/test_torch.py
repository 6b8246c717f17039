"""What only torch has: graphs of Python objects and C++ ones, in which memory stays that nobody wants any more."""

import collections
import gc
import weakref

import keras
import numpy as np
import pytest
import recompute_models
from here import only, out_of_memory
from hypothesis import given, settings
from hypothesis import strategies as st

import oomproof
from oomproof import _backends as backends
from oomproof import _simulators as simulators

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


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", DATA)
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


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", DATA)
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


def traced(model, x, phase="train", **options):
    from oomproof._records.trace import Spec, Target, Workload

    y = None if phase == "predict" else Spec((x[0],), "int32")
    return simulators.trace(
        backends.current(), model, Workload(Spec(x, "float32"), y, phase, False, Target(True), **options)
    )


def test_cublas_has_a_workspace_for_each_thread_that_multiplies():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def workspaces(phase):
        large = [b for b in traced(model, (2, 8), phase).buffers if b.start < 0 and b.size > 2**20]
        return len(large)

    assert workspaces("train") == 2
    assert workspaces("predict") == 1


def test_the_step_of_a_guarded_model_is_traced_without_garbage():
    block = keras.Sequential([keras.layers.LayerNormalization(), keras.layers.Dense(32, activation="gelu")])
    inputs = x = keras.Input((16, 32))
    for _ in range(12):
        x = keras.layers.Add()([x, block(x)])
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def waits(guarded):
        """How long activations are held, in bytes times ops."""
        return sum(b.size * (b.end - b.start) for b in traced(model, (64, 16, 32), guarded=guarded).buffers)

    assert waits(guarded=True) < waits(guarded=False)


def test_what_cudnn_works_in_for_recurrent_layers_is_as_it_was_seen():
    def temporary(layer, policy):
        layer = layer(32, return_sequences=True, dtype=policy)
        model = keras.Sequential([keras.Input((8, 16)), layer, keras.layers.GlobalAveragePooling1D()])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return max(b.size for b in traced(model, (64, 8, 16)).buffers if b.category == "temporary" and b.start >= 0)

    # In single precision for each time step of a sample, in half precision for each unit of those, and 8 MiB. Beside it
    # the inputs and the gradient by the outputs, with time first.
    copies = 64 * 8 * (16 + 32)
    assert temporary(keras.layers.LSTM, "float32") == (2450 * 64 * 8 + copies) * 4 + 8 * 2**20
    assert temporary(keras.layers.GRU, "mixed_float16") == (6 * 64 * 8 * 32 + copies) * 2 + 8 * 2**20


def test_what_cudnn_keeps_of_recurrent_layers_is_as_it_was_seen():
    def kept(layer):
        recurrent = layer(32, return_sequences=True, name="recurrent")
        model = keras.Sequential([keras.Input((8, 16)), recurrent, keras.layers.GlobalAveragePooling1D()])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        buffers = traced(model, (64, 8, 16)).buffers
        return max(b.size for b in buffers if b.category == "activations" and b.layer.startswith("recurrent"))

    assert kept(keras.layers.LSTM) == 5 * 64 * 8 * 32 * 4
    assert kept(keras.layers.GRU) == 6 * 64 * 8 * 32 * 4


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


# Segments of the GPU's allocator


@pytest.mark.parametrize(
    ("said", "grow"),
    [
        ({}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, True),
    ],
)
def test_what_the_user_said_about_segments_stands(said, grow, monkeypatch):
    import torch

    from oomproof._backends.torch import expandable

    told = []
    for name in expandable._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(expandable, "get_device", lambda: "cuda")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    expandable._switch_on.cache_clear()
    expandable.let_grow()
    expandable.let_grow()
    assert expandable.grow() is grow
    own = "expandable" in str(said) or "Async" in str(said)
    assert told == ([] if own else [",".join([*said.values(), "expandable_segments:True"])])


def test_a_torch_that_cannot_be_told_is_left_alone(monkeypatch):
    import torch

    from oomproof._backends.torch import expandable

    def refuse(settings):
        raise RuntimeError("not on this platform")

    for name in expandable._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(expandable, "_refused", [])
    monkeypatch.setattr(expandable, "get_device", lambda: "cuda")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    expandable._switch_on.cache_clear()
    assert expandable.grow()
    expandable.let_grow()
    assert expandable._refused == ["not on this platform"]
    # Plans are then made for segments as they come.
    assert not expandable.grow()
    expandable._switch_on.cache_clear()


def test_a_model_on_a_cpu_leaves_the_gpu_as_it_is(monkeypatch):
    import torch

    from oomproof._backends.torch import expandable

    told = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    expandable._switch_on.cache_clear()
    expandable.let_grow()
    assert told == []


@pytest.mark.parametrize(
    ("said", "refused", "advised"),
    [("", [], False), ("expandable_segments:False", [], True), ("expandable_segments:False", ["no"], False)],
)
def test_memory_in_pieces_is_said_where_something_can_be_done_about_it(said, refused, advised, monkeypatch):
    import torch

    from oomproof._backends.torch import expandable

    for name in expandable._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
    monkeypatch.setattr(expandable, "_refused", refused)
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 5.00 GiB is allocated by PyTorch, and "
        "3.00 GiB is reserved by PyTorch but unallocated."
    )
    found = backends.current().memory().shortage(error)
    assert "2.00 GiB" in found.text
    assert ("expandable_segments:True in the environment" in found.text) is advised
