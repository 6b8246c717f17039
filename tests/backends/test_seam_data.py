"""What `fit` takes, pinned: its arguments, and data of every kind. On the newest and the oldest supported Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from here import BACKEND
from pairs import (
    BATCH,
    SAMPLES,
    Everything,
    X,
    Y,
    assert_same,
    assert_same_history,
    assert_same_logs,
    both,
    fit,
    make_model,
)

pytestmark = pytest.mark.seam


# Arguments of fit


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial_epoch": 1},
        {"steps_per_epoch": 3},
        {"validation_split": 0.25},
        {"validation_data": (X[:9], Y[:9]), "validation_freq": 2},
        {"validation_data": (X[:9], Y[:9]), "validation_freq": [1, 3], "validation_batch_size": 4},
        {"validation_data": (X, Y), "validation_steps": 2},
        {"sample_weight": np.linspace(0, 2, SAMPLES).astype("float32")},
        {"batch_size": 100},
        {"batch_size": None},
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_arguments_of_fit(arguments):
    plain, guarded = both()
    assert_same_history(fit(plain, **arguments), fit(guarded, **arguments))
    assert_same(plain, guarded)


def test_class_weight():
    def classifier():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        return model

    plain, guarded = both(classifier)
    labels = np.arange(SAMPLES) % 3
    histories = [
        model.fit(
            X, labels, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, class_weight={0: 1.0, 1: 5.0, 2: 0.0}
        )
        for model in (plain, guarded)
    ]
    assert_same_history(*histories)
    assert_same(plain, guarded)


def several_steps_on_torch():
    from oomproof._compat.torch import RUNS_SEVERAL_STEPS

    return RUNS_SEVERAL_STEPS


@pytest.mark.parametrize("per_execution", [2, 4, 7])
def test_steps_per_execution_trains_on_every_batch(per_execution):
    """Five batches: a remainder of one after four, two of two and one, and fewer than seven."""
    plain, guarded = both(lambda: make_model(steps_per_execution=per_execution))
    if BACKEND == "torch" and not several_steps_on_torch():
        for model in (plain, guarded):
            with pytest.raises(ValueError, match="steps_per_execution"):
                fit(model)
        return
    calls = []
    for model in (plain, guarded):
        callback = Everything()
        history = fit(model, callbacks=[callback], validation_data=(X, Y))
        calls.append([hook for hook, _ in callback.calls])
    assert calls[0] == calls[1]
    assert_same(plain, guarded)
    assert int(guarded.optimizer.iterations) == 15
    assert history.run.steps["train"] == 15
    np.testing.assert_allclose(
        plain.predict(X, batch_size=5, verbose=0), guarded.predict(X, batch_size=5, verbose=0), rtol=1e-5, atol=1e-6
    )


def batches():
    for start in range(0, SAMPLES, BATCH):
        yield X[start : start + BATCH], Y[start : start + BATCH]


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return -(-SAMPLES // BATCH)

    def __getitem__(self, index):
        return X[index * BATCH : (index + 1) * BATCH], Y[index * BATCH : (index + 1) * BATCH]


def dataset():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def torch_loader():
    import torch

    arrays = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(arrays, batch_size=BATCH)


@pytest.mark.parametrize(
    "data",
    [dataset, lambda: dataset().repeat(2), Sequence, torch_loader],
    ids=["dataset", "repeated dataset", "PyDataset", "torch DataLoader"],
)
def test_data_of_every_kind(data):
    plain, guarded = both()
    histories = [model.fit(data(), epochs=1, verbose=0, shuffle=False) for model in (plain, guarded)]
    assert_same_history(*histories)
    assert_same(plain, guarded)


@pytest.mark.filterwarnings("ignore:.*ran out of data.*", "ignore:.*was provided as a generator.*")
@pytest.mark.parametrize("arguments", [{}, {"steps_per_epoch": 5}, {"steps_per_epoch": 9}, {"steps_per_epoch": 3}])
def test_generators(arguments):
    """Compared with the same batches in a PyDataset: where a generator ends, plain Keras counts one step too many."""
    plain, guarded = both()
    steps = min(arguments.get("steps_per_epoch", 5), 5)
    plain.fit(Sequence(), verbose=0, shuffle=False, steps_per_epoch=steps)
    history = guarded.fit(batches(), verbose=0, **arguments)
    assert_same(plain, guarded)
    assert history.run.steps["train"] == int(guarded.optimizer.iterations) == steps


def test_on_batch_methods():
    plain, guarded = both()
    for start in range(0, 24, 8):
        x, y = X[start : start + 8], Y[start : start + 8]
        logs = [model.train_on_batch(x, y, return_dict=True) for model in (plain, guarded)]
        assert_same_logs(*logs)
        logs = [model.test_on_batch(x, y, return_dict=True) for model in (plain, guarded)]
        assert_same_logs(*logs)
        np.testing.assert_allclose(plain.predict_on_batch(x), guarded.predict_on_batch(x), rtol=1e-5, atol=1e-6)
    assert_same(plain, guarded)
