"""Steps traced with fake tensors, against what real steps on the CPU allocate."""

import dataclasses
import resource
import statistics

import keras
import numpy as np
import pytest
from here import only
from keras import layers

from oomproof._records.trace import Spec, Target, Workload
from oomproof.errors import UnsupportedModelError

pytestmark = only("torch", because="a step traced with fake tensors")

BATCH = 16
CPU = Target(gpu=False)


def plain():
    return keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]
    )


def residual():
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(2):
        y = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
        y = layers.BatchNormalization()(y)
        x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def depthwise():
    inputs = keras.Input((16, 16, 3))
    x = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=8)(inputs)
    x = layers.Conv2D(32, 1, activation="swish")(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def transformer():
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(100, 32)(inputs)
    y = layers.MultiHeadAttention(4, 8, name="attention")(x, x)
    x = layers.LayerNormalization()(layers.Add()([x, y]))
    x = layers.Dense(32, name="down")(layers.Dense(128, activation="gelu")(x))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def recurrent():
    return keras.Sequential(
        [keras.Input((12, 8)), layers.LSTM(32, return_sequences=True), layers.GRU(32), layers.Dense(4)]
    )


def table():
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(5000, 32)(inputs))
    return keras.Model(inputs, layers.Dense(4)(layers.Dense(64, activation="relu")(x)))


def two_inputs():
    image, vector = keras.Input((16, 16, 1)), keras.Input((20,))
    x = layers.Flatten()(layers.Conv2D(8, 3, activation="relu")(image))
    x = layers.Concatenate()([x, layers.Dense(32, activation="tanh")(vector)])
    return keras.Model([image, vector], layers.Dense(4)(layers.Dense(64, activation="relu")(x)))


def upwards():
    inputs = keras.Input((16,))
    x = layers.Reshape((4, 4, 32))(layers.Dense(512)(inputs))
    for filters in (16, 8):
        x = layers.Conv2DTranspose(filters, 4, strides=2, padding="same")(x)
        x = layers.LeakyReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


MODELS = [plain, residual, depthwise, transformer, recurrent, table, two_inputs, upwards]


def compiled(build, optimizer="adam", policy="float32"):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    try:
        model = build()
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def workload(model, phase="train", target=CPU, batch=BATCH, jit=False):
    x = [Spec((batch, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]
    return Workload(x if len(x) > 1 else x[0], Spec((batch,), "int32"), phase, jit, target)


def traced(model, *args, **kwargs):
    return traced_step(model, workload(model, *args, **kwargs))


def traced_step(model, step):
    from oomproof._simulators.torch.trace import trace

    return trace(model, step)


def rounded(size):
    return -(-size // 512) * 512


def peak(trace):
    """(bytes, op) at the highest point."""
    change = np.zeros(len(trace.ops) + 1, dtype="int64")
    for buffer in trace.buffers:
        change[max(buffer.start, 0)] += rounded(buffer.size)
        change[min(buffer.end + 1, len(trace.ops))] -= rounded(buffer.size)
    use = np.cumsum(change[:-1])
    return int(use.max()), int(use.argmax())


def at(trace, op):
    return [buffer for buffer in trace.buffers if buffer.start <= op <= buffer.end]


def allocated(model):
    """Peak of the second of two real steps, as torch's own profiler saw it."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    rng = np.random.default_rng(0)

    def values(spec):
        made = rng.integers(0, 4, spec.shape) if "int" in spec.dtype else rng.normal(size=spec.shape)
        return torch.as_tensor(made.astype(spec.dtype))

    task = workload(model)
    data = keras.tree.map_structure(values, (task.x, task.y))
    model.train()
    there = [*(v.value for v in model.variables), *(v.value for v in model.optimizer.variables)]
    use = sum(rounded(t.untyped_storage().nbytes()) for t in (*there, *keras.tree.flatten(data)))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        logs = model.train_step(data)
        with record_function("second"):
            logs = model.train_step(data)
    assert logs
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    second = next(event.start_ns() for event in events if event.name() == "second")
    highest = 0
    for event in events:
        if event.name() == "[memory]":
            size = event.nbytes()
            use += rounded(size) if size > 0 else -rounded(-size)
            highest = max(highest, use if event.start_ns() >= second else 0)
    return highest


def test_peaks_are_those_of_real_steps():
    errors = {}
    for number, build in enumerate(MODELS):
        optimizer, policy = ("adam", "sgd")[number % 2], ("float32", "mixed_bfloat16")[number // 2 % 2]
        model = compiled(build, optimizer, policy)
        estimate, _ = peak(traced(model))
        errors[build.__name__] = abs(estimate / allocated(model) - 1)
    assert statistics.median(errors.values()) < 0.03, errors
    assert max(errors.values()) < 0.25, errors


def state(model):
    """What a trace must leave alone."""
    import torch

    shared = keras.src.backend.common.global_state.get_global_attribute("object_name_uids")
    return {
        "values": [(id(v.value), v.value.detach().numpy().tobytes()) for v in model.variables],
        "gradients": [v.value.grad is None for v in model.variables],
        "parameters": [id(parameter) for parameter in model.parameters()],
        "optimizer": (model.optimizer.built, [id(v) for v in model.optimizer.variables]),
        "metrics": [(metric.name, len(metric.variables)) for metric in model.metrics],
        "attributes": sorted(vars(model)),
        "functions": (model.train_function, model.test_function, model.predict_function),
        "generator": torch.get_rng_state().numpy().tobytes(),
        "training": model.training,
        "names": dict(shared),
    }


@pytest.mark.parametrize("target", [CPU, Target()], ids=["cpu", "gpu"])
@pytest.mark.parametrize("fitted", [False, True])
def test_the_model_is_left_as_it_was(target, fitted):
    model = compiled(plain)
    if fitted:
        model.fit(np.zeros((4, 24, 24, 3)), np.zeros(4), verbose=0)
    before = state(model)
    traced(model, target=target)
    assert state(model) == before
    model.fit(np.zeros((4, 24, 24, 3)), np.zeros(4), verbose=0)


def test_layers_and_stages():
    trace = traced(compiled(transformer), target=Target())
    stages = [op.stage for op in trace.ops]
    assert stages == sorted(stages, key=["forward", "backward", "update"].index)
    layers_seen = {(op.stage, op.layer) for op in trace.ops}
    assert {("forward", "attention/query"), ("backward", "attention/query")} <= layers_seen
    assert {buffer.layer for buffer in trace.buffers if buffer.category == "gradients"} >= {"attention/query", "down"}
    trace = traced(compiled(transformer))
    there = at(trace, peak(trace)[1])
    assert sum(b.size for b in there if b.layer) > 0.9 * sum(b.size for b in there)


def test_slots_and_old_gradients_are_counted():
    trace = traced(compiled(table))
    weights = sum(buffer.size for buffer in trace.buffers if buffer.category == "weights")
    slots = [buffer for buffer in trace.buffers if buffer.category == "optimizer"]
    old = [buffer for buffer in trace.buffers if buffer.category == "gradients" and buffer.start == -1]
    assert sum(buffer.size for buffer in slots) == pytest.approx(2 * weights, rel=0.01)
    assert sum(buffer.size for buffer in old) == pytest.approx(weights, rel=0.01)
    first_backward = [op.stage for op in trace.ops].index("backward")
    assert all(buffer.end < first_backward for buffer in old)


@pytest.mark.parametrize("target", [CPU, Target()], ids=["cpu", "gpu"])
def test_evaluation_and_prediction_need_less(target):
    peaks = [peak(traced(compiled(residual), phase, target))[0] for phase in ("train", "test", "predict")]
    assert peaks[0] > peaks[1] >= peaks[2]


def test_attention_recurrence_and_dropout_take_the_kernels_of_a_gpu():
    names = {op.name for build in (transformer, plain) for op in traced(compiled(build), target=Target()).ops}
    assert {"aten._scaled_dot_product_efficient_attention", "aten.native_dropout"} <= names
    assert len(traced(compiled(recurrent), target=Target()).ops) < len(traced(compiled(recurrent)).ops) / 2
    half = traced(compiled(transformer, policy="mixed_bfloat16"), target=Target())
    assert "aten._scaled_dot_product_flash_attention" in {op.name for op in half.ops}


@pytest.mark.parametrize(("channels", "counted"), [(8, 0), (3, 8), (12, 16)])
def test_images_with_odd_channels_are_copied_with_more(channels, counted):
    import torch

    from oomproof._simulators.torch.workspaces import Workspaces

    image = torch.empty((4, channels, 10, 10), dtype=torch.float16).to(memory_format=torch.channels_last)
    weights = torch.empty((16, channels, 3, 3), dtype=torch.float16).to(memory_format=torch.channels_last)
    result = torch.nn.functional.conv2d(image, weights)
    taken = Workspaces(Target())(torch.ops.aten.convolution.default, (image, weights), result)
    assert taken == 2 * (16 * channels * 9 + 4 * 100 * counted)


def test_nothing_large_is_allocated():
    model = compiled(residual)
    traced(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size, _ = peak(traced(model, batch=16384, target=Target()))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert size > 2 * 2**30
    assert grown < 200 * 2**20


def test_compiled_steps_come_with_a_note():
    assert "torch.compile" in traced(compiled(table), jit=True).notes[0]
    assert traced(compiled(table)).notes == ()


def test_gradients_of_other_pieces_are_there_all_the_time():
    model = compiled(lambda: keras.Sequential([keras.Input((8,)), *(layers.Dense(64, name=f"d{i}") for i in range(4))]))
    guarded = dataclasses.replace(workload(model), guarded=True)
    alone, later = (traced_step(model, dataclasses.replace(guarded, later_piece=later)) for later in (False, True))
    size = sum(rounded(weight.numpy().nbytes) for weight in model.trainable_weights)

    def gradients(trace, op):
        return sum(rounded(buffer.size) for buffer in at(trace, op) if buffer.category == "gradients")

    # Whole, there are none in the forward pass; as a later piece, those of the pieces before, and all of them later on.
    assert gradients(alone, 0) == 0
    assert gradients(alone, len(alone.ops) - 1) == size
    assert gradients(later, 0) == size
    assert size <= max(gradients(later, op) for op in range(len(later.ops))) < 2 * size
    # All of them belong to somebody.
    for trace in (alone, later):
        assert {b.layer for b in trace.buffers if b.category == "gradients"} == {f"d{i}" for i in range(4)}


def test_gradients_of_a_layer_that_is_called_twice_are_added_up_before_they_join_the_others():
    def build():
        inputs, shared = keras.Input((64,)), layers.Dense(64, name="shared")
        return keras.Model(inputs, shared(layers.Dense(64, name="between")(shared(inputs))))

    model = compiled(build)
    trace = traced_step(model, dataclasses.replace(workload(model), guarded=True, later_piece=True))
    moments = {b.layer: b.end - b.start for b in trace.buffers if b.category == "gradients" and b.start >= 0}
    assert moments["between"] == 1
    assert moments["shared"] > 3


def test_recomputation_is_traced_on_a_machine_with_a_gpu_as_on_one_without(monkeypatch):
    model = compiled(lambda: keras.Sequential([keras.Input((8,)), *(layers.Dense(8, name=f"d{i}") for i in range(4))]))
    import torch

    step = dataclasses.replace(workload(model, target=Target(True, (8, 0))), recompute=("d0..d1",))
    without = peak(traced_step(model, step))
    # There torch would look after the random state of a device that tensors of a trace are not on.
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.zeros(16))
    assert peak(traced_step(model, step)) == without


def test_bad_input():
    from oomproof._simulators.torch.trace import trace

    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        trace("model", Workload(Spec((1,), "float32"), None, "train", False))
    model = table()
    with pytest.raises(ValueError, match="Expected a model that is compiled"):
        trace(model, workload(model))
    with pytest.raises(ValueError, match="Expected a model that is built"):
        trace(keras.Sequential([layers.Dense(1)]), Workload(Spec((1, 1), "float32"), None, "predict", False))
    model = compiled(table)
    with pytest.raises(TypeError, match="Expected a `Spec`"):
        trace(model, Workload(np.zeros((4, 8)), Spec((4,), "int32"), "train", False))


class Picky(layers.Layer):
    def call(self, x):
        return x[x[:, 0] > 0]

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_sizes_that_depend_on_data_are_refused():
    model = compiled(lambda: keras.Sequential([keras.Input((4,)), Picky(name="picky"), layers.Dense(4)]))
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=r"'picky'.*depends on the data"):
        traced(model)
    assert state(model) == before
