"""From a model and its traced step to the chain that planning works on, and traces of steps that recompute."""

import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
import time

import chain_models
import keras
import numpy as np
import pytest
from here import BACKEND, only
from keras import layers, ops

from oomproof import _simulators as simulators
from oomproof._backends import current
from oomproof._backends.common.call_graph import graphs
from oomproof._backends.common.precision import computed_in
from oomproof._estimation.allocator import replay
from oomproof._estimation.api import estimate
from oomproof._estimation.workloads import describe
from oomproof._planning.chain import MOST_SEGMENTS, chain_of
from oomproof._planning.costs import cost_of, flops, forward_cost
from oomproof._records.trace import Spec, Target

HERE = pathlib.Path(__file__).parent
JIT = BACKEND == "jax"
MODELS = ["unet", "transformer", "nested", "resnet"]


def traced(model, batch, jit=JIT, gpu=True, recompute=(), input_shape=None):
    workload = describe(model, batch, "train", jit, Target(gpu=gpu), input_shape)
    workload = dataclasses.replace(workload, recompute=tuple(recompute))
    return workload, simulators.trace(current(), model, workload)


def chained(model, batch, **options):
    workload, trace = traced(model, batch, **options)
    return chain_of(model, workload, trace, replay(trace).peak, current()), trace


def functional(inputs, outputs):
    return chain_models.compiled(inputs, outputs, "sgd", "mse")


def use(trace, chosen=lambda buffer: True):
    """Bytes alive during each op."""
    change = np.zeros(len(trace.ops) + 2, dtype="int64")
    for buffer in filter(chosen, trace.buffers):
        change[max(buffer.start, 0)] += buffer.size
        change[buffer.end + 1] -= buffer.size
    return np.cumsum(change)[: len(trace.ops)]


def activations(trace):
    """Bytes of them when the forward pass is over."""
    return int(use(trace, lambda buffer: buffer.category == "activations").max())


def calls_of(segment, order):
    return order[order.index(segment.first) : order.index(segment.last) + 1]


# The chain


@pytest.fixture(scope="module", params=MODELS)
def known(request):
    model, batch = getattr(chain_models, request.param)()
    workload, trace = traced(model, batch)
    began = time.perf_counter()
    chain = chain_of(model, workload, trace, 123, current())
    return request.param, model, chain, trace, time.perf_counter() - began


def test_sums_are_those_of_the_trace(known):
    name, model, chain, trace, seconds = known
    assert sum(segment.kept for segment in chain.segments) + chain.outside == activations(trace)
    # What the loss keeps is no layer's; on torch it keeps the result in several forms.
    assert chain.outside < (0.1 if (name, BACKEND) == ("unet", "torch") else 0.05) * activations(trace)
    weights = sum(int(np.prod(weight.shape)) * 4 for weight in model.trainable_weights)
    assert sum(segment.gradients for segment in chain.segments) == weights
    assert sum(segment.cost for segment in chain.segments) == pytest.approx(1)
    state = [b.size for b in trace.buffers if b.category in ("weights", "optimizer") and b.start < 0]
    assert chain.resident >= sum(state)
    assert chain.peak == 123
    assert seconds < 1


def test_segments_explain_the_peak(known):
    """Of the backward pass, or of the update if that is higher; a step's forward pass may have the peak, too."""
    _, _, chain, trace, _ = known
    kept = np.cumsum([segment.kept for segment in chain.segments])
    after = np.cumsum([segment.gradients for segment in chain.segments][::-1])[::-1]
    always = chain.resident + chain.inputs
    backward = always + chain.outside + max(kept + after + [segment.work for segment in chain.segments])
    update = always + after[0] + chain.update
    assert 0.65 < max(backward, update) / use(trace).max() < 1.4


def test_labels_cover_every_call_once(known):
    _, model, chain, _, _ = known
    order = []
    for graph in graphs(model):
        order += [call.label for call in graph.calls if not isinstance(call.operation, keras.Model)]
    covered = [label for segment in chain.segments for label in calls_of(segment, order)]
    assert sorted(covered) == sorted(order)
    assert len(chain.segments) <= MOST_SEGMENTS
    for segment in chain.segments:
        assert segment.first.rpartition("/")[0] == segment.last.rpartition("/")[0]


def test_crossing_falls_from_segment_to_segment(known):
    _, _, chain, _, _ = known
    for number, segment in enumerate(chain.segments):
        assert len(segment.crossing) == len(chain.segments) - number
        assert list(segment.crossing) == sorted(segment.crossing, reverse=True)
        assert segment.crossing[0] > 0


def residual(batch=8):
    inputs = keras.Input((16,))
    a = layers.Dense(32, name="a")(inputs)
    c = layers.Dense(32, name="c")(layers.Dense(64, name="b")(a))
    model = functional(inputs, layers.Dense(10, name="head")(layers.Add(name="sum")([a, c])))
    return chained(model, batch)[0]


def test_crossing_of_a_residual_net_by_hand():
    chain = residual()
    assert [(segment.first, segment.last) for segment in chain.segments] == [
        ("a", "a"),
        ("b", "b"),
        ("c", "sum"),
        ("head", "head"),
    ]
    narrow, wide, result = 8 * 32 * 4, 8 * 64 * 4, 8 * 10 * 4
    assert [segment.crossing for segment in chain.segments] == [
        (narrow, narrow, 0, 0),
        (wide, 0, 0),
        (narrow, 0),
        (result,),
    ]
    assert [segment.gradients for segment in chain.segments] == [4 * n for n in (16 * 32 + 32, 33 * 64, 65 * 32, 330)]
    assert chain.batch_size == 8
    assert chain.inputs >= (8 * 16 + (8 * 10 if BACKEND != "torch" else 0)) * 4


def test_crossing_of_a_unet_by_hand():
    model, batch = chain_models.unet()
    chain, _ = chained(model, batch)
    assert [segment.last for segment in chain.segments] == ["pool_0", "pool_1", "join_1", "join_0", "up_0", "last"]
    skip, pooled = batch * 64 * 64 * 16 * 4, batch * 32 * 32 * 16 * 4
    assert chain.segments[0].crossing == (skip + pooled, skip, skip, 0, 0, 0)
    assert chain.segments[1].crossing == (skip // 2 + pooled // 2, 0, 0, 0, 0)


def test_batches_count_in_proportion():
    small, large = residual(64), residual(128)
    for one, two in zip(small.segments, large.segments, strict=True):
        assert [2 * size for size in one.crossing] == list(two.crossing)
        assert two.kept == pytest.approx(2 * one.kept, rel=0.05, abs=64)
        assert two.gradients == one.gradients
    # But for constants in TensorFlow's graph.
    assert small.resident == pytest.approx(large.resident, abs=4096)


def test_calls_of_inner_models_are_their_own():
    model, batch = chain_models.nested()
    chain, _ = chained(model, batch)
    found = [(segment.first, segment.last) for segment in chain.segments]
    assert found[1:4] == [
        ("backbone/conv_1", "backbone/conv_1"),
        ("backbone/norm", "backbone/relu"),
        ("backbone/conv_2", "backbone/conv_2"),
    ]
    assert chain.segments[1].crossing[0] == batch * 32 * 32 * 16 * 4
    assert chain.segments[3].crossing == (batch * 16 * 16 * 32 * 4, 0, 0)


def test_what_is_shared_is_split_and_counted_once():
    tower = keras.Sequential([keras.Input((32,)), layers.Dense(32, activation="tanh")], name="tower")
    shared = layers.Dense(32, activation="tanh", name="shared")
    a, b = keras.Input((32,)), keras.Input((32,))
    x = layers.Concatenate()([tower(shared(a)), tower(shared(b))])
    chain, _ = chained(functional([a, b], layers.Dense(4, name="head")(x)), 64)
    of = {segment.first: segment for segment in chain.segments}
    assert of.keys() >= {"shared", "shared#2", "tower", "tower#2", "head"}
    assert abs(of["shared"].kept - of["shared#2"].kept) <= 1
    assert {of["shared"].gradients, of["shared#2"].gradients} == {0, 33 * 32 * 4}
    assert {of["tower"].gradients, of["tower#2"].gradients} == {0, 33 * 32 * 4}


def test_a_model_with_code_of_its_own_has_no_segments():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = layers.Dense(32, activation="relu"), layers.Dense(4)

        def call(self, x):
            return self.last(self.first(x))

    model = Own()
    model.build((None, 16))
    model.compile("sgd", "mse", jit_compile=False)
    chain, trace = chained(model, 64, input_shape=(16,))
    assert chain.segments == ()
    assert chain.outside == activations(trace)
    assert chain.resident >= sum(b.size for b in trace.buffers if b.category == "weights" and b.start < 0)


def test_shapes_that_the_model_leaves_open():
    inputs = keras.Input((None, 8))
    x = layers.Dense(16, name="wide")(inputs)
    x = layers.Dense(4, name="flat")(ops.reshape(x, (-1, 16)))
    x = ops.reshape(x, (-1, 12, 4))
    chain, _ = chained(functional(inputs, layers.Dense(2, name="last")(x)), 4, input_shape=(12, 8))
    assert [segment.first for segment in chain.segments] == ["wide", "flat", "last"]
    assert [segment.crossing[0] for segment in chain.segments] == [4 * 12 * 16 * 4, 4 * 12 * 4 * 4, 4 * 12 * 2 * 4]


def test_another_precision_has_other_sizes():
    inputs = keras.Input((16,))
    model = functional(inputs, layers.Dense(8, name="last")(layers.ReLU()(layers.Dense(32, name="first")(inputs))))
    with computed_in(model, "mixed_bfloat16"):
        chain, _ = chained(model, 8)
    assert chain.segments[0].crossing[0] == 8 * 32 * 2


# Costs


def test_arithmetic_by_hand():
    image = Spec((2, 32, 32, 16), "float32")
    i = keras.Input((32, 32, 16))

    def of(layer, *shape):
        layer(i)
        return flops(layer, [image], [Spec((2, *shape), "float32")])

    assert of(layers.Conv2D(8, 3, padding="same"), 32, 32, 8) == 2 * (3 * 3 * 16 * 8) * (2 * 32 * 32)
    assert of(layers.Conv2D(8, 3, 2, groups=4, padding="same"), 16, 16, 8) == 2 * (3 * 3 * 4 * 8) * (2 * 16 * 16)
    assert of(layers.DepthwiseConv2D(3, padding="same"), 32, 32, 16) == 2 * (3 * 3 * 16) * (2 * 32 * 32)
    assert of(layers.SeparableConv2D(8, 3, padding="same"), 32, 32, 8) == 2 * (9 * 16 + 16 * 8) * (2 * 32 * 32)
    assert of(layers.Conv2DTranspose(4, 2, strides=2), 64, 64, 4) == 2 * (2 * 2 * 16 * 4) * (2 * 32 * 32)
    assert of(layers.Dense(5), 32, 32, 5) == 2 * (16 * 5) * (2 * 32 * 32)
    assert of(layers.BatchNormalization(), 32, 32, 16) == 0
    assert of(layers.ReLU(), 32, 32, 16) == 0


def test_arithmetic_of_sequences_by_hand():
    row = Spec((2, 12, 16), "float32")
    i = keras.Input((12, 16))
    attention, lstm = layers.MultiHeadAttention(4, 8), layers.LSTM(7)
    attention(i, i)
    lstm(i)
    projections, scores = 4 * 2 * (16 * 32) * (2 * 12), 2 * 2 * (2 * 4 * 12 * 12 * 8)
    assert flops(attention, [row, row], [row]) == projections + scores
    assert flops(lstm, [row], [Spec((2, 7), "float32")]) == 2 * (16 * 28 + 7 * 28) * (2 * 12)
    einsum = layers.EinsumDense("abc,cde->abde", (12, 4, 8))
    einsum(i)
    assert flops(einsum, [row], [Spec((2, 12, 4, 8), "float32")]) == 2 * (16 * 32) * (2 * 12)


def test_costs_grow_with_the_batch_and_count_inner_layers():
    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(256)

        def call(self, x):
            return self.dense(x)

    inputs = keras.Input((256,))
    model = keras.Sequential([inputs, Block(), layers.ReLU()])
    block, relu = next(graphs(model)).calls
    assert forward_cost(block, 2048) == pytest.approx(2 * forward_cost(block, 1024), rel=0.1)
    assert forward_cost(block, 4096) > 2 * forward_cost(relu, 4096)
    spec = Spec((4096, 256), "float32")
    assert cost_of(block.operation, [spec], [spec]) >= cost_of(block.operation.dense, [spec], [spec])


# Steps that recompute


@pytest.fixture(scope="module", params=["residual", "transformer"])
def both(request):
    model, batch = getattr(chain_models, request.param)()
    plain, again = (traced(model, batch, recompute=r)[1] for r in ((), chain_models.blocks(request.param, model)))
    return request.param, plain, again


def test_recomputed_blocks_keep_only_what_crosses(both):
    _, plain, again = both
    assert activations(again) < 0.35 * activations(plain)
    # What torch's garbage holds of the second computation is freed when Python gets to it.
    assert use(again).max() < (0.8 if BACKEND == "torch" else 0.5) * use(plain).max()


def test_the_second_computation_is_part_of_the_backward_pass(both):
    _, plain, again = both
    more = [sum(op.stage == "backward" for op in trace.ops) for trace in (plain, again)]
    assert more[1] > more[0]
    stages = [sum(op.stage == "forward" for op in trace.ops) for trace in (plain, again)]
    assert stages[1] <= stages[0] + 12 * 12


@only("tensorflow", because="peaks of a real allocator on a CPU")
def test_recomputing_shows_in_compiled_steps_too():
    model, batch = chain_models.residual()
    plain, again = (traced(model, batch, True, recompute=r)[1] for r in ((), chain_models.blocks("residual", model)))
    assert use(again).max() < 0.5 * use(plain).max()


def test_estimates_take_segments():
    model, batch = chain_models.residual()
    options = {"engine": "trace", "gpu": "t4", "jit": JIT}
    plain = estimate(model, batch, **options)
    again = estimate(model, batch, recompute=chain_models.blocks("residual", model), **options)
    assert again.expected < 0.9 * plain.expected
    assert model.optimizer.built is False
    with pytest.raises(ValueError, match="nowhere"):
        estimate(model, batch, recompute=["nowhere"], **options)


@only("torch", because="a step traced with fake tensors")
@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_recomputed_peaks_are_those_of_real_steps_on_torch(name, monkeypatch):
    from test_trace_torch import allocated, peak
    from torch.utils import checkpoint

    model, _ = getattr(chain_models, name)()
    blocks = chain_models.blocks(name, model)
    leave = checkpoint._recomputation_hook.__exit__
    # Cycles of Keras's hold what was computed a second time until Python collects them. When that is, is chance.
    monkeypatch.setattr(checkpoint._recomputation_hook, "__exit__", lambda *args: (leave(*args), gc.collect())[0])
    _, trace = traced(model, 16, gpu=False, recompute=blocks)
    # What is there already is not looked through each time.
    gc.collect()
    gc.freeze()
    with current().recomputing(model, blocks):
        real = allocated(model)
    gc.unfreeze()
    assert peak(trace)[0] == pytest.approx(real, rel=0.1)


@only("tensorflow", because="peaks of a real allocator on a CPU")
def test_recomputed_peaks_are_those_of_real_steps_on_tensorflow(forks):
    names = ["residual", "transformer"]
    real = json.loads(forks.run("chain_child", *names).splitlines()[-1])
    for name in names:
        model, batch = getattr(chain_models, name)()
        _, trace = traced(model, batch, gpu=False, recompute=chain_models.blocks(name, model))
        assert use(trace).max() == pytest.approx(real[name]["asked for"], rel=0.1)
        # The child made one region for everything, as on a GPU, where a CPU takes a new one whenever it needs more.
        assert replay(dataclasses.replace(trace, allocator="bfc")).peak == pytest.approx(real[name]["peak"], rel=0.1)


_COMPILED = """
import dataclasses, chain_models
from oomproof import _simulators as simulators
from oomproof._backends import current
from oomproof._estimation.workloads import describe
from oomproof._records.trace import Target
model, batch = chain_models.transformer()
step = describe(model, batch, "train", True, Target(gpu=False))
for recompute in ((), chain_models.blocks("transformer", model)):
    print(simulators.compiled(current(), model, dataclasses.replace(step, recompute=recompute), None).peak)
"""


@only("jax", because="programs planned by XLA")
def test_recomputing_saves_about_what_xla_says():
    # XLA for CPUs orders programs for many threads otherwise, whatever memory that takes.
    flags = {"XLA_FLAGS": "--xla_cpu_enable_concurrency_optimized_scheduler=false", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED], capture_output=True, text=True, cwd=HERE, env=os.environ | flags, check=False
    )
    assert done.returncode == 0, done.stderr
    real = [int(line) for line in done.stdout.split()[-2:]]
    model, batch = chain_models.transformer()
    found = [use(traced(model, batch, recompute=r)[1]).max() for r in ((), chain_models.blocks("transformer", model))]
    # Compiled for an H200 it is 0.35; for a CPU XLA fuses other things.
    assert found[1] / found[0] == pytest.approx(real[1] / real[0], abs=0.12)
