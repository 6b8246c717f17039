"""Plans: made from a model and a limit, followed by training, and kept on disk."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import oom_memory
import pytest
from here import BACKEND, only

import oomproof
from oomproof import _backends as backends
from oomproof._backends.fake import FakeMemory
from oomproof._estimation.workloads import describe
from oomproof._planning import plan_cache, trial
from oomproof._planning import planner as planner_module
from oomproof._planning.levers import allowed
from oomproof._planning.planner import Planner
from oomproof._records.trace import Target

HERE = pathlib.Path(__file__).parent
MIB = 2**20


def a_model(norm=keras.layers.LayerNormalization, blocks=6, compiled=True):
    keras.utils.clear_session()  # Names count from the beginning, as in another run of a script.
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((16, 32))
    for index in range(blocks):
        y = keras.layers.Dense(128, activation="relu", name=f"wide_{index}")(norm(name=f"norm_{index}")(x))
        x = keras.layers.Add(name=f"add_{index}")([keras.layers.Dense(32, name=f"narrow_{index}")(y), x])
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))
    if compiled:
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data(samples=64):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 16, 32)).astype("float32"), rng.integers(0, 3, (samples, 1))


def peak(batch=1024):
    return oomproof.estimate(a_model(), batch, memory="80GiB", engine="trace").expected


# What a plan says


def test_what_fits_is_left_as_it_is():
    plan = oomproof.plan(a_model(), 1024, memory="8GiB", cache=False)
    assert (plan.micro_batch_size, plan.recompute, plan.precision, plan.jit_compile) == (None, (), None, None)
    assert plan.relative_time == 1.0
    assert plan.sentence.startswith("batch 1024 whole: predicted ")


def test_what_does_not_fit_is_made_to():
    budget = int(peak() * 0.4)
    plan = oomproof.plan(a_model(), 1024, budget=budget, cache=False)
    assert plan.predicted <= budget == plan.limit
    assert plan.micro_batch_size is not None or plan.recompute
    assert plan.relative_time > 1
    assert plan.caveats == ()
    assert sum(row.taken for row in plan.alternatives) == 1
    assert str(plan).count("\n") == len(plan.alternatives) + 1


class ReadsInputs(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y - y_pred)) + 0.0 * keras.ops.mean(x)


def images(kind=keras.Model, **compiled):
    inputs = keras.Input((64, 64, 3))
    model = kind(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling2D()(inputs)))
    model.compile("sgd", "mse", **compiled)
    return model


def test_a_batch_larger_than_the_memory_stays_on_the_host():
    budget = 64 * MIB  # The batch takes 192 MiB.
    # Without a GPU nobody can tell Keras's own "no" to XLA from the user's; op by op means the same here.
    model = images(run_eagerly=BACKEND == "tensorflow")
    plan = oomproof.plan(model, 4096, budget=budget, cache=False)
    assert plan.micro_batch_size <= 1024
    assert plan.predicted < budget


def test_a_batch_that_a_program_takes_whole_must_fit():
    model = images(ReadsInputs if BACKEND != "tensorflow" else keras.Model)
    if BACKEND == "torch":  # No program: pieces are moved one by one whatever the model.
        assert oomproof.plan(model, 4096, budget=64 * MIB, cache=False).micro_batch_size <= 1024
    else:
        with pytest.raises(oomproof.CannotFitError):
            oomproof.plan(model, 4096, budget=64 * MIB, cache=False)


def test_with_batch_statistics_recomputation_comes_first():
    budget = int(oomproof.estimate(a_model(keras.layers.BatchNormalization), 1024, memory="80GiB").expected * 0.8)
    plan = oomproof.plan(a_model(keras.layers.BatchNormalization), 1024, budget=budget, cache=False, allow="exact")
    assert plan.recompute
    assert plan.micro_batch_size is None
    assert plan.caveats == ()


def test_where_nothing_fits_it_says_what_comes_closest():
    with pytest.raises(oomproof.CannotFitError) as refused:
        oomproof.plan(a_model(), 1024, budget=MIB // 4, cache=False)
    assert "256 KiB" in str(refused.value)


def test_levers_that_are_not_named_are_not_used():
    budget = int(peak() * 0.4)
    for allow, field in (({"recompute"}, "micro_batch_size"), ({"microbatch"}, "recompute")):
        try:
            plan = oomproof.plan(a_model(), 1024, budget=budget, allow=allow, cache=False)
        except oomproof.CannotFitError:
            continue
        assert not getattr(plan, field)


def test_another_precision_where_it_is_allowed():
    budget = int(peak() * 0.8)
    plan = oomproof.plan(a_model(), 1024, budget=budget, allow={"microbatch", "mixed_precision"}, cache=False)
    assert plan.precision == "mixed_bfloat16"
    assert "in mixed_bfloat16" in plan.sentence


def test_the_model_is_left_as_it_was():
    model = a_model()
    before = [np.array(value) for value in model.get_weights()]
    oomproof.plan(
        model, 1024, budget=int(peak() * 0.4), allow={"microbatch", "recompute", "mixed_precision"}, cache=False
    )
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert model.dtype_policy.name == "float32"
    model.fit(*data(), verbose=0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"batch_size": 0, "budget": "1GiB"}, ValueError, "at least 1"),
        ({"batch_size": 8}, ValueError, "something to fit into"),
        ({"batch_size": 8, "budget": "1GiB", "allow": "everything"}, ValueError, "Received: allow='everything'"),
        ({"batch_size": 8, "budget": "1GiB", "allow": {"magic"}}, ValueError, "Expected `allow`"),
        ({"batch_size": 8, "budget": "lots"}, ValueError, "budget"),
        ({"batch_size": 8, "gpu": "rtx-9999"}, ValueError, "no GPU"),
        ({"batch_size": 8, "gpu": "t4", "budget": "100GiB"}, ValueError, "at most the device's memory"),
    ],
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=match):
        oomproof.plan(a_model(), **options)


def test_a_model_that_is_not_compiled():
    with pytest.raises(ValueError, match="not compiled"):
        oomproof.plan(a_model(compiled=False), 8, budget="1GiB")


# Plans on disk


def test_a_plan_is_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("OOMPROOF_CACHE_DIR", str(tmp_path))
    budget = int(peak() * 0.5)
    first = oomproof.plan(a_model(), 1024, budget=budget)
    with monkeypatch.context() as patch:
        patch.setattr("oomproof._planning.planner.Planner._all_ways", lambda *_: pytest.fail("made anew"))
        assert oomproof.plan(a_model(), 1024, budget=budget) == first
        with pytest.raises(pytest.fail.Exception):
            oomproof.plan(a_model(), 1024, budget=budget + MIB)
        with pytest.raises(pytest.fail.Exception):
            oomproof.plan(a_model(blocks=5), 1024, budget=budget)
        with pytest.raises(pytest.fail.Exception):
            oomproof.plan(a_model(), 1024, budget=budget, cache=False)
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
        with pytest.raises(pytest.fail.Exception):
            oomproof.plan(a_model(), 1024, budget=budget)
    assert plan_cache.forget() == 1
    assert plan_cache.forget() == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"micro": 3}'])
def test_a_broken_file_is_a_plan_to_be_made_anew(monkeypatch, tmp_path, content):
    monkeypatch.setenv("OOMPROOF_CACHE_DIR", str(tmp_path))
    first = oomproof.plan(a_model(), 64, memory="8GiB")
    (path,) = (tmp_path / "plans").glob("*.json")
    path.write_text(content)
    assert oomproof.plan(a_model(), 64, memory="8GiB") == first


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OOMPROOF_CACHE_DIR", str(tmp_path / "file"))
    assert oomproof.plan(a_model(), 64, memory="8GiB").batch_size == 64


def test_a_plan_goes_to_json_and_back(tmp_path):
    plan = oomproof.plan(a_model(), 1024, budget=int(peak() * 0.4), cache=False)
    plan.save(tmp_path / "plan.json")
    assert oomproof.Plan.load(tmp_path / "plan.json") == plan


# Plans that training follows


def test_training_follows_a_plan():
    x, y = data(2048)
    plain, planned = a_model(), a_model()
    plain.fit(x, y, batch_size=1024, shuffle=False, verbose=0)
    plan = oomproof.plan(planned, 1024, budget=int(peak() * 0.5), cache=False)
    run = oomproof.fit(planned, x, y, batch_size=1024, shuffle=False, verbose=0, plan=plan).run
    assert (run.plan.micro_batch_size, run.plan.recompute) == (plan.micro_batch_size, plan.recompute)
    for a, b in zip(plain.get_weights(), planned.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


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
def children(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")

    def run(name, limit):
        path = folder / f"{name} {limit}.npz"
        env = {**os.environ, **oom_memory.environment(BACKEND, limit or 2000), "KERAS_BACKEND": BACKEND}
        env["PYTHONPATH"] = str(HERE.parents[1] / "src")
        command = [sys.executable, str(HERE / "plan_child.py"), name, str(limit), str(path)]
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
        assert child.returncode == 0, child.stderr[-3000:]
        return json.loads(child.stdout.strip().splitlines()[-1]), list(np.load(path).values())

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


def test_room_for_what_an_update_computes_is_counted_where_that_is_for_all_weights_at_once():
    model = a_model()
    planner = Planner(backends.current(), model, frozenset({"microbatch"}), cache=False)
    weights = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    assert planner._while_updating() == (2 * weights if BACKEND == "torch" else 0)


def test_a_plan_that_is_exact_only_if_nothing_goes_wrong_is_not_taken(monkeypatch):
    model = a_model(keras.layers.BatchNormalization)
    planner = Planner(backends.current(), model, allowed("default"), cache=False)
    usual = planner_module._HARDLY

    def exact(limit, hardly):
        monkeypatch.setattr(planner_module, "_HARDLY", hardly)
        found = planner.propose(data(1024), FakeMemory(limit).describe(), limit, 1.0)
        return found is None or not found.caveats

    # The least at which an exact plan is taken that leaves nothing.
    low, high = 4 * MIB, 1024 * MIB
    while high - low > MIB // 4:
        middle = (low + high) // 2
        low, high = (low, middle) if exact(middle, 1.0) else (middle, high)
    assert exact(high, 1.0)
    assert not exact(high, usual)


@only("torch", because="an allocator whose free memory lies in pieces")
def test_a_plan_that_its_trace_does_not_go_through_with_is_made_with_more_caution(monkeypatch):
    budget = int(peak() * 0.4)
    answers = iter([False, False, True])
    limits = []

    def goes_through(trace, limit):
        limits.append(limit)
        return next(answers)

    monkeypatch.setattr(trial, "goes_through", lambda trace, limit: True)
    bold = oomproof.plan(a_model(), 1024, budget=budget, cache=False)
    monkeypatch.setattr(trial, "goes_through", goes_through)
    careful = oomproof.plan(a_model(), 1024, budget=budget, cache=False)
    assert len(limits) == 3
    assert 0.9 * budget < limits[0] < budget
    assert careful.predicted < 0.95 * bold.predicted


@only("torch", because="an allocator whose free memory lies in pieces")
def test_a_plan_is_looked_at_a_few_times_and_no_more(monkeypatch):
    looks = []
    monkeypatch.setattr(trial, "goes_through", lambda trace, limit: bool(looks.append(limit)))
    assert oomproof.plan(a_model(), 1024, budget=int(peak() * 0.6), cache=False).predicted
    assert len(looks) == 3


@only("torch", because="an allocator whose free memory lies in pieces")
def test_a_plan_says_what_its_own_trace_does():
    plan = oomproof.plan(a_model(), 1024, budget=int(peak() * 0.4), cache=False)
    pieces = {"micro_batch_size": plan.micro_batch_size, "recompute": plan.recompute, "engine": "trace"}
    traced = oomproof.estimate(a_model(), 1024, memory="16GiB", **pieces)
    assert plan.predicted == pytest.approx(traced.expected, rel=0.02)
    assert [row.predicted for row in plan.alternatives if row.taken] == [plan.predicted]


@only("torch", because="an allocator whose free memory lies in pieces")
def test_an_exact_plan_that_does_not_go_through_is_not_taken_after_all(monkeypatch):
    model, budget = a_model(keras.layers.BatchNormalization), int(peak() * 0.6)
    planner = Planner(backends.current(), model, allowed("default"), cache=False)
    step = describe(model, 1024, "train", False, Target(True, (8, 0)))
    assert not planner._for_training(step, budget, 1.0).caveats
    looked_at, trace_of = [], Planner._trace_of

    def traced(self, plan, workload):
        looked_at.append(plan)
        return trace_of(self, plan, workload)

    monkeypatch.setattr(Planner, "_trace_of", traced)
    monkeypatch.setattr(trial, "goes_through", lambda *_: looked_at[-1].micro_batch_size is not None)
    assert planner._for_training(step, budget, 1.0).caveats
