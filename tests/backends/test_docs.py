"""The code in README and docs runs as it is printed."""

import os
import pathlib
import re

import keras
import numpy as np
from here import BACKEND, only

import oomproof

ROOT = pathlib.Path(__file__).parents[2]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def a_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(11, 4)(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))


def names():
    """What the pages take for granted: a model, its data and an optimizer."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 11, (64, 5)), rng.integers(0, 3, (64, 5))
    model = a_model()
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile("adam", loss)
    found = {"keras": keras, "np": np, "oomproof": oomproof, "model": model, "loss": loss, "loss_fn": loss}
    found |= {"x": x, "y": y, "optimizer": keras.optimizers.SGD(0.1)}
    if BACKEND == "tensorflow":
        import tensorflow as tf

        found |= {"tf": tf, "totals": [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]}
    return found


@only("tensorflow", because="the tape and the `train_step` of docs/own-loops.md")
def test_own_loops_of_tensorflow():
    *loops, own_step = blocks("docs/own-loops.md")
    namespace = names()
    for block in loops:
        exec(block, namespace)
    exec(own_step, namespace)
    inputs = keras.Input((5,), dtype="int32")
    outputs = keras.layers.Dense(3)(keras.layers.Embedding(11, 4)(inputs))
    model = namespace["MyModel"](inputs, outputs)
    model.losses_of = lambda x, y: keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
    model.compile("sgd")
    history = model.fit(namespace["x"], namespace["y"], batch_size=48, epochs=2, verbose=0)
    assert history.history["batch_loss"][1] < history.history["batch_loss"][0]


def test_own_loops():
    """What the page shows that is no framework's own."""
    neutral = [b for b in blocks("docs/own-loops.md") if "tf." not in b and "train_step" not in b]
    assert neutral
    for block in neutral:
        namespace = names()
        exec(block, namespace)
        if "has_aux" in block:
            assert 0 <= float(namespace["accuracy"].result()) <= 1
            assert namespace["predictions"].shape == (64, 5, 3)
            continue
        loss, grads = oomproof.gradients(
            namespace["loss_fn"], namespace["model"].trainable_variables, (namespace["x"], namespace["y"])
        )
        namespace["optimizer"].apply(grads, namespace["model"].trainable_variables)
        assert np.isfinite(float(loss))


def test_verify_and_training_pages(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # A page saves a plan.
    namespace = names()
    for page in ("README.md", "docs/exactness.md", "docs/estimating.md", "docs/planning.md", "docs/explaining.md"):
        for block in blocks(page):
            # No page is long enough to need the sizes it shows.
            code = block.replace("1024", "32").replace("epochs=10", "epochs=1, verbose=0")
            exec(code.replace(', budget="8GiB"', ", verbose=0"), namespace)
    assert namespace["history"].run.steps["train"] == 2


def test_data_sources_page(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # The page writes the files it reads.
    namespace = {"keras": keras, "os": os}
    for block in blocks("docs/data-sources.md"):
        exec(block, namespace)
    assert namespace["state"]["batch"] == 15
    assert [len(batch[0]) for batch in namespace["made"]] == [16] * 6 + [4]
