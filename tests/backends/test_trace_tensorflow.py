"""A traced step against what real steps take from TensorFlow's own allocator, and that tracing leaves no trace."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import statistics
import sys

import keras
import numpy as np
import pytest
from here import BACKEND, only
from keras import layers, tree

from oomproof._estimation.allocator import RULES, Heap, replay
from oomproof._records.trace import Spec, Target, Workload
from oomproof.errors import BackendError, UnsupportedModelError

pytestmark = only("tensorflow", because="peaks of a real allocator on a CPU")
if BACKEND == "tensorflow":
    import tensorflow as tf
    from trace_models import MODELS, compiled

    from oomproof._simulators.tensorflow.trace import trace

HERE = pathlib.Path(__file__).parent
TRUTH = HERE.parents[1] / "benchmarks" / "estimate" / "truth"
MIB = 2**20


def workload(batch, x, y, phase="train", gpu=False):
    def spec(kind):
        return Spec((batch, *kind.shape), "int32" if kind.below else "float32")

    x, y = tree.map_structure(spec, x), tree.map_structure(spec, y)
    return Workload(x, None if phase == "predict" else y, phase, False, Target(gpu=gpu))


def traced(name, **options):
    model, batch, (x, y) = MODELS[name]()
    return trace(model, workload(batch, x, y, **options))


def peak(found):
    """Bytes asked for when they are most, and what they were asked for."""
    change = np.zeros(len(found.ops) + 2)
    for buffer in found.buffers:
        change[max(buffer.start, 0)] += buffer.size
        change[buffer.end + 1] -= buffer.size
    at = int(np.cumsum(change).argmax())
    live = [buffer for buffer in found.buffers if max(buffer.start, 0) <= at <= buffer.end]
    return sum(buffer.size for buffer in live), live


def bytes_of(live, category):
    return sum(buffer.size for buffer in live if buffer.category == category)


def test_peaks_are_those_of_real_steps(forks):
    names = sorted(MODELS.keys() - {"vit"})  # Its kinds of layers are in another, and it takes longest.
    real = json.loads(forks.run("trace_child", *names).splitlines()[-1])
    traces = {name: traced(name) for name in names}
    asked = {name: peak(found)[0] / real[name]["asked for"] - 1 for name, found in traces.items()}
    # The allocator's own figure counts blocks, whose sizes depend on everything that happened before. The child made
    # one region for everything, as on a GPU, where a CPU takes a new one whenever it needs more.
    regions = {name: dataclasses.replace(found, allocator="bfc") for name, found in traces.items()}
    taken = {name: replay(found).peak / real[name]["peak"] - 1 for name, found in regions.items()}
    for errors, median, worst in ((asked, 0.03, 0.12), (taken, 0.06, 0.20)):
        shown = {name: f"{error:+.1%}" for name, error in errors.items()}
        assert statistics.median(map(abs, errors.values())) < median, shown
        assert max(map(abs, errors.values())) < worst, shown


def test_the_rules_are_those_of_the_allocator(forks):
    events = json.loads(forks.run("trace_child", "--events", "several_inputs").splitlines()[-1])
    heap, blocks, differences = Heap(RULES["bfc"]), {}, []
    for address, asked, used in events:
        if asked:
            blocks[address] = heap.take(asked)
        elif address in blocks:
            heap.give(blocks.pop(address))
        differences.append(heap.in_use - used)
    # What was there before is not seen, and is the same all the time.
    assert len(events) > 1000
    assert set(differences) == {differences[0]}


@pytest.fixture(scope="module")
def residual():
    return traced("residual_cnn")


def test_layers_have_the_names_the_user_gave_them(residual):
    model, _, _ = MODELS["residual_cnn"]()
    kinds = {layer.name.rstrip("_0123456789") for layer in model.layers}
    _, live = peak(residual)
    assert {buffer.layer.rstrip("_0123456789") for buffer in residual.buffers} <= kinds | {""}
    assert sum(buffer.size for buffer in live if buffer.layer) > 0.9 * sum(buffer.size for buffer in live)


def test_layers_of_layers_are_paths():
    inner = keras.Sequential([layers.Dense(8, name="first"), layers.Dense(8, name="second")], name="block")
    model = keras.Sequential([keras.Input((4,)), inner, layers.Dense(2, name="last")])
    model.compile("adam", "mse", jit_compile=False)
    found = trace(
        model, Workload(Spec((16, 4), "float32"), Spec((16, 2), "float32"), "train", False, Target(gpu=False))
    )
    for category in ("weights", "optimizer", "activations"):
        assert {"block/first", "block/second"} <= {b.layer for b in found.buffers if b.category == category}


def test_stages_come_in_order(residual):
    first = {
        stage: next(i for i, op in enumerate(residual.ops) if op.stage == stage) for stage in ("forward", "backward")
    }
    assert first["forward"] < first["backward"]
    assert {op.stage for op in residual.ops} == {"forward", "backward", "update"}
    assert all(-1 <= b.start <= b.end <= len(residual.ops) for b in residual.buffers)


def test_evaluation_and_prediction_need_less(residual):
    test, predict = (peak(traced("residual_cnn", phase=phase))[0] for phase in ("test", "predict"))
    assert max(test, predict) < 0.7 * peak(residual)[0]


def test_slots_are_counted():
    slots = {}
    for optimizer in ("sgd", "adam"):
        model = compiled(keras.Sequential([keras.Input((64,)), layers.Dense(128), layers.Dense(10)]), optimizer)
        data = Workload(Spec((8, 64), "float32"), Spec((8,), "int32"), "train", False, Target(gpu=False))
        slots[optimizer] = bytes_of(peak(trace(model, data))[1], "optimizer")
        weights = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    assert slots["sgd"] < 100
    assert slots["adam"] - slots["sgd"] == pytest.approx(2 * weights, rel=0.01)


def test_half_precision_halves_activations():
    sizes = {}
    for policy in ("float32", "mixed_float16"):
        stack = [layers.Conv2D(16, 3, padding="same", activation="relu", dtype=policy) for _ in range(4)]
        stack += [layers.GlobalAveragePooling2D(dtype=policy), layers.Dense(10)]
        model = compiled(keras.Sequential([keras.Input((32, 32, 3)), *stack]))
        data = Workload(Spec((32, 32, 32, 3), "float32"), Spec((32,), "int32"), "train", False, Target(gpu=False))
        sizes[policy] = sum(b.size for b in trace(model, data).buffers if b.category == "activations")
    assert 0.4 < sizes["mixed_float16"] / sizes["float32"] < 0.75


HAS_COMPILER = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


@pytest.mark.skipif(HAS_COMPILER, reason="for a machine without the gpu-compile extra")
def test_a_missing_compiler_names_what_to_install():
    from oomproof._simulators.tensorflow.compile import compile_step, why_not

    model, batch, (x, y) = MODELS["plain_cnn"]()
    data = dataclasses.replace(workload(batch, x, y, gpu=True), jit=True)
    assert "pip install 'oomproof[gpu-compile]'" in why_not(data)
    with pytest.raises(BackendError, match="gpu-compile"):
        compile_step(model, data)


@pytest.mark.skipif(not HAS_COMPILER, reason="this machine has no gpu-compile extra")
def test_trace_and_compiler_agree_for_a_gpu_that_is_not_there():
    from oomproof._simulators.tensorflow.compile import compile_step

    model, batch, (x, y) = MODELS["plain_cnn"]()
    data = dataclasses.replace(workload(batch, x, y, gpu=True), jit=True)
    traced, found = trace(model, data), compile_step(model, data)
    assert replay(traced).peak == pytest.approx(found.peak, rel=0.15)
    # The step is lowered once for both.
    assert found.trace == traced
    assert not model.optimizer.built


def test_a_process_that_cannot_compile_says_why(monkeypatch):
    from oomproof._simulators.xla.compile_process import compiled_in_process

    says = "ended with status" if HAS_COMPILER else "gpu-compile"
    with pytest.raises(BackendError, match=says):
        compiled_in_process("this is no program", Target(True, (9, 0)), None)
    with pytest.raises(BackendError, match=r"capability|architecture"):
        compiled_in_process("", Target(True, (1, 0)), None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BackendError, match="ended with status 1"):
        compiled_in_process("", Target(True, (9, 0)), None)


def lowered_text(model, batch=8):
    from oomproof._simulators.tensorflow.stablehlo_step import stablehlo_step

    data = Workload(Spec((batch, 300), "float32"), Spec((batch, 300), "float32"), "train", True, Target(gpu=True))
    text = stablehlo_step(model, data).text
    # Names of functions are counted on, and places say where an op is from.
    return [
        re.sub(r"_\d+(_quick_to_lower)?__|loc\(.*?\)+", "", line)
        for line in text.splitlines()
        if not line.startswith("#loc")
    ]


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "adamw"])
def test_a_program_is_the_same_however_square_roots_are_lowered(monkeypatch, optimizer):
    from oomproof._simulators.tensorflow import stablehlo_step

    model = keras.Sequential([keras.Input((300,)), layers.Dense(300, activation="tanh"), layers.LayerNormalization()])
    model.compile(optimizer, "mse")
    quick = lowered_text(model)
    monkeypatch.setattr(stablehlo_step, "_QUICK", "Sqrt")
    assert lowered_text(model) == quick
    assert any("stablehlo.sqrt" in line for line in quick)
    assert not any("stablehlo.tan " in line for line in quick)


def test_tangents_of_a_model_stay_tangents():
    model = keras.Sequential([keras.Input((300,)), layers.Dense(300, activation=keras.ops.tan)])
    model.compile("adam", "mse")
    for op in ("sqrt", "tan"):
        assert any(f"stablehlo.{op} " in line for line in lowered_text(model))


def test_lowering_that_fails_leaves_the_model_as_it_was(monkeypatch):
    from oomproof._simulators.tensorflow import stablehlo_step

    def fails(*_):
        raise ValueError("Lowering failed.")

    model = keras.Sequential([keras.Input((300,)), layers.Dense(300)])
    model.compile("adam", "mse")
    before = model.get_weights()
    optimizer = model.optimizer
    monkeypatch.setattr(stablehlo_step.compiler_ir, "from_concrete_function", fails)
    with pytest.raises(UnsupportedModelError, match="Lowering failed"):
        lowered_text(model)
    assert model.optimizer is optimizer
    assert not optimizer.built
    assert all(np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True))
    assert not [name for name in tf_context().list_function_names() if "quick_to_lower" in name]


def tf_context():
    from tensorflow.python.eager import context

    return context.context()


def test_variables_that_share_memory_are_written_apart():
    from oomproof._simulators.tensorflow.state import sharing_storage

    with sharing_storage():
        first, second = (keras.Variable("ones", shape=(256, 256)) for _ in range(2))
        small = keras.Variable("ones", shape=(3,))
    first.assign_add(np.full((256, 256), 2.0))
    assert keras.ops.max(first) == 2
    assert keras.ops.max(second) == 0
    # What is small may be looked at while a model is built.
    assert keras.ops.min(small) == 1


def test_masks_are_read_as_they_were_written():
    """TensorFlow writes eight truth values to a byte, and the compiler that JAX comes with reads one."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    from oomproof._simulators.tensorflow.compile import _TRUTHS, _a_byte_each

    mask = np.tril(np.ones((7, 9), bool))
    packed = np.packbits(mask.ravel(), bitorder="little").tobytes().hex().upper()
    text = f'%c = stablehlo.constant dense<"0x{packed}"> : tensor<7x9xi1>'
    written = _TRUTHS.sub(_a_byte_each, text)
    assert _TRUTHS.sub(_a_byte_each, written) == written
    with mlir.make_ir_context():
        module = ir.Module.parse(f"module {{ func.func @main() {{ {written}\n return }} }}")
        constant = module.body.operations[0].regions[0].blocks[0].operations[0]
        assert np.array_equal(np.array(ir.DenseElementsAttr(constant.attributes["value"])), mask)


# Layers of kernels.py that took on an H200 what the rules say: plain, few and odd channels, padded unevenly,
# transposed, in three dimensions.
AS_MEASURED = {18: "input", 64: "input filter", 126: "input", 322: "input filter", 388: "filter", 415: "forward input"}


@pytest.mark.parametrize("number", AS_MEASURED)
def test_single_convolutions_take_what_was_measured(number):
    from workspaces_graph import expected, read

    (layer,) = (row for row in read(TRUTH / "kernels-tensorflow.jsonl") if row["number"] == number)
    said = expected(layer)
    parts = AS_MEASURED[number].split()
    assert {part: said[part] for part in parts} == {
        part: pytest.approx(layer["bytes"][part], rel=0.003) for part in parts
    }


def test_pooling_in_3d_copies_everything():
    model = keras.Sequential([keras.Input((8, 8, 8, 4)), layers.MaxPooling3D(2)])
    model.compile("sgd", "mse", jit_compile=False)
    data = {
        "x": Spec((32, 8, 8, 8, 4), "float32"),
        "y": Spec((32, 4, 4, 4, 4), "float32"),
        "phase": "test",
        "jit": False,
    }
    whole, pooled = 4 * 32 * 512 * 4, 4 * 32 * 64 * 4
    for gpu in (True, False):
        found = trace(model, Workload(**data, target=Target(gpu=gpu)))
        pooling = next(at for at, op in enumerate(found.ops) if "MaxPool3D" in op.name)
        sizes = sorted(buffer.size for buffer in found.buffers if buffer.start == pooling)
        assert sizes == ([pooled, pooled, whole] if gpu else [pooled])


def test_slots_of_a_shape_begin_in_one_place():
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, use_bias=False), layers.Dense(64, use_bias=False)])
    model.compile("adam", "mse", jit_compile=False)
    spec = Spec((8, 64), "float32")
    found = trace(model, Workload(spec, spec, "train", False, Target(gpu=False)))
    slots = [buffer for buffer in found.buffers if buffer.category == "optimizer" and buffer.size == 4 * 64 * 64]
    # Two layers with two slots each: three of the four get a place of their own when they are first written to.
    assert sorted(slot.first >= 0 for slot in slots) == [False, True, True, True]
    assert all(found.ops[slot.first].stage == "update" for slot in slots if slot.first >= 0)


def test_weights_that_are_still_read_are_written_to_a_copy():
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, use_bias=False), layers.Dense(64, use_bias=False)])
    model.compile("sgd", "mse", jit_compile=False)
    spec = Spec((8, 64), "float32")
    found = trace(model, Workload(spec, spec, "train", False, Target(gpu=False)))
    values = [buffer for buffer in found.buffers if buffer.category == "weights"]
    # The second layer's old values are needed for the gradient of the first.
    assert len(values) == 3
    assert sum(value.start >= 0 for value in values) == 1
    assert [value.drawn for value in values if value.start < 0] == [True, True]


def test_a_loop_whose_end_depends_on_data_is_said_to_be_missing():
    class Doubling(layers.Layer):
        def call(self, x):
            return tf.while_loop(lambda v: tf.reduce_sum(v) < 10.0, lambda v: (v * 2.0,), (x,))[0]

    model = keras.Sequential([keras.Input((4,)), Doubling(), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    data = Workload(Spec((8, 4), "float32"), Spec((8, 2), "float32"), "train", False, Target(gpu=False))
    assert any("depends on data" in note for note in trace(model, data).notes)


@pytest.mark.parametrize("gpu", [False, True])
def test_memory_grows_with_the_batch_alone(gpu):
    model, batch, (x, y) = MODELS["plain_cnn"]()
    small, large = (peak(trace(model, workload(n * batch, x, y, gpu=gpu)))[1] for n in (1, 2))
    assert bytes_of(small, "weights") == bytes_of(large, "weights")
    assert bytes_of(large, "activations") == pytest.approx(2 * bytes_of(small, "activations"), rel=0.05)


def test_the_model_is_left_as_it_was():
    model, batch, (x, y) = MODELS["residual_cnn"]()
    optimizer, metrics, loss = model.optimizer, model._compile_metrics, model._compile_loss
    weights, variables = model.get_weights(), len(model.variables)
    trace(model, workload(batch, x, y))
    assert (model.optimizer, model._compile_metrics, model._compile_loss) == (optimizer, metrics, loss)
    assert not optimizer.built
    assert not metrics.built
    assert not loss.built
    assert model.train_function is None
    assert len(model.variables) == variables
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    data = np.zeros((2, 32, 32, 3), "float32"), np.zeros((2,), "int32")
    assert set(model.fit(*data, verbose=0).history) == {"loss", "accuracy"}


def test_nothing_large_is_made(monkeypatch):
    model = keras.Sequential([keras.Input((100,), dtype="int32"), layers.Embedding(50, 8), layers.Dense(4000)])
    model.compile("adam", "mse", jit_compile=False)
    made = []
    original = tf.constant
    monkeypatch.setattr(tf, "constant", lambda value, *a, **k: made.append(np.size(value)) or original(value, *a, **k))
    data = Workload(
        Spec((100_000, 100), "int32"), Spec((100_000, 100, 4000), "float32"), "train", False, Target(gpu=False)
    )
    # More than any machine this runs on has.
    assert peak(trace(model, data))[0] > 2**37
    assert max(made, default=0) < MIB
