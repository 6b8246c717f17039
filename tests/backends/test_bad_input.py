"""What is refused, with which words, and that nothing has been trained by then."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
from here import out_of_memory

import oomproof
from oomproof import _backends as backends
from oomproof._records.run import Device, Run

MEMORY = type(backends.current().memory())
X, Y = np.ones((16, 3), "float32"), np.ones((16, 1), "float32")
FROM_DATA = "raised while the next batch was read from the data"


def make_model(compiled=True):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    if compiled:
        model.compile("sgd", "mse")
    return model


@pytest.fixture
def device(monkeypatch):
    """A device of 1 GiB that can be measured, in words only: nothing here gets as far as to train on it."""
    monkeypatch.setattr(MEMORY, "describe", lambda self: Device("GPU:0", 2**30, True))


@pytest.fixture
def unmeasurable(monkeypatch):
    """A device that says nothing about its memory, as a CPU mostly does."""
    monkeypatch.setattr(MEMORY, "describe", lambda self: Device("CPU:0", None, False))


REFUSED = [
    ({"budget": "8 bananas"}, ValueError, "Received: budget='8 bananas'"),
    ({"budget": ""}, ValueError, "Received: budget=''"),
    ({"budget": 0}, ValueError, "positive. Received: budget=0"),
    ({"budget": "0GiB"}, ValueError, "positive. Received: budget='0GiB'"),
    ({"budget": -5}, ValueError, "positive. Received: budget=-5"),
    ({"budget": "-5GiB"}, ValueError, "Received: budget='-5GiB'"),
    ({"budget": "2GiB"}, ValueError, r"at most the device's memory, 1\.0 GiB"),
    ({"budget": 2**30 + 1}, ValueError, r"at most the device's memory, 1\.0 GiB"),
    ({"budget": "120%"}, ValueError, "between 0% and 100%"),
    ({"budget": 1.5}, TypeError, "Received: budget=1.5"),
    ({"budget": True}, TypeError, "Received: budget=True"),
    ({"micro_batch_size": 0}, ValueError, "at least 1. Received: micro_batch_size=0"),
    ({"micro_batch_size": -1}, ValueError, "at least 1. Received: micro_batch_size=-1"),
    ({"micro_batch_size": "many"}, TypeError, "Received: micro_batch_size='many'"),
    ({"micro_batch_size": 2.0}, TypeError, "Received: micro_batch_size=2.0"),
    ({"micro_batch_size": True}, TypeError, "Received: micro_batch_size=True"),
    ({"allow": "everything"}, ValueError, "Received: allow='everything'"),
    ({"allow": {"microbatch", "magic"}}, ValueError, "Received: allow="),
    ({"allow": None}, (ValueError, TypeError), "Received: allow=None"),
    ({"plan": {"micro_batch_size": 4}}, TypeError, "Expected `plan` to be an oomproof.Plan"),
    ({"plan": 4}, TypeError, "Received: plan=4"),
]


@pytest.mark.parametrize("how", ["guard", "fit"])
@pytest.mark.parametrize(("arguments", "error", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_arguments(device, how, arguments, error, words):
    model = make_model()
    before = model.get_weights()
    with pytest.raises(error, match=words):
        oomproof.guard(model, **arguments) if how == "guard" else oomproof.fit(model, X, Y, verbose=0, **arguments)
    assert_untouched(model, before)


def assert_untouched(model, before):
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert not model.compiled or int(model.optimizer.iterations) == 0
    assert "_oomproof_guard" not in vars(model)
    assert "fit" not in vars(model)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, "at least 1. Received: batch_size=0"),
        ({"batch_size": -3}, ValueError, "at least 1. Received: batch_size=-3"),
        ({"batch_size": "32"}, TypeError, "Received: batch_size='32'"),
        ({"batch_size": 2.5}, TypeError, "Received: batch_size=2.5"),
        ({"batch_size": 8, "micro_batch_size": 9}, ValueError, "at most the batch size. Received: micro_batch_size=9"),
        ({"micro_batch_size": 33}, ValueError, "Received: micro_batch_size=33, batch_size=32"),
        ({"banana": 1}, TypeError, "Received: banana"),
        ({"epoch": 3}, TypeError, "Received: epoch"),
    ],
    ids=str,
)
def test_bad_arguments_of_fit(arguments, error, words):
    model = make_model()
    before = model.get_weights()
    with pytest.raises(error, match=words):
        oomproof.fit(model, X, Y, verbose=0, **arguments)
    assert_untouched(model, before)


@pytest.mark.parametrize("batch_size", [0, -1, "32"])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_bad_batch_size_of_a_guarded_model(method, batch_size):
    model = oomproof.guard(make_model())
    before = model.get_weights()
    with pytest.raises((ValueError, TypeError), match="batch_size="):
        getattr(model, method)(X, Y, batch_size=batch_size, verbose=0)
    assert_untouched(oomproof.unguard(model), before)


def test_a_numpy_int_is_a_batch_size_as_in_keras():
    try:
        make_model().fit(X, Y, batch_size=np.int64(4), verbose=0)
    except ValueError as refused:  # By torch's loader of data.
        with pytest.raises(type(refused), match="batch_size"):
            oomproof.fit(make_model(), X, Y, batch_size=np.int64(4), verbose=0)
    else:
        history = oomproof.fit(make_model(), X, Y, batch_size=np.int64(4), verbose=0)
        assert history.run.steps["train"] == 4


def test_micro_size_above_the_batch_size_of_a_dataset():
    model = oomproof.guard(make_model(), micro_batch_size=9)
    import tensorflow as tf

    with pytest.raises(ValueError, match="batch_size=8"):
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True), verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_a_model_never_compiled():
    model = make_model(compiled=False)
    before = model.get_weights()
    with pytest.raises(ValueError, match="compile"):
        oomproof.fit(model, X, Y, verbose=0)
    assert_untouched(model, before)


@pytest.mark.parametrize("thing", [None, 3, "model", keras.layers.Dense(1), object()], ids=lambda t: type(t).__name__)
def test_not_a_model(thing):
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        oomproof.guard(thing)
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        oomproof.fit(thing, X, Y)
    assert oomproof.unguard(thing) is thing


def test_a_budget_on_a_device_that_cannot_be_measured(unmeasurable):
    model = make_model()
    before = model.get_weights()
    with pytest.raises(oomproof.BackendError, match="cannot be kept on CPU:0"):
        oomproof.fit(model, X, Y, budget="1GiB", verbose=0)
    assert_untouched(model, before)


def test_a_share_of_a_device_that_does_not_say_its_size(unmeasurable):
    with pytest.raises(ValueError, match="share of the device's memory"):
        oomproof.guard(make_model(), budget="90%")


@pytest.mark.parametrize("verbose", ["loud", None, -1])
def test_bad_verbose(verbose):
    with pytest.raises((ValueError, TypeError), match="verbose"):
        oomproof.guard(make_model(), verbose=verbose)


# Gradients for loops of one's own


def losses(x, y):
    return keras.losses.mean_squared_error(y, x)


def mistakes(model):
    """(arguments of `gradients`, error, words) by what was mistaken."""
    variables = model.trainable_variables
    return {
        "swapped": ((variables, losses, (X, Y)), TypeError, r"gradients\(loss_fn, variables, data\)"),
        "losses, not a function": ((X, variables, (X, Y)), TypeError, "`loss_fn` to be a function.* type ndarray"),
        "a model for a function": ((model, variables, (X, Y)), TypeError, "`loss_fn` to be a function.* Sequential"),
        "a model for variables": (
            (losses, model, (X, Y)),
            TypeError,
            r"model\.trainable_variables.* the Sequential it",
        ),
        "a layer for variables": ((losses, model.layers[0], (X, Y)), TypeError, "the Dense itself"),
        "one variable": ((losses, variables[0], (X, Y)), TypeError, "list of variables.* of type"),
        "no list": ((losses, 3, (X, Y)), TypeError, "list of variables.* Received: variables of type int"),
        "None": ((losses, None, (X, Y)), TypeError, "Received: variables of type NoneType"),
        "no variables": ((losses, [], (X, Y)), ValueError, "at least one variable. Received: none. A model that is"),
        "weights": ((losses, model.get_weights(), (X, Y)), TypeError, r"Received: variables\[0\] of type ndarray"),
        "layers": ((losses, model.layers, (X, Y)), TypeError, r"Received: variables\[0\] of type Dense"),
        "no data": ((losses, variables, ()), ValueError, r"Received: data=\(\), which holds none"),
        "data of None": ((losses, variables, None), ValueError, "Received: data=None, which holds none"),
        "an empty batch": ((losses, variables, (X[:0], Y[:0])), ValueError, r"at least one sample.* shape \(0, 3\)"),
        "plain numbers": ((losses, variables, (1.0, 2)), TypeError, "Received: plain numbers, such as 1.0"),
        "a list of numbers": ((losses, variables, ([1, 2], [3, 4])), TypeError, "numbers, such as 1. Make one array"),
        "no samples": ((losses, variables, (X, np.float32(1))), ValueError, "Received: a scalar, which has no samples"),
        "a text": ((losses, variables, (X, "labels")), TypeError, "Received: a str"),
        "a generator": ((losses, variables, iter([(X, Y)])), TypeError, "Received: a list_iterator"),
    }


@pytest.mark.parametrize("size", ["auto", 4])
@pytest.mark.parametrize("mistake", mistakes(make_model()))
def test_gradients_with_the_wrong_arguments(mistake, size):
    arguments, error, words = mistakes(make_model())[mistake]
    with pytest.raises(error, match=words):
        oomproof.gradients(*arguments, micro_batch_size=size)


def test_gradients_of_pieces_larger_than_the_batch():
    model = make_model()

    def loss_fn(x, y):
        return keras.losses.mean_squared_error(y, model(x))

    whole, larger = (
        oomproof.gradients(loss_fn, model.trainable_variables, (X, Y), micro_batch_size=size) for size in ("auto", 99)
    )
    np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(loss) for loss, _ in (whole, larger)))


# Errors that come from the data


def failing(error):
    for _ in range(3):  # Keras reads two batches ahead to learn their shapes.
        yield X[:8], Y[:8]
    raise error


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("mine"), OSError(24, "Too many open files"), MemoryError("host")],
    ids=lambda error: type(error).__name__,
)
def test_a_generator_that_raises(error):
    """It arrives as in plain Keras, where TensorFlow puts errors of its own in its place, and is not tried again."""
    plain, guarded = make_model(), oomproof.guard(make_model(), micro_batch_size=2)
    with pytest.raises(Exception, match=str(error.args[-1])) as expected:
        plain.fit(failing(error), epochs=1, verbose=0)
    with pytest.raises(type(expected.value)) as found:
        guarded.fit(failing(error), epochs=1, verbose=0)
    assert any(FROM_DATA in note for note in found.value.__notes__)
    assert int(guarded.optimizer.iterations) == 3


class Exhausted(keras.utils.PyDataset):
    """Batches of which the second cannot be read."""

    def __init__(self, error):
        super().__init__()
        self.error, self.pulls = error, []

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.pulls.append(index)
        # The first is read once more, to learn the shapes.
        if index == 1:
            raise self.error
        return X[:8], Y[:8]


@pytest.mark.parametrize("text", [None, "Too many open files"])
def test_data_that_runs_out_of_something_is_not_a_failed_step(text, caplog):
    """Even a real shortage of memory while data is read is not answered by smaller pieces of the batch."""
    data = Exhausted(out_of_memory(text))
    model = oomproof.guard(make_model(), micro_batch_size=2)
    with pytest.raises(Exception, match=text or "(?i)OOM|out of memory"):
        model.fit(data, verbose=0, shuffle=False)
    assert int(model.optimizer.iterations) <= 1
    assert data.pulls.count(1) == 1
    assert not [record for record in caplog.records if record.name == "oomproof"]


def test_a_corrupt_element_of_a_dataset():
    import tensorflow as tf

    data = (
        tf.data.Dataset.from_tensor_slices((X, Y))
        .batch(8)
        .map(lambda x, y: (tf.debugging.check_numerics(x / 0, "bad"), y))
    )
    model = oomproof.guard(make_model(), micro_batch_size=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad"):
        model.fit(data, verbose=0)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("text", ["No space left on device", "Too many open files"])
def test_a_full_disk_in_a_step_is_raised_unchanged(text, monkeypatch):
    model = oomproof.guard(make_model())
    model.train_on_batch(X, Y)
    # RuntimeError where the framework has no error of that name for anything but memory.
    error, calls = out_of_memory(text), []
    if type(error).__name__ == "OutOfMemoryError":
        error = RuntimeError(text)

    def full(*args):
        calls.append(args)
        raise error

    monkeypatch.setattr(vars(model)["_oomproof_guard"]._driver.step, "train", full)
    with pytest.raises(type(error)) as caught:
        model.fit(X, Y, verbose=0)
    assert caught.value is error
    assert len(calls) == 1


# What is said, and what is kept


@pytest.fixture
def short_of_memory(monkeypatch):
    """A model whose whole batch of 16 fails, in so many words."""
    model = oomproof.guard(make_model())
    model.train_on_batch(X, Y)
    step = vars(model)["_oomproof_guard"]._driver.step
    train = step.train

    def limited(data, pieces, *rest):
        if pieces < 4:
            raise out_of_memory()
        return train(data, pieces, *rest)

    monkeypatch.setattr(step, "train", limited)
    return model


@pytest.mark.parametrize("verbose", [0, 2, "auto"])
def test_one_line_for_each_event_and_none_when_silent(short_of_memory, verbose, caplog, capsys):
    with caplog.at_level(logging.INFO):
        history = short_of_memory.fit(X, Y, batch_size=16, epochs=2, verbose=verbose)
    lines = [record.getMessage() for record in caplog.records if record.name == "oomproof"]
    assert [(event.before, event.after) for event in history.run.events] == [(16, 8), (8, 4)]
    assert lines == ([] if verbose == 0 else [event.message for event in history.run.events])
    if verbose == 0:
        assert capsys.readouterr().out == ""


def test_guards_own_verbose_wins(short_of_memory, caplog):
    vars(short_of_memory)["_oomproof_guard"]._verbose = 0
    short_of_memory.fit(X, Y, batch_size=16, verbose=2)
    assert not [record for record in caplog.records if record.name == "oomproof"]


def test_the_run_goes_to_json_and_back(short_of_memory, tmp_path):
    run = short_of_memory.fit(X, Y, batch_size=16, verbose=0).run
    assert run.ooms == 2
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run
