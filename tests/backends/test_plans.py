"""Plans: made from a model and a limit, and kept on disk."""

import keras
import numpy as np
import pytest
from here import BACKEND, only
from planned import a_model, data, peak

import oomproof
from oomproof import _backends as backends
from oomproof._backends.fake import FakeMemory
from oomproof._estimation.workloads import describe
from oomproof._planning import plan_cache, trial
from oomproof._planning import planner as planner_module
from oomproof._planning.levers import allowed
from oomproof._planning.planner import Planner
from oomproof._records.trace import Target

MIB = 2**20


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
