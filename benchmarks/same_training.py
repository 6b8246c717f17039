"""Twenty steps in pieces beside twenty whole ones, in double precision, with every random layer on.

    KERAS_BACKEND=jax python benchmarks/same_training.py

Six models nobody tuned for exactness: the largest difference of any weight, slot, statistic and seed, relative to the
variable's largest value, and of the History. A variable whose gradient is zero but for rounding (attention's key bias,
which moves all of a row's logits alike) has no digits to compare: those that stay below 1e-12 are listed apart, with
the largest number in them.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from keras.src.backend.common import dtypes

import oomproof
from _common import write_result

BATCH, MICRO, STEPS = 14, 4, 20
_NOTHING = 1e-12


def in_double_precision() -> None:
    """Off TensorFlow, Keras turns what it promotes to double precision into single."""
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


class TokensAndPositions(layers.Layer):  # type: ignore[misc]
    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.positions = layers.Embedding(words, width), layers.Embedding(length, width)

    def call(self, x: Any) -> Any:
        return self.tokens(x) + self.positions(ops.arange(self.length))


def attention_block(x: Any, width: int, causal: bool = False) -> Any:
    h = layers.MultiHeadAttention(2, width // 2, dropout=0.1)(x, x, use_causal_mask=causal)
    x = layers.LayerNormalization()(x + layers.Dropout(0.2)(h))
    h = layers.Dense(width)(layers.Dense(2 * width, "gelu")(x))
    return layers.LayerNormalization()(x + layers.Dropout(0.2)(h))


def transformer() -> Any:
    x = layers.Input((10,), dtype="int32")
    h = attention_block(attention_block(TokensAndPositions(40, 10, 8)(x), 8, causal=True), 8, causal=True)
    return keras.Model(x, layers.Dense(40)(h)), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class AddPositions(layers.Layer):  # type: ignore[misc]
    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(1, shape[1], shape[2]))

    def call(self, x: Any) -> Any:
        return x + self.table


def vision_transformer() -> Any:
    x = layers.Input((16, 16, 3))
    h = layers.Reshape((16, 12))(layers.Conv2D(12, 4, 4)(x))
    h = layers.Dropout(0.1)(AddPositions()(h))
    h = attention_block(attention_block(h, 12), 12)
    head = layers.Dense(5)(layers.Dropout(0.3)(layers.GlobalAveragePooling1D()(h)))
    return keras.Model(x, head), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tagger() -> Any:
    x = layers.Input((9,), dtype="int32")
    h = layers.Embedding(30, 6, mask_zero=True)(x)
    h = layers.Bidirectional(layers.LSTM(5, return_sequences=True, dropout=0.2))(h)
    return keras.Model(x, layers.Dense(4, "softmax")(layers.Dropout(0.2)(h))), "sparse_categorical_crossentropy"


class Sampling(layers.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        self.add_loss(0.1 * ops.mean(ops.sum(kl, axis=1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator, dtype=mean.dtype)
        return mean + ops.exp(0.5 * log_variance) * noise


def autoencoder() -> Any:
    x = layers.Input((12,))
    h = layers.Dense(16, "relu")(x)
    z = Sampling()([layers.Dense(3)(h), layers.Dense(3)(h)])
    return keras.Model(x, layers.Dense(12)(layers.Dense(16, "relu")(z))), "mse"


def u_net() -> Any:
    def block(x: Any, width: int) -> Any:
        h = layers.GroupNormalization(2)(layers.Conv2D(width, 3, padding="same")(x))
        return layers.SpatialDropout2D(0.1)(layers.Activation("relu")(h))

    x = layers.Input((16, 16, 2))
    a = block(x, 4)
    b = block(layers.MaxPooling2D()(a), 8)
    h = block(layers.MaxPooling2D()(b), 8)
    h = block(layers.Concatenate()([layers.UpSampling2D()(h), b]), 8)
    h = block(layers.Concatenate()([layers.UpSampling2D()(h), a]), 4)
    return keras.Model(x, layers.Conv2D(1, 1, activation="sigmoid")(h)), keras.losses.Dice()


def efficient_net() -> Any:
    """Inverted residuals with squeeze and excitation and stochastic depth, and groups in the place of the batch."""

    def block(x: Any, width: int, drop: float) -> Any:
        h = layers.Activation("swish")(layers.GroupNormalization(2)(layers.Conv2D(2 * width, 1)(x)))
        h = layers.Activation("swish")(layers.GroupNormalization(2)(layers.DepthwiseConv2D(3, padding="same")(h)))
        squeezed = layers.Dense(2, "swish")(layers.GlobalAveragePooling2D(keepdims=True)(h))
        h = layers.Multiply()([h, layers.Dense(2 * width, "sigmoid")(squeezed)])
        h = layers.GroupNormalization(2)(layers.Conv2D(width, 1)(h))
        return x + layers.Dropout(drop, noise_shape=(None, 1, 1, 1))(h)

    x = layers.Input((12, 12, 3))
    h = layers.Conv2D(8, 3, 2, padding="same")(x)
    for drop in (0.1, 0.2, 0.3):
        h = block(h, 8, drop)
    h = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(h))
    return keras.Model(x, layers.Dense(5)(h)), keras.losses.CategoricalFocalCrossentropy(from_logits=True)


MODELS: dict[str, Callable[[], Any]] = {
    "transformer, dropout, position embeddings": transformer,
    "vision transformer": vision_transformer,
    "LSTM tagger with masks": tagger,
    "VAE, KL by add_loss": autoencoder,
    "U-Net, GroupNormalization": u_net,
    "EfficientNet, stochastic depth": efficient_net,
}


def data_for(model: Any, seed: int) -> tuple[Any, Any]:
    """Random batches of what the model takes, with rows of different lengths for those with masks."""
    random = np.random.default_rng(seed)
    samples = BATCH * STEPS
    shape, out = model.inputs[0].shape[1:], model.outputs[0].shape[1:]
    if model.inputs[0].dtype == "int32":
        lengths = random.integers(1, shape[0] + 1, samples)
        x = np.where(np.arange(shape[0]) < lengths[:, None], random.integers(1, 30, (samples, *shape)), 0)
        return x.astype("int32"), random.integers(0, out[-1], (samples, *shape))
    x = random.normal(size=(samples, *shape))
    if len(out) == 3:
        return x, (random.random((samples, *out)) > 0.5).astype("float64")
    if out == shape:
        return x, x
    labels = random.integers(0, out[-1], samples)
    return x, np.eye(out[-1])[labels] if "Focal" in type(model.loss).__name__ else labels


def trained(build: Callable[[], Any], seed: int, guarded: bool) -> tuple[dict[str, Any], dict[str, Any], str]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    model, loss = build()
    model.compile(keras.optimizers.Adam(0.003), loss)
    x, y = data_for(model, seed)
    if guarded:
        oomproof.guard(model, micro_batch_size=MICRO, verbose=0)
    history = model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    variables = [*model.variables, *model.optimizer.variables]
    values = {f"{i} {v.path}": np.array(ops.convert_to_numpy(v.value), "float64") for i, v in enumerate(variables)}
    return values, history.history, str(history.run.exactness) if guarded else ""


def difference(a: Any, b: Any) -> float:
    return float(np.max(np.abs(a - b), initial=0.0) / max(1e-12, float(np.max(np.abs(a), initial=0.0))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=17)
    seed = parser.parse_args().seed
    in_double_precision()
    warnings.simplefilter("ignore")
    rows = []
    for name, build in MODELS.items():
        plain, plain_history, _ = trained(build, seed, guarded=False)
        pieces, history, said = trained(build, seed, guarded=True)
        pairs = {key: (plain[key], pieces[key]) for key in plain}
        largest = {key: max(float(np.max(np.abs(v), initial=0.0)) for v in pair) for key, pair in pairs.items()}
        row = {
            "model": name,
            "said": said,
            "variables": max(difference(*pair) for key, pair in pairs.items() if largest[key] >= _NOTHING),
            "nothing_but_rounding": {key: size for key, size in largest.items() if 0.0 < size < _NOTHING},
            "history": max(difference(np.array(plain_history[k]), np.array(history[k])) for k in plain_history),
        }
        rows.append(row)
        print(f"{name:45s} {row['variables']:.1e} {row['history']:.1e}  {said}", flush=True)
    backend = keras.backend.backend()
    write_result(f"same-training-{backend}", {"backend": backend, "seed": seed, "steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
