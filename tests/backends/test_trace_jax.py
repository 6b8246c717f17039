"""What a JAX step needs, before it runs: its trace, and XLA's own account of it compiled and not run."""

import importlib.util

import keras
import numpy as np
import pytest
from here import only
from keras import layers

from oomproof._records.trace import Spec, Target, Workload
from oomproof.errors import BackendError

pytestmark = only("jax", because="programs planned by XLA")


HAS_COMPILER = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
GPU, CPU = Target(gpu=True, capability=(8, 0)), Target(gpu=False)
SPARSE = "sparse_categorical_crossentropy"
FEATURES = 64


def tools():
    """The modules under test, which only JAX can import."""
    from oomproof._simulators.jax import compile as compiling
    from oomproof._simulators.jax import trace as tracing

    return tracing.trace, compiling


def trace(model, workload):
    return tools()[0](model, workload)


def peak(traced):
    """The most that is there at once, without what packing adds."""
    change = [0] * (len(traced.ops) + 2)
    for buffer in traced.buffers:
        change[max(buffer.start, 0)] += buffer.size
        change[min(buffer.end, len(traced.ops) - 1) + 1] -= buffer.size
    return max(np.cumsum(change[: len(traced.ops)]))


def mlp(optimizer="adam", policy="float32"):
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(128, "relu", name="first", dtype=policy),
            layers.Dropout(0.1, name="drop", dtype=policy),
            layers.Dense(256, "tanh", name="second", dtype=policy),
            layers.Dense(4, "softmax", name="last", dtype="float32"),
        ],
        name="outermost",
    )
    model.compile(optimizer, SPARSE, metrics=["accuracy"])
    return model


def nested():
    keras.utils.clear_session(free_memory=False)
    block = keras.Sequential([keras.Input((32,)), layers.Dense(32, "gelu", name="dense")], name="block_1")
    encoder = keras.Sequential([keras.Input((32,)), block], name="encoder")
    x = keras.Input((32,))
    model = keras.Model(x, layers.Dense(4, "softmax", name="head")(encoder(x)), name="outermost")
    model.compile("adam", SPARSE)
    return model


def step(batch=256, phase="train", jit=True, target=GPU, features=FEATURES):
    y = None if phase == "predict" else Spec((batch,), "int32")
    return Workload(Spec((batch, features), "float32"), y, phase, jit, target)


def bytes_of(variables):
    return sum(int(np.prod(v.shape)) * 4 for v in variables)


def of(traced, category):
    return [buffer for buffer in traced.buffers if buffer.category == category]


def state(model):
    """Everything a trace might touch, by identity where that can be told."""
    return (
        [(v.path, id(v._value)) for v in model.variables],
        {name: id(value) for name, value in vars(model).items() if not name.startswith("_tracker")},
        model.optimizer.built,
        [(v.path, id(v._value)) for v in model.optimizer.variables],
        [v.path for v in model.metrics_variables],
    )


@pytest.mark.parametrize("phase", ["train", "test", "predict"])
def test_the_model_stays_as_it_was(phase):
    model = mlp()
    before = state(model)
    trace(model, step(phase=phase))
    tools()[1].compile_step(model, step(phase=phase, target=CPU))
    assert state(model) == before
    assert keras.src.backend.common.global_state.get_global_attribute("uninitialized_variables") in (None, [])


def test_a_traced_model_trains_as_one_that_was_not():
    x, y = np.ones((32, FEATURES), "float32"), np.arange(32) % 4
    losses = []
    for traced in (False, True):
        keras.utils.set_random_seed(3)
        model = mlp()
        if traced:
            trace(model, step(32))
        losses.append(model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False).history["loss"])
    assert losses[0] == losses[1]


def test_metrics_that_are_built_when_first_updated_stay_unbuilt():
    model = mlp()
    model.compile("sgd", "mse", metrics=[keras.metrics.R2Score()])
    x, y = np.ones((8, FEATURES), "float32"), np.ones((8, 4), "float32")
    trace(model, Workload(Spec(x.shape, "float32"), Spec(y.shape, "float32"), "train", True, GPU))
    assert "r2_score" in model.fit(x, y, verbose=0).history


def test_nothing_large_is_allocated():
    import jax

    model = mlp()
    before = {id(array) for array in jax.live_arrays()}
    trace(model, step(2**20))
    new = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in new) < 2**16


def test_slots_are_counted_before_and_after_they_exist():
    model = mlp("adam")
    fresh = trace(model, step())
    slots = sum(buffer.size for buffer in of(fresh, "optimizer"))
    assert abs(slots - 2 * bytes_of(model.trainable_variables)) < 64
    model.fit(np.ones((8, FEATURES)), np.zeros(8), verbose=0)
    assert of(trace(model, step()), "optimizer") == of(fresh, "optimizer")
    assert sum(buffer.size for buffer in of(trace(mlp("sgd"), step()), "optimizer")) < 64


def test_buffers_stay_within_the_step():
    traced = trace(mlp(), step())
    count = len(traced.ops)
    assert traced.allocator == "xla"
    assert all(-1 <= buffer.start <= buffer.end <= count and buffer.size > 0 for buffer in traced.buffers)


def test_layers_and_stages():
    traced = trace(mlp(), step())
    assert {op.stage for op in traced.ops} == {"forward", "backward", "update"}
    assert {"first", "second", "last"} <= {op.layer for op in traced.ops}
    assert {buffer.layer for buffer in of(traced, "optimizer") if buffer.size > 8} == {"first", "second", "last"}
    products = [op for op in traced.ops if op.name == "dot_general"]
    # A product forward; two backward but for the first layer, whose input needs no gradient.
    assert [op.stage for op in products if op.layer == "second"] == ["forward", "backward", "backward"]
    assert [op.stage for op in products if op.layer == "first"] == ["forward", "backward"]


def test_layers_of_layers_have_paths():
    traced = trace(nested(), step(features=32))
    assert {"encoder/block_1/dense", "head"} <= {op.layer for op in traced.ops}
    assert {"encoder/block_1/dense", "head"} == {buffer.layer for buffer in of(traced, "weights") if buffer.size > 8}
    assert not any("outermost" in op.layer for op in traced.ops)


def test_what_backward_needs_is_activations():
    traced = trace(mlp(), step(1024))
    kept = of(traced, "activations")
    assert {"first", "second"} <= {buffer.layer for buffer in kept}
    backward = next(index for index, op in enumerate(traced.ops) if op.stage == "backward")
    assert max(buffer.end for buffer in kept) > backward
    assert of(traced, "gradients")


def test_the_other_phases_keep_nothing():
    whole, test, predict = (trace(mlp(), step(4096, phase)) for phase in ("train", "test", "predict"))
    assert peak(whole) > peak(test)
    assert not of(test, "activations")
    assert not of(predict, "optimizer")
    assert {op.stage for op in predict.ops} == {"forward"}
    # Predictions are there when the step is over.
    assert any(buffer.end == len(predict.ops) and buffer.size == 4096 * 4 * 4 for buffer in of(predict, "temporary"))


def test_batches_cost_in_proportion():
    small, large, larger = (peak(trace(mlp(), step(batch))) for batch in (4096, 8192, 16384))
    assert 1.9 < (larger - large) / (large - small) < 2.1


def test_half_precision_halves_activations():
    single, half = (trace(mlp(policy=policy), step(65536)) for policy in ("float32", "mixed_bfloat16"))
    first, first_half = ([b.size for b in of(t, "activations") if b.layer == "first"] for t in (single, half))
    assert first == [2 * size for size in first_half]
    assert peak(half) < 0.75 * peak(single)
    assert [b.size for b in of(half, "weights")] == [b.size for b in of(single, "weights")]


def test_without_fusion_more_is_kept():
    fused, plain = (trace(mlp(), step(65536, jit=jit)) for jit in (True, False))
    assert plain.allocator == "bfc"
    assert peak(plain) > peak(fused)


def test_loops_count_what_they_stack_and_what_is_inside():
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((20, 8)), layers.GRU(32, name="gru"), layers.Dense(4, "softmax")])
    model.compile("sgd", SPARSE)
    batch = 512
    traced = trace(model, Workload(Spec((batch, 20, 8), "float32"), Spec((batch,), "int32"), "train", True, GPU))
    stacked = [buffer for buffer in of(traced, "activations") if buffer.size == 20 * batch * 32 * 4]
    assert len(stacked) >= 4
    assert {buffer.layer for buffer in stacked} == {"gru"}


def test_loops_are_known_in_the_words_of_either_jax():
    """From 0.11 on a scan says what it carries as trees of its operands: those of all rounds, carried, and given."""
    import jax

    from oomproof._simulators.jax import jaxpr

    def loop(carry, given):
        return jax.lax.scan(lambda carry, x: ((carry[0] + x, carry[1] * x), x), carry, given)

    (scan,) = jax.make_jaxpr(loop)((1.0, 2.0), np.ones(3, "float32")).eqns
    older = dict(scan.params) | {"num_carry": 2}
    newer = {name: value for name, value in older.items() if name != "num_carry"}
    newer["ft_in"] = type("Trees", (), {"unpack": lambda self: ((), (None, None), (None,))})()
    assert [jaxpr._facts(scan.replace(params=params), "scan", [], True)["carried"] for params in (older, newer)] == [
        2,
        2,
    ]


def test_on_a_gpu_an_lstm_is_cudnns():
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((20, 8)), layers.LSTM(32, name="lstm"), layers.Dense(4, "softmax")])
    model.compile("sgd", SPARSE)
    x, y = Spec((64, 20, 8), "float32"), Spec((64,), "int32")
    there, here = (trace(model, Workload(x, y, "train", True, target)) for target in (GPU, CPU))
    assert "rnn_bwd" in {op.name for op in there.ops}
    assert any("cuDNN" in note for note in there.notes)
    assert "scan" in {op.name for op in here.ops}


def test_attention_in_half_precision_is_cudnns_on_cards_that_can():
    heads, length, batch = 4, 256, 8

    def attention(policy):
        keras.utils.clear_session(free_memory=False)
        words = keras.Input((length, FEATURES))
        mixed = layers.MultiHeadAttention(heads, FEATURES // heads, dtype=policy)(words, words)
        model = keras.Model(words, layers.Dense(1, dtype="float32")(mixed))
        model.compile("sgd", "mse")
        return model

    def kept(policy, capability):
        x, y = Spec((batch, length, FEATURES), "float32"), Spec((batch, length, 1), "float32")
        traced = trace(attention(policy), Workload(x, y, "train", True, Target(True, capability)))
        return peak(traced), any("cuDNN" in note for note in traced.notes)

    scores = batch * heads * length * length * 2
    (old, told_old), (new, told_new) = kept("mixed_bfloat16", (7, 5)), kept("mixed_bfloat16", (8, 0))
    assert old - new > scores
    assert (told_old, told_new) == (False, True)
    # Single precision is no matter of cuDNN.
    assert kept("float32", (8, 0)) == kept("float32", (7, 5))


def test_recomputed_layers_keep_less():
    def deep(mode):
        keras.utils.clear_session(free_memory=False)
        x = inputs = keras.Input((256,))
        for index in range(6):
            with keras.RematScope(mode=mode):
                x = layers.Dense(256, "gelu", name=f"dense_{index}")(x)
        model = keras.Model(inputs, layers.Dense(4, "softmax")(x))
        model.compile("sgd", SPARSE)
        return peak(trace(model, step(16384, features=256)))

    assert deep("full") < deep(None)


def test_the_compiler_agrees_on_what_is_there_before_and_after():
    model = mlp()
    compiled = tools()[1].compile_step(model, step(512, target=CPU))
    traced = trace(model, step(512, target=CPU))
    before = sum(buffer.size for buffer in traced.buffers if buffer.start < 0)
    assert abs(compiled.arguments - before) < 1024
    assert compiled.peak == compiled.arguments + compiled.temporary + compiled.outputs - compiled.aliased
    assert compiled.aliased > bytes_of(model.trainable_variables) * 2
    assert 0.3 < peak(traced) / compiled.peak < 3


def test_an_unbuilt_model_is_refused():
    model = keras.Sequential([layers.Dense(4)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="not there yet"):
        trace(model, step())


def test_a_model_that_was_not_compiled_is_refused():
    with pytest.raises(ValueError, match="compile"):
        trace(keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4)]), step())


def test_an_unknown_architecture_is_refused():
    with pytest.raises(BackendError, match=r"compute capability 3\.5"):
        tools()[1].compile_step(mlp(), step(target=Target(True, (3, 5))))


def test_a_missing_compiler_names_what_to_install(monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("no plugin")

    _, compiling = tools()
    monkeypatch.setattr("oomproof._simulators.xla.compile_only_gpu.topologies.get_topology_desc", missing)
    with pytest.raises(BackendError, match=r"pip install 'oomproof\[gpu-compile\]'"):
        compiling.compile_step(mlp(), step())
    assert "gpu-compile" in compiling.why_not(step())
    assert compiling.why_not(step(target=CPU)) is None
    assert "op by op" in compiling.why_not(step(jit=False))


@pytest.mark.skipif(not HAS_COMPILER, reason="this machine has no gpu-compile extra")
def test_trace_and_compiler_agree_for_a_gpu_that_is_not_there():
    model = mlp()
    compiled = tools()[1].compile_step(model, step(65536))
    assert abs(peak(trace(model, step(65536))) / compiled.peak - 1) < 0.1
