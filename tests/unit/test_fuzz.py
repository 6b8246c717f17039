"""The pure parts of the fuzzer: what it makes is the same each time, is Python, and gets smaller."""

import json
import subprocess
import sys

import pytest

from fuzz.grammar import configuration, features
from fuzz.shrinking import shrink, telling
from fuzz.writing import definitions, expression, script

BACKENDS = ["tensorflow", "jax", "torch"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_seed_and_a_number_make_the_same_configuration_each_time(backend):
    for index in range(20):
        first, second = (configuration(3, index, backend) for _ in range(2))
        assert first == second
        assert json.loads(json.dumps(first)) == first
    assert configuration(3, 0, backend) != configuration(4, 0, backend) != configuration(4, 1, backend)


def test_it_is_the_same_in_another_process():
    """Hashes of texts, and so the order of sets, are another one in every process."""
    code = "from fuzz.grammar import *; print(*(features(configuration(5, i, 'jax')) for i in range(9)), sep='|')"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert answer.stdout.strip() == "|".join(str(features(configuration(5, i, "jax"))) for i in range(9))


def environment():
    import os

    return {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": "77"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_scripts_are_python_and_define_what_they_use(backend):
    for index in range(60):
        text = script(configuration(6, index, backend))
        compile(text, "fuzzed.py", "exec")
        assert f'"KERAS_BACKEND", "{backend}"' in text
        assert ("class Positions" in text) == ("Positions()" in text)


def test_everything_that_can_be_named_comes_up():
    seen = {name for index in range(800) for name in features(configuration(7, index, "tensorflow"))}
    expected = {
        *("LSTM", "SelfAttention", "Positions", "Embedding", "BatchNormalization", "Dropout", "Penalty masked mean"),
        *("own loss", "subclassed", "sequential", "nested", "shared", "residual", "several outputs", "several inputs"),
        *("Dice", "reduction none", "weights class", "clipnorm", "use_ema", "LossScaleOptimizer", "mixed_float16"),
        *("changes freeze", "recompute", "lean", "oom update", "steps_per_execution", "form generator", "xla"),
    }
    assert not expected - seen


def test_expressions():
    inner = {"call": "layers.GRU", "args": [3], "unroll": True}
    assert expression({"call": "layers.Bidirectional", "args": [inner, {"code": "FAULTS"}]}) == (
        "layers.Bidirectional(layers.GRU(3, unroll=True), FAULTS)"
    )


def test_definitions_bring_what_they_use_themselves():
    found = "\n".join(definitions("Faulty(FAULTS)"))
    for name in ("class Faulty", "class Faults", "def out_of_memory", "def watched", "BACKEND ="):
        assert name in found
    assert found.count("class Faults") == 1
    assert "class Positions" not in found


def is_about(*names):
    return lambda config: set(names) <= set(features(config))


@pytest.mark.parametrize("cause", [("Positions", "Adam"), ("changes freeze", "act evaluate"), ("oom backward", "LSTM")])
def test_shrinking_leaves_the_cause_and_little_else(cause):
    index = next(i for i in range(5000) if is_about(*cause)(configuration(8, i, "tensorflow")))
    found = shrink(configuration(8, index, "tensorflow"), is_about(*cause))
    assert is_about(*cause)(found)
    assert telling(found) <= {*cause, "act change", "mode graph", "graph", "xla", "return_sequences"}
    assert len(found["acts"]) <= 2
    assert len(found["outputs"]) == 1
    compile(script(found), "fuzzed.py", "exec")


def test_shrinking_stops_when_told():
    config = configuration(8, 0, "torch")
    assert shrink(config, lambda smaller: True, go_on=lambda: False) == config
