"""Plans that training follows, made up front or by guard, and under a limit that is real."""

import json

import keras
import numpy as np
import oom_memory
import pytest
from here import BACKEND, only
from planned import a_model, data, peak

import oomproof
from oomproof import _backends as backends
from oomproof._backends.fake import FakeMemory
from oomproof._planning.planner import Planner

MIB = 2**20


def test_training_follows_a_plan():
    x, y = data(2048)
    plain, planned = a_model(), a_model()
    plain.fit(x, y, batch_size=1024, shuffle=False, verbose=0)
    plan = oomproof.plan(planned, 1024, budget=int(peak() * 0.5), cache=False)
    run = oomproof.fit(planned, x, y, batch_size=1024, shuffle=False, verbose=0, plan=plan).run
    assert (run.plan.micro_batch_size, run.plan.recompute) == (plan.micro_batch_size, plan.recompute)
    for a, b in zip(plain.get_weights(), planned.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_a_plan_serves_a_model_that_is_built_again():
    """Keras counts on when the same code builds the model once more, as when a cell of a notebook is run twice."""

    def built():
        inputs = keras.Input((8,))
        inner = keras.Sequential([keras.Input((8,)), *[keras.layers.Dense(8, "tanh") for _ in range(3)]])
        x = inner(inputs) + inputs
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(x)))
        model.compile("sgd", "mse")
        return model

    first, again = built(), built()
    labels = backends.current().segments(first)
    assert labels == ("sequential[1]/dense[1]", "sequential[1]/dense[2]", "sequential[1]/dense[3]", *labels[3:])
    assert labels == backends.current().segments(again)
    plan = oomproof.Plan(micro_batch_size=4, recompute=(f"{labels[0]}..{labels[1]}", labels[-2]))
    x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    for model in (first, again):
        assert oomproof.fit(model, x, x[:, :1], batch_size=8, plan=plan, verbose=0).run.plan.recompute == plan.recompute
    # The names of today stand for a label, too.
    names = [layer.name for layer in again.layers]
    oomproof.fit(again, x, x[:, :1], plan=oomproof.Plan(recompute=(names[-2],)), verbose=0)


def test_a_precision_lasts_as_long_as_the_guard():
    x, y = data()
    model = a_model()
    oomproof.guard(model, plan=oomproof.Plan(precision="mixed_bfloat16"))
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: seen.append(model.layers[1].compute_dtype)
    )
    model.fit(x, y, batch_size=32, verbose=0, callbacks=[watch])
    assert set(seen) == {"bfloat16"}
    oomproof.unguard(model)
    assert model.layers[1].compute_dtype == "float32"
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    model.fit(x, y, batch_size=32, verbose=0)


def test_a_precision_is_there_for_whatever_is_called_first():
    x, y = data()
    model = a_model()
    oomproof.guard(model, plan=oomproof.Plan(precision="mixed_bfloat16"))
    model.evaluate(x, y, verbose=0)
    assert model.layers[1].compute_dtype == "bfloat16"
    # Another guard for one call, and back.
    oomproof.fit(model, x, y, verbose=0)
    assert model.layers[1].compute_dtype == "float32"
    model.fit(x, y, verbose=0)
    assert model.layers[1].compute_dtype == "bfloat16"
    oomproof.unguard(model)
    assert model.layers[1].compute_dtype == "float32"


def test_float16_comes_with_a_scaled_loss():
    x, y = data()
    model = a_model()
    optimizer = model.optimizer
    oomproof.guard(model, plan=oomproof.Plan(precision="mixed_float16"))
    model.fit(x, y, batch_size=32, verbose=0)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    oomproof.unguard(model)
    assert model.optimizer is optimizer
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 2


@pytest.fixture
def asked():
    """A planner that may change the precision, what `fit` was given, and a device on which the batch does not fit."""
    model = a_model()
    planner = Planner(
        backends.current(), model, frozenset({"microbatch", "mixed_precision"}), named_levers=True, cache=False
    )
    x, y = data(1024)
    return planner, {"x": x, "y": y, "batch_size": 1024}, FakeMemory(int(peak() * 0.6))


def test_a_precision_is_chosen_before_fit_begins(asked):
    planner, arguments, memory = asked
    assert planner.changes_models
    assert planner.propose_for(arguments, memory, None).precision == "mixed_bfloat16"


def test_data_that_does_not_say_its_shapes_is_not_looked_at(asked):
    planner, _, memory = asked
    assert planner.propose_for({"x": iter([data()])}, memory, None) is None
    assert planner.propose_for({"x": None}, memory, None) is None


def test_a_precision_that_changes_the_loss_is_not_taken(asked, monkeypatch, caplog):
    planner, arguments, memory = asked
    monkeypatch.setattr(Planner, "_losses", lambda *_: (1.0, 1.2))
    plan = planner.propose_for(arguments, memory, None)
    assert plan.precision is None
    assert plan.micro_batch_size is not None
    assert "would be 1.2 instead of 1" in caplog.text


def test_a_model_that_cannot_be_traced_is_trained_without_a_plan(asked, monkeypatch):
    planner, arguments, memory = asked
    monkeypatch.setattr(Planner, "_all_ways", lambda *_: {}["something unforeseen"])
    assert planner.propose((arguments["x"], arguments["y"]), memory.describe(), MIB, 1.0) is None


def test_what_training_ended_with_takes_the_place_of_a_plan_that_was_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("OOMPROOF_CACHE_DIR", str(tmp_path))
    device, limit = FakeMemory(None).describe(), int(peak() * 0.5)

    def planner():
        return Planner(backends.current(), a_model(), frozenset({"microbatch", "recompute"}))

    first = planner()
    assert first.propose(data(1024), device, limit, 1.0).micro_batch_size != 7
    first.learned(oomproof.Plan(micro_batch_size=7))
    # A few bytes more in use than in the first run.
    assert planner().propose(data(1024), device, limit - 16, 1.0) == oomproof.Plan(micro_batch_size=7)


def test_nobody_is_refused_on_the_word_of_an_estimate(asked, caplog):
    planner, arguments, memory = asked
    assert planner.propose((arguments["x"], arguments["y"]), memory.describe(), MIB // 4, 1.0) is None
    assert "Predicted not to fit; trying anyway." in caplog.text
    assert "256 KiB" in caplog.text


def test_the_loss_is_compared_on_real_samples(asked):
    planner, arguments, _ = asked
    before, after = planner._losses((arguments["x"], arguments["y"]), "mixed_bfloat16")
    assert before != after
    assert abs(before - after) < 0.05 * before


# Under a limit that is real


@pytest.fixture(scope="module")
def children(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")

    def run(name, limit):
        path = folder / f"{name} {limit}.npz"
        environment = oom_memory.environment(BACKEND, limit or 2000)
        printed = forks.run("plan_child", name, limit, str(path), environment=environment)
        return json.loads(printed.strip().splitlines()[-1]), list(np.load(path).values())

    plain = {}

    def both(name, share):
        if name not in plain:
            plain[name] = run(name, 0)
        answer, weights = plain[name]
        return (*run(name, int(answer["peak"] * share / MIB)), weights)

    return both


@only("tensorflow", because="peaks of a real allocator on a CPU")
@pytest.mark.parametrize("share", [0.7, 0.4])
def test_no_step_fails(children, share):
    answer, weights, expected = children("layer norm", share)
    assert answer["ooms"] == 0
    assert answer["lines"][0].startswith(f"oomproof: batch {128} ")
    assert "to be proven on the first batch" in answer["lines"][0]
    assert answer["run"]["exactness"] == {"word": "exact", "why": []}
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@only("tensorflow", because="peaks of a real allocator on a CPU")
def test_batch_statistics_stay_those_of_the_whole_batch(children):
    answer, weights, expected = children("batch norm", 0.7)
    assert answer["run"]["plan"]["recompute"]
    assert answer["run"]["plan"]["micro_batch_size"] is None
    assert answer["run"]["plan"]["caveats"] == []
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
