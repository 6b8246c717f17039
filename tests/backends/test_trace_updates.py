"""Updates that are made again for weights of the same kind, against those that Keras makes for each."""

import keras
import pytest
from here import BACKEND, only, representative
from keras import layers, optimizers

from oomproof._records.trace import Spec, Target, Workload

pytestmark = only("tensorflow", because="peaks of a real allocator on a CPU")
if BACKEND == "tensorflow":
    from oomproof._simulators.tensorflow import graph as trace_graph
    from oomproof._simulators.tensorflow import updates

NAMES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Lion", "Nadam")
OPTIMIZERS = {name: getattr(optimizers, name) for name in NAMES} | {
    "nesterov": lambda **given: optimizers.SGD(0.1, momentum=0.9, nesterov=True, **given),
    "amsgrad": lambda **given: optimizers.Adam(optimizers.schedules.CosineDecay(0.1, 9), amsgrad=True, **given),
    "clipped": lambda **given: optimizers.RMSprop(momentum=0.9, centered=True, clipnorm=1.0, use_ema=True, **given),
    "accumulating": lambda **given: optimizers.Adam(gradient_accumulation_steps=2, **given),
}


def named_by_place(graph):
    """Nodes in their order. Handles of variables are named by a counter of the process, here by when they come."""
    handles = {}

    def named(name):
        waits, bare = name.startswith("^"), name.removeprefix("^")
        return (waits, handles.setdefault(bare, len(handles))) if bare.isdigit() else name

    return [(named(node.name), node.op, [named(source) for source in node.input]) for node in graph.node]


@pytest.mark.parametrize(
    "optimizer", representative(OPTIMIZERS, "SGD", "Adam", "Nadam", "amsgrad", "clipped", "accumulating")
)
def test_updates_made_again_are_those_keras_would_have_made(monkeypatch, optimizer):
    model = keras.Sequential([keras.Input((8,)), *[layers.Dense(8) for _ in range(4)], layers.Dense(3)])
    data = Workload(Spec((4, 8), "float32"), Spec((4, 3), "float32"), "train", False, Target(gpu=False))
    graphs, again, repeat = [], [], updates._repeat
    monkeypatch.setattr(updates, "_repeat", lambda *given: again.append(repeat(*given)))
    monkeypatch.setattr(trace_graph, "_nodes", lambda graph: graphs.append(graph) or [])
    for known in (updates._KNOWN, set()):
        monkeypatch.setattr(updates, "_KNOWN", known)
        model.compile(OPTIMIZERS[optimizer](name="optimizer"), "mse", jit_compile=False)
        trace_graph.step_graph(model, data)
        assert "update_step" not in vars(model.optimizer)
    first, second = map(named_by_place, graphs)
    assert first == second
    # Nadam is left to Keras.
    assert bool(again) == (optimizer != "Nadam")
