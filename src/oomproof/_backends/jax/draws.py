"""Some rows of JAX's random numbers, without the others.

JAX's default generator hashes the position of each number. A generator like it, whose positions begin with those of a
row, gives that row bit for bit, and all of `jax.random` runs on it as it is.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import random as jax_random

from oomproof._backends.common.drawing import FUNCTIONS, Function, WithSeed, drawing_by
from oomproof._backends.common.draws import Shape
from oomproof._compat.jax import keras_random

_SPREAD = 0x9E3779B1


class JaxRandom:
    """See `common.drawing.RandomFunctions`."""

    module = keras_random
    seed_function = "jax_draw_seed"
    replaced = FUNCTIONS

    @property
    def by_rows(self) -> frozenset[str]:
        config = jax.config
        if not config.jax_threefry_partitionable or config.jax_default_prng_impl != "threefry2x32":
            return frozenset()  # There the numbers depend on how many are drawn.
        found = {"normal", "uniform", "truncated_normal", "randint", "dropout"}
        if not getattr(config, "jax_high_dynamic_range_gumbel", False):
            found.add("categorical")  # Otherwise it draws twice, the second time behind the numbers of all samples.
        return frozenset(found)

    def shape(self, shape: Any) -> Shape:
        return tuple(int(size) for size in shape)

    def apart(self, seed: Any, start: Any) -> Any:
        return seed + jnp.stack([jnp.asarray(start, "uint32") * np.uint32(_SPREAD), jnp.zeros((), "uint32")])

    def rows(self, function: str, plain: Function, arguments: dict[str, Any], first: Any, total: Any) -> Any:
        def from_row(seed: Any) -> Any:
            key = jnp.append(jnp.asarray(seed, "uint32"), jnp.asarray(first, "uint32"))
            return jax.random.wrap_key_data(key, impl=_from_row())

        with drawing_by(WithSeed(from_row)):
            return plain(**arguments)


@functools.cache
def _from_row() -> Any:
    """Threefry, with the row that it begins with as the last number of its key."""
    threefry = jax_random.threefry_prng_impl

    def split(key: Any, shape: Any) -> Any:
        keys = threefry.split(key[:2], shape)
        return jnp.concatenate([keys, jnp.broadcast_to(key[2], (*shape, 1))], axis=-1)

    def fold_in(key: Any, data: Any) -> Any:
        return jnp.append(threefry.fold_in(key[:2], data), key[2])

    def seed(number: Any) -> Any:
        return jnp.append(threefry.seed(number), np.uint32(0))

    return jax_random.define_prng_impl(
        key_shape=(3,),
        seed=seed,
        split=split,
        random_bits=_random_bits,
        fold_in=fold_in,
        name="threefry_rows",
        tag="rows",
    )


def _random_bits(key: Any, bit_width: int, shape: Any) -> Any:
    rows, columns = (shape[0] if shape else 1), math.prod(shape[1:])
    row = key[2] + lax.broadcasted_iota(np.uint32, (rows, columns), 0)
    column = lax.broadcasted_iota(np.uint32, (rows, columns), 1)
    high, low = _product(row, columns)
    low, before = low + column, low
    high += (low < before).astype(np.uint32)
    first, second = jax_random.threefry2x32_p.bind(key[0], key[1], high, low)
    if bit_width == 64:
        bits = (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
    else:
        bits = (first ^ second).astype(f"uint{bit_width}")
    return bits.reshape(shape)


def _product(a: Any, b: int) -> tuple[Any, Any]:
    """(high, low) 32 bits of a product. Most users of JAX have no 64 bits."""
    a_high, a_low = a >> np.uint32(16), a & np.uint32(0xFFFF)
    b_high, b_low = np.uint32(b >> 16), np.uint32(b & 0xFFFF)
    middle = a_high * b_low + (a_low * b_low >> np.uint32(16))
    other = a_low * b_high + (middle & np.uint32(0xFFFF))
    return a_high * b_high + (middle >> np.uint32(16)) + (other >> np.uint32(16)), a * np.uint32(b)
