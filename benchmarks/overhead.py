"""What a guard costs when everything fits: `fit`, plain and guarded by turns, for steps of 5 to 40 ms.

    KERAS_BACKEND=jax python benchmarks/overhead.py              # on a GPU; also torch and tensorflow
    KERAS_BACKEND=jax python benchmarks/overhead.py --tiny       # on a CPU, to see that it runs

Two nets, a transformer and a residual net, with as large a batch as the step is to take. Plain and guarded steps are of
the same model; a turn is an epoch, data from NumPy as most people give it. The ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

MILLISECONDS = (5, 10, 20, 40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models; the figures mean nothing")
    parser.add_argument("--steps", type=int, default=30, help="in an epoch")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--milliseconds", default=",".join(map(str, MILLISECONDS)))
    parser.add_argument("--nets", default=",".join(NETS))
    chosen = parser.parse_args()
    rows = []
    for net in chosen.nets.split(","):
        for wanted in map(float, chosen.milliseconds.split(",")):
            rows.append({"net": net, "wanted_ms": wanted, **compared(net, wanted, chosen)})
            print(rows[-1], flush=True)
    from _common import write_result

    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    ratios = [row["ratio"] for row in rows]
    name = f"overhead-{'tiny' if chosen.tiny else 'gpu'}-{backend}"
    write_result(name, {"worst": max(ratios), "median": statistics.median(ratios), "rows": rows})


def transformer(tiny: bool) -> tuple[Any, tuple[int, ...]]:
    import keras
    from keras import layers

    length, width = (16, 32) if tiny else (128, 384)
    x = inputs = keras.Input((length, width))
    for _ in range(2 if tiny else 6):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(y, y)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))), (length, width)


def residual(tiny: bool) -> tuple[Any, tuple[int, ...]]:
    import keras
    from keras import layers

    size, width = (8, 8) if tiny else (64, 64)
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(width, 3, padding="same")(inputs)
    for _ in range(2 if tiny else 8):
        y = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x)))
        x = layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(y))])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))), (size, size, 3)


NETS = {"transformer": transformer, "residual": residual}


def compared(net: str, wanted: float, chosen: Any) -> dict[str, Any]:
    import keras

    model, shape = NETS[net](chosen.tiny)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    batch = 4 if chosen.tiny else 32
    for _ in range(1 if chosen.tiny else 2):  # The host sets a floor, so a second look.
        found = _milliseconds(model, _data(shape, batch, chosen.steps), batch)
        batch = max(1, round(batch * wanted / found))
    data = _data(shape, batch, chosen.steps)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(chosen.turns):
        for guarded in (False, True) if turn % 2 else (True, False):
            times[guarded].append(_guarded(model, data, batch) if guarded else _milliseconds(model, data, batch))
    plain, guarded_ms = (statistics.median(times[guarded]) for guarded in (False, True))
    return {"batch": batch, "plain_ms": plain, "guarded_ms": guarded_ms, "ratio": guarded_ms / plain, "turns": times}


def _guarded(model: Any, data: Any, batch: int) -> float:
    import oomproof

    oomproof.guard(model, verbose=0)
    try:
        return _milliseconds(model, data, batch)
    finally:
        oomproof.unguard(model)


def _milliseconds(model: Any, data: Any, batch: int) -> float:
    """Of a step in an epoch of `fit`, once everything is compiled."""
    x, y = data
    model.fit(x[: 3 * batch], y[: 3 * batch], batch_size=batch, verbose=0)
    began = time.perf_counter()
    model.fit(x, y, batch_size=batch, verbose=0)
    return (time.perf_counter() - began) / (len(x) / batch) * 1000


def _data(shape: tuple[int, ...], batch: int, steps: int) -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    few = rng.normal(size=(256, *shape)).astype("float32")
    x = np.resize(few, (steps * batch, *shape))
    return x, rng.integers(0, 10, steps * batch)


if __name__ == "__main__":
    main()
