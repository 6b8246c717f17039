"""Pieces of TensorFlow batches are cut where the batch is: a batch on the host is not moved to be cut."""

import os
import subprocess
import sys

import numpy as np
import pytest
from here import only
from models import classes, numbers, regressor

import oomproof

pytestmark = only("tensorflow", because="graphs that cut batches on the host")


def scalar(y_true, y_pred):
    from keras import ops

    return ops.mean(ops.square(y_true - y_pred)) + ops.max(y_pred)


def cut_on(model, jit_compile):
    """Devices that the slices in the graph of a step in pieces are placed on, and the step's engine."""
    import tensorflow as tf

    from oomproof._backends.tensorflow.step import TensorFlowStep

    model.jit_compile = jit_compile
    data = (tf.constant(numbers(), "float32"), tf.constant(numbers(width=2, seed=1), "float32"))
    step = TensorFlowStep(model)
    step.prepare(data, "train")
    step.train(data, 3, lean=False)
    (program,) = (program for key, program in step._programs.items() if key[0].computes == "update")
    count = () if jit_compile else (tf.constant(3, tf.int64),)
    graph = program.get_concrete_function(data, *count).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return {node.device for node in nodes if node.op == "Slice"}, step.engine


def test_a_batch_on_the_host_is_cut_there():
    devices, engine = cut_on(regressor(), jit_compile=False)
    assert engine.from_host
    assert devices == {"/device:CPU:0"}


def test_xla_cuts_by_itself():
    devices, engine = cut_on(regressor(), jit_compile=True)
    assert not engine.from_host
    assert devices == {""}


def test_what_was_computed_is_not_moved_to_be_cut():
    """Losses that need all predictions: their slopes are cut, too, where they are."""
    devices, _ = cut_on(regressor(loss=scalar), jit_compile=False)
    assert devices == {"/device:CPU:0", ""}


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_pieces_are_cut_on_the_host_op_by_op_too(kind, monkeypatch):
    import tensorflow as tf

    from oomproof._backends.tensorflow import pieces

    made = {
        "dense": lambda: tf.constant(numbers()),
        "ragged": lambda: tf.ragged.constant([[1, 2], [3], [4, 5, 6]]),
        "sparse": lambda: tf.sparse.from_dense(np.eye(4)),
    }[kind]
    with tf.device("CPU:0"):
        batch = (made(), tf.constant(classes()))
    asked, host = [], pieces.host
    # Without a GPU everything is on the host: what counts is that it was asked for.
    monkeypatch.setattr(pieces, "host", lambda wanted=True: asked.append(wanted) or host(wanted))
    pieces.take(batch, 1, 2)
    assert asked == [True, True]


def test_batches_elsewhere_are_cut_where_they_are():
    from oomproof._backends.tensorflow.pieces import on_host

    class Elsewhere:
        device = "/job:localhost/replica:0/task:0/device:GPU:0"

    assert not on_host(Elsewhere())


# A second CPU plays the GPU: XLA's functions refuse variables of another device alike.
_ON_ANOTHER_DEVICE = """
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras, oomproof
from oomproof._backends.tensorflow import step
step.fits_op_by_op = lambda *_: False
with tf.device("CPU:1"):
    inner = [keras.layers.Conv2D(4, 3, groups=2), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6, 6, 2)), *inner])
    model.compile("sgd", "mse")
    oomproof.guard(model, micro_batch_size=3, allow="exact")
    x = np.random.default_rng(0).normal(size=(8, 6, 6, 2)).astype("float32")
    history = model.fit(x, x[:, 0, 0, :1], batch_size=8, verbose=0)
print(history.run.exactness.word, history.run.plan.micro_batch_size)
"""


def test_a_model_that_cannot_be_looked_at_on_the_host_is_looked_at_where_it_is(tmp_path):
    environment = {**os.environ, "OOMPROOF_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _ON_ANOTHER_DEVICE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["exact", "3"]


@pytest.mark.parametrize("assign", ["fails", "works"])
@pytest.mark.parametrize("slices", ["fail", "work"])
def test_variables_are_put_back_without_room_or_it_is_an_error(assign, slices, monkeypatch):
    import tensorflow as tf

    from oomproof._backends.tensorflow import commit

    def full(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    variables = [tf.Variable(np.ones((3, 2), "float32")) for _ in range(3)]
    context = commit.changed(variables, lambda value: value + 1)
    context.__enter__()
    assert variables[0].numpy().sum() == 12
    if assign == "fails":
        monkeypatch.setattr(type(variables[0]), "assign", full)
    if slices == "fail":
        monkeypatch.setattr(commit, "_overwrite", full)
    if assign == "fails" and slices == "fail":
        with pytest.raises(oomproof.BackendError, match="3 of 3 variables could not be put back"):
            context.__exit__(None, None, None)
    else:
        context.__exit__(None, None, None)
        assert [variable.numpy().sum() for variable in variables] == [6, 6, 6]
