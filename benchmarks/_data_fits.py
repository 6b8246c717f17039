"""What people give to `fit` besides tf.data, for data_audit.py: arrays, a PyDataset, a DataLoader, generators.

Each is a function that makes data of so many batches: a few hundred megabytes, or two batches, so that what a first
`fit` loads and compiles is there before anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

WIDE = 250_000
BATCH = 16
BATCHES = 16

Make = Callable[[int], Any]
DATA: dict[str, Make] = {}


def data(function: Make) -> Make:
    DATA[function.__name__] = function
    return function


def rows(count: int, dtype: str = "float32", wide: int = WIDE) -> Any:
    return np.ones((count, wide), dtype)


def targets(count: int) -> Any:
    return np.ones((count, 1), "float32")


@data
def arrays_of_float32(batches: int) -> Any:
    return rows(BATCH * batches), targets(BATCH * batches)


@data
def arrays_of_doubles(batches: int) -> Any:
    return rows(BATCH * batches, "float64"), targets(BATCH * batches)


@data
def arrays_of_uint8(batches: int) -> Any:
    return rows(BATCH * batches, "uint8", 4 * WIDE), targets(BATCH * batches)


@data
def arrays_of_many_small_rows(batches: int) -> Any:
    return rows(400 * BATCH * batches, wide=WIDE // 400), targets(400 * BATCH * batches)


@data
def py_dataset(batches: int) -> Any:
    return made_py_dataset(batches, workers=1)


@data
def py_dataset_with_workers(batches: int) -> Any:
    return made_py_dataset(batches, workers=2, max_queue_size=8)


def made_py_dataset(batches: int, **settings: Any) -> Any:
    import keras

    class Made(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is untyped
        def __len__(self) -> int:
            return batches

        def __getitem__(self, _: int) -> Any:
            return rows(BATCH), targets(BATCH)

    return Made(**settings)


@data
def py_dataset_that_holds_arrays(batches: int) -> Any:
    import keras

    class Holding(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.x, self.y = rows(BATCH * batches), targets(BATCH * batches)

        def __len__(self) -> int:
            return batches

        def __getitem__(self, index: int) -> Any:
            here = slice(index * BATCH, (index + 1) * BATCH)
            return self.x[here], self.y[here]

    return Holding()


@data
def data_loader(batches: int) -> Any:
    return made_data_loader(batches)


@data
def data_loader_with_workers(batches: int) -> Any:
    return made_data_loader(batches, num_workers=2, prefetch_factor=2)


def made_data_loader(batches: int, **settings: Any) -> Any:
    import torch

    class Made(torch.utils.data.Dataset):  # type: ignore[misc]  # torch is untyped here
        def __len__(self) -> int:
            return batches * BATCH

        def __getitem__(self, _: int) -> Any:
            return torch.ones(WIDE), torch.ones(1)

    return torch.utils.data.DataLoader(Made(), batch_size=BATCH, **settings)


@data
def data_loader_of_tensors(batches: int) -> Any:
    import torch

    held = torch.utils.data.TensorDataset(torch.ones(BATCH * batches, WIDE), torch.ones(BATCH * batches, 1))
    return torch.utils.data.DataLoader(held, batch_size=BATCH)


@data
def generator_that_makes(batches: int) -> Any:
    def generate() -> Iterator[Any]:
        for _ in range(batches):
            yield rows(BATCH), targets(BATCH)

    return generate


@data
def generator_that_holds_arrays(batches: int) -> Any:
    x, y = rows(BATCH * batches), targets(BATCH * batches)

    def generate(x: Any = x, y: Any = y) -> Iterator[Any]:
        for start in range(0, len(x), BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    return generate


def model_for(name: str) -> Any:
    """Looks at one column and nothing else, so that memory is the data's."""
    import keras

    dtype = "uint8" if name.endswith("uint8") else "float32"
    wide = {"arrays_of_uint8": 4 * WIDE, "arrays_of_many_small_rows": WIDE // 400}.get(name, WIDE)
    inputs = keras.Input((wide,), dtype=dtype)
    column = keras.layers.Rescaling(1.0)(inputs[:, :1])
    model = keras.Model(inputs, keras.layers.Dense(1)(column))
    model.compile("sgd", "mse")
    return model


def fit(model: Any, name: str, made: Any, epochs: int) -> None:
    if isinstance(made, tuple):
        size = 400 * BATCH if name == "arrays_of_many_small_rows" else BATCH
        model.fit(*made, batch_size=size, epochs=epochs, verbose=1)
    else:
        for _ in range(epochs):
            model.fit(made() if callable(made) else made, epochs=1, verbose=1)
