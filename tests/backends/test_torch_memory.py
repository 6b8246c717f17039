"""What torch and its libraries take beside tensors: workspaces of kernels, and segments of the GPU's allocator."""

import keras
import pytest
from here import only

from oomproof import _backends as backends
from oomproof import _simulators as simulators

pytestmark = only("torch", because="graphs of Python objects")


def traced(model, x, phase="train", **options):
    from oomproof._records.trace import Spec, Target, Workload

    y = None if phase == "predict" else Spec((x[0],), "int32")
    return simulators.trace(
        backends.current(), model, Workload(Spec(x, "float32"), y, phase, False, Target(True), **options)
    )


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


def test_cublas_has_a_workspace_for_each_thread_that_multiplies():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def workspaces(phase):
        large = [b for b in traced(model, (2, 8), phase).buffers if b.start < 0 and b.size > 2**20]
        return len(large)

    assert workspaces("train") == 2
    assert workspaces("predict") == 1


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
