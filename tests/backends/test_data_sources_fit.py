"""What `fit` is given by a stream: the stream's order, whatever Keras's settings, and where it is afterwards."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
from data_recorder import expected, numbered, recorder
from here import BACKEND, crossed

from oomproof import data

COUNT, BATCH, SEED = 50, 8, 7
# Keras on torch takes no `steps_per_execution`.
TWO_AT_A_TIME = (
    []
    if BACKEND == "torch"
    else [
        ({"steps_per_execution": 2}, {"epochs": 1}, None, (1, 0)),
        ({"steps_per_execution": 2}, {"epochs": 2}, 6, (1, 4)),
    ]
)


def a_stream(**options):
    x, y = numbered(COUNT)
    return data.from_arrays(x, y, batch_size=BATCH, shuffle=True, seed=SEED, **options)


@pytest.mark.seam
@pytest.mark.parametrize("built", [False, True], ids=["unbuilt", "built"])
@pytest.mark.parametrize(("shuffle", "workers"), crossed([True, False], [0, 1, 3]))
def test_order_is_the_streams(built, shuffle, workers):
    model, stream = recorder(built), a_stream(workers=workers)
    model.fit(stream, epochs=3, shuffle=shuffle, verbose=0)
    assert model.seen == expected(COUNT, SEED, range(3), BATCH)


@pytest.mark.seam
def test_validation_and_evaluation_leave_the_order_alone():
    x, y = numbered(20)
    held_out = data.from_arrays(x, y, batch_size=BATCH)
    model, stream = recorder(), a_stream()
    model.fit(stream, epochs=2, validation_data=held_out, verbose=0)
    model.evaluate(held_out, verbose=0)
    model.fit(stream, epochs=1, verbose=0)
    assert model.seen == expected(COUNT, SEED, range(3), BATCH)


@pytest.mark.seam
def test_other_datasets_keep_keras_adapter():
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    class Plain(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return numbered(4)

    adapter = PyDatasetAdapter(Plain(workers=2), shuffle=True)
    assert type(adapter) is PyDatasetAdapter
    assert adapter.shuffle
    assert adapter.enqueuer is not None


@pytest.mark.parametrize("count", [1, 2, 9])
def test_small_data_begins_with_its_first_epoch(count):
    """Keras looks at a batch or two to build the model, which may be all of them."""
    x, y = numbered(count)
    model, stream = recorder(), data.from_arrays(x, y, batch_size=4, shuffle=True, seed=SEED)
    model.fit(stream, epochs=2, verbose=0)
    assert model.seen == expected(count, SEED, range(2), 4)
    assert stream.state["epoch"] == 2


def test_predict_keeps_the_order_of_the_data():
    x, _ = numbered(COUNT)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    predicted = model.predict(data.from_arrays(x, batch_size=BATCH), verbose=0)
    np.testing.assert_allclose(predicted[:, 0], x.sum(1), rtol=1e-5)


def test_class_weight_reaches_the_loss():
    x = np.ones((8, 3), "float32")
    stream = data.from_arrays(x, np.arange(8) % 2, batch_size=8)
    losses = []
    for weights in (None, {0: 0.0, 1: 0.0}):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        losses.append(model.fit(stream, class_weight=weights, verbose=0).history["loss"][0])
    assert losses[0] > 0
    assert losses[1] == 0


def test_structures_of_arrays():
    x, y = numbered(12)
    stream = data.from_arrays({"a": x, "b": x * 2}, y, np.ones(12, "float32"), batch_size=4)
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    total = keras.layers.Dense(1)(keras.layers.Add()([a, b]))
    model = keras.Model({"a": a, "b": b}, total)
    model.compile("sgd", "mse")
    assert np.isfinite(model.fit(stream, verbose=0).history["loss"][0])


# State


@pytest.mark.parametrize(
    ("options", "fit_options", "stop_after", "position"),
    [
        ({}, {"epochs": 2}, None, (2, 0)),
        ({}, {"epochs": 2}, 10, (1, 3)),
        ({}, {"epochs": 3, "steps_per_epoch": 2}, None, (0, 6)),
        ({}, {"epochs": 2, "steps_per_epoch": 7}, None, (2, 0)),
        *TWO_AT_A_TIME,
    ],
    ids=str,
)
def test_state_counts_what_was_trained_on(options, fit_options, stop_after, position):
    """The samples that the model had seen and those that a resumed stream gives are together what there is."""
    model, stream = recorder(**options), a_stream()
    calls = iter(range(1, 1000))

    def stop(batch, logs):
        model.stop_training = next(calls) == stop_after

    stopper = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    model.fit(stream, callbacks=[stream.keeper(), stopper], verbose=0, **fit_options)
    state = json.loads(json.dumps(stream.state))
    assert (state["epoch"], state["batch"]) == position
    rest = [batch[0][:, 0].astype(int).tolist() for batch in a_stream().resume(state)]
    assert model.seen + rest == expected(COUNT, SEED, range(position[0] + 1), BATCH)


def test_a_resumed_fit_begins_with_the_rest_and_goes_on_with_whole_epochs():
    model, stream = recorder(), a_stream()
    stream.resume(stream.state_at(1, 3))
    keeper = stream.keeper()
    model.fit(stream, initial_epoch=1, epochs=3, callbacks=[keeper], verbose=0)
    assert model.seen == expected(COUNT, SEED, (1, 2), BATCH)[3:]
    assert (stream.state["epoch"], stream.state["batch"]) == (3, 0)


def test_states_of_other_data_are_refused():
    state = a_stream().state
    x, y = numbered(COUNT + 1)
    with pytest.raises(ValueError, match=r"samples=50 in the state, 51 in this stream"):
        data.from_arrays(x, y, batch_size=BATCH, shuffle=True).resume(state)
    with pytest.raises(ValueError, match=r"batch_size=8 in the state, 9 in this stream"):
        data.from_arrays(x[:COUNT], y[:COUNT], batch_size=9, shuffle=True).resume(state)


def test_the_seed_of_the_state_counts():
    x, y = numbered(COUNT)
    resumed = data.from_arrays(x, y, batch_size=BATCH, shuffle=True).resume(a_stream().state_at(0, 2))
    assert [batch[0][:, 0].tolist() for batch in resumed] == expected(COUNT, SEED, (0,), BATCH)[2:]


_CHILD = """
import json, os, signal, sys
from data_recorder import recorder
from oomproof import data
import keras
path, killed_after = sys.argv[1], int(sys.argv[2])
seed = 7 if killed_after else None
stream = data.from_arrays(path + "/x.npy", path + "/y.npy", batch_size=8, shuffle=True, seed=seed)
if not killed_after:
    stream.resume(json.load(open(path + "/state.json")))
model = recorder()
calls = iter(range(1, 1000))
def after(batch, logs):
    with open(path + "/state.json", "w") as file:
        json.dump(stream.state, file)
    with open(path + "/seen.jsonl", "a") as file:
        print(json.dumps(model.seen[-1]), file=file)
    if next(calls) == killed_after:
        os.kill(os.getpid(), signal.SIGKILL)
saver = keras.callbacks.LambdaCallback(on_train_batch_end=after)
model.fit(stream, initial_epoch=stream.state["epoch"], epochs=3, callbacks=[stream.keeper(), saver], verbose=0)
"""


def test_killed_and_resumed_in_another_process(tmp_path):
    x, y = numbered(COUNT)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    here = pathlib.Path(__file__).parent
    codes = [
        subprocess.run([sys.executable, "-c", _CHILD, str(tmp_path), killed], cwd=here, timeout=120).returncode
        for killed in ("11", "0")
    ]
    assert codes == [-signal.SIGKILL, 0]
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert seen == expected(COUNT, SEED, range(3), BATCH)


# Failures


def test_python_ends_after_a_fit_that_was_stopped():
    """TensorFlow's threads are in the middle of reading ahead then."""
    code = """
import time, keras, numpy as np
from oomproof import data
class Slow:
    shape, dtype = (6400, 3), np.dtype("float32")
    def __getitem__(self, wanted):
        time.sleep(0.05)
        return np.zeros((64, 3), "float32")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
def third(batch, logs):
    model.stop_training = batch == 2
stop = keras.callbacks.LambdaCallback(on_train_batch_end=third)
model.fit(data.from_arrays(Slow(), np.zeros(6400), batch_size=64), callbacks=[stop], verbose=0)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_a_source_that_fails_stops_training_with_its_words():
    class Fails:
        shape, dtype = (COUNT, 3), np.dtype("float32")

        def __getitem__(self, wanted):
            if (np.arange(COUNT)[wanted] == 30).any():
                raise RuntimeError("disk 7 is gone")
            return np.zeros((len(np.arange(COUNT)[wanted]), 3), "float32")

    stream = data.from_arrays(Fails(), numbered(COUNT)[1], batch_size=BATCH)
    with pytest.raises(Exception, match="disk 7 is gone"):  # TensorFlow makes it an error of its own.
        recorder().fit(stream, verbose=0)
