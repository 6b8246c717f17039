"""Pieces of TensorFlow batches are cut where the batch is: a batch on the host is not moved to be cut."""

import numpy as np
import pytest
from here import only
from models import classes, numbers, regressor

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
