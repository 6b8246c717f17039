"""The zoo: Keras models built by name, with their losses and the shapes of their data.

    model, data = compiled("resnet50", precision="mixed_bfloat16", optimizer="adam", stack="jax")
    x, y = data.arrays(batch)

Everything is made of Keras's own layers, or of layers written here, with random weights. `scale` shrinks images and
sequences, so that the whole zoo can be tried on a small CPU; figures are only ever taken at scale 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

JIT: dict[str, Any] = {"jax": "auto", "tensorflow-xla": True, "tensorflow-graph": False, "torch": "auto"}
# So many samples are drawn; a larger batch repeats them, since their values do not matter to memory.
_DRAWN = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """One array of the data: shape without the batch, dtype, and for integers what they stay below."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    below: int = 2

    def array(self, samples: int, rng: np.random.Generator) -> Any:
        shape = (min(samples, _DRAWN), *self.shape)
        drawn = rng.random(shape, "float32") if self.dtype == "float32" else rng.integers(0, self.below, shape)
        return np.resize(drawn.astype(self.dtype), (samples, *self.shape))


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """What a model is given, in the structure `fit` takes it in: inputs in the model's order, and targets."""

    x: Spec | list[Spec]
    y: Spec | list[Spec]

    def arrays(self, samples: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(0)

        def made(specs: Spec | list[Spec]) -> Any:
            if isinstance(specs, Spec):
                return specs.array(samples, rng)
            # A tuple, since tf.data takes a list for one array.
            return tuple(spec.array(samples, rng) for spec in specs)

        return made(self.x), made(self.y)


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """A model that is not compiled yet."""

    model: Any
    loss: Any
    data: Data


Builder = Callable[[float], Built]
BUILDERS: dict[str, Builder] = {}


def builds(builder: Builder) -> Builder:
    """Enters a function into the zoo under its own name."""
    BUILDERS[builder.__name__] = builder
    return builder


def classification() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(inputs: Any, outputs: Any, x: Spec | list[Spec], classes: int) -> Built:
    """A model with one label a sample."""
    return Built(keras.Model(inputs, outputs), classification(), Data(x, Spec((), "int32", classes)))


def scaled(size: int, scale: float, multiple: int = 32) -> int:
    """A size of an image or a sequence, shrunk but still divisible as the net needs it."""
    return max(multiple, round(size * scale / multiple) * multiple)


def compiled(name: str, *, precision: str, optimizer: str, stack: str, scale: float = 1.0) -> tuple[Any, Data]:
    """A model of the zoo, compiled as a run of the design wants it, and its data."""
    import zoo_sequence  # noqa: F401  Both enter their builders.
    import zoo_vision  # noqa: F401

    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(0)
    built = BUILDERS[name](scale)
    chosen = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}[optimizer]
    built.model.compile(chosen(1e-4), built.loss, jit_compile=JIT[stack])
    return built.model, built.data
