"""What `estimate` gives a step for data, and what it says of bad input."""

import keras
import pytest
from estimated import conv_net, weights_of
from keras import layers

import oomproof
from oomproof._estimation.workloads import describe
from oomproof._records.trace import Target


def several_inputs():
    keras.utils.clear_session(free_memory=False)
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    extra = keras.Input((4,), name="extra")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(1000, 64, name="words")(tokens))
    one = layers.Dense(5, name="kind")(hidden)
    two = layers.Dense(1, name="rating")(layers.Concatenate()([hidden, extra]))
    model = keras.Model({"tokens": tokens, "extra": extra}, {"kind": one, "rating": two})
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "rating": "mse"}
    model.compile("adam", losses)
    return model


def test_sequence_lengths():
    model = several_inputs()
    short, long = (
        oomproof.estimate(model, 2048, input_shape={"tokens": (length,)}, engine="trace").expected
        for length in (64, 512)
    )
    assert long > 2 * short
    assert oomproof.estimate(model, 2048, input_shape={"tokens": 64}, engine="trace").expected == short
    # What it tells to do is what works.
    with pytest.raises(ValueError, match=r"'tokens'.*dimension 0 can be anything.*--input-shape tokens=512"):
        oomproof.estimate(model, 256)
    with pytest.raises(ValueError, match=r"2 inputs.*Name those you mean.*--input-shape \w+="):
        oomproof.estimate(model, 256, input_shape=(64,))


# What a step is given


def with_outputs(*names):
    keras.utils.clear_session(free_memory=False)
    x = keras.Input((8,))
    heads = {
        "kind": layers.Dense(5, activation="softmax", name="kind")(x),
        "box": layers.Dense(4, name="box")(x),
    }
    model = keras.Model(x, {name: heads[name] for name in names})
    model.compile("sgd", {"kind": "sparse_categorical_crossentropy", "box": "mse"}, metrics={"box": ["mae"]})
    return model


def test_losses_by_name_whatever_the_order_of_the_outputs():
    one, other = (
        oomproof.estimate(with_outputs(*names), 64, engine="trace") for names in (("kind", "box"), ("box", "kind"))
    )
    assert one.expected == other.expected


def classes(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p)


class OwnLoss(keras.Model):
    takes: str = "values"

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if self.takes == "classes":
            return keras.ops.mean(classes(y, y_pred))
        return keras.ops.mean(keras.ops.square((x if self.takes == "nothing" else y) - y_pred))


@pytest.mark.parametrize("loss", ["function", "named", "nothing", "values", "classes"])
def test_targets_are_what_the_loss_takes(loss):
    keras.utils.clear_session(free_memory=False)
    x = keras.Input((512,))
    y = layers.Dense(512, activation="softmax")(x)
    functions = {"function": classes, "named": keras.losses.SparseCategoricalCrossentropy(name="loss")}
    if loss in functions:
        model = keras.Model(x, y)
        model.compile("sgd", functions[loss])
    else:
        model = OwnLoss(x, y)
        model.takes = loss
        model.compile("sgd")
    described = describe(model, 4, "train", False, Target())
    shapes = {"nothing": None, "values": (4, 512)}
    assert getattr(described.y, "shape", None) == shapes.get(loss, (4,))
    assert oomproof.estimate(model, 4, engine="trace").expected > weights_of(model)


def test_a_step_that_fails_says_what_it_was_given():
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((16,)), layers.Dense(3)], name="small")
    model.compile("sgd", lambda y, p: keras.ops.matmul(y, keras.ops.ones((77, 5))))
    with pytest.raises((ValueError, TypeError, oomproof.UnsupportedModelError)) as raised:
        oomproof.estimate(model, 8, engine="trace")
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "A step of small was tried with x (8, 16) float32, y (8, 3) float32." in said


class OwnStep(keras.Model):
    """Its step is Keras's."""

    def train_step(self, *given):
        return super().train_step(*given)


def test_own_steps_are_estimated_as_they_are_and_not_in_pieces():
    def build(kind):
        keras.utils.clear_session(free_memory=False)
        x = keras.Input((512,))
        model = kind(x, layers.Dense(512, name="wide")(x))
        model.compile("adam", "mse")
        return model

    plain, own = (oomproof.estimate(build(kind), 8, engine="trace") for kind in (keras.Model, OwnStep))
    assert own.expected == plain.expected
    assert oomproof.estimate(build(OwnStep), 8, phase="predict", engine="trace").expected < own.expected
    with pytest.raises(oomproof.UnsupportedModelError, match="train_step"):
        oomproof.estimate(build(OwnStep), 8, micro_batch_size=4, engine="trace")
    with pytest.raises(oomproof.UnsupportedModelError, match="train_step"):
        oomproof.plan(build(OwnStep), 8, budget="1GiB")


class Own(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.dense = layers.Dense(8)

    def call(self, x):
        return self.dense(x)


def test_a_model_that_is_not_built():
    model = Own()
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"does not say what its inputs look like.*input_shape"):
        oomproof.estimate(model, 4)
    assert oomproof.estimate(model, 4, input_shape=(16,), engine="trace").expected > 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": 2.5}, TypeError, "batch_size=2.5"),
        ({"batch_size": True}, TypeError, "batch_size=True"),
        ({"gpu": "rtx-4009"}, ValueError, "rtx-4090"),
        ({"gpu": "t4", "memory": "1GiB"}, ValueError, "not both"),
        ({"memory": "lots"}, ValueError, "24GiB.*memory='lots'"),
        ({"memory": "90%"}, ValueError, "24GiB.*memory='90%'"),
        ({"memory": "24"}, ValueError, "24GiB.*memory='24', which is 24 B"),
        ({"engine": "guess"}, ValueError, 'one of "auto", "compile", "trace"'),
        ({"phase": "dream"}, ValueError, "phase='dream'"),
        ({"precision": "float7"}, ValueError, "precision='float7'"),
        ({"micro_batch_size": -1}, ValueError, "micro_batch_size=-1"),
        ({"input_shape": (3,)}, ValueError, r"\(32, 32, 3\).*\(3,\)"),
        ({"input_shape": (32, 0, 3)}, ValueError, "does not agree|at least 1"),
    ],
    ids=str,
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=match):
        oomproof.estimate(conv_net(), **{"batch_size": 4, **options})


def test_not_a_model_and_not_compiled():
    with pytest.raises(TypeError, match=r"keras.Model"):
        oomproof.estimate("model", 4)
    plain = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    with pytest.raises(ValueError, match="not compiled"):
        oomproof.estimate(plain, 4)
    assert oomproof.estimate(plain, 4, phase="predict", engine="trace").expected > 0
