"""Some rows of TensorFlow's stateless random numbers, without the others.

They come from a counter, four numbers of 32 bits or less for each count and two of 64. Moved on to where a row begins,
it gives that row bit for bit.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import tensorflow as tf
from keras.config import floatx

from oomproof._backends.common.drawing import FUNCTIONS, Function, noise_shape
from oomproof._backends.common.draws import Shape
from oomproof._compat.keras import standardize_dtype
from oomproof._compat.tensorflow import cast_seed, keras_random, tensor_util

_AUTO_SELECT = tf.random.Algorithm.AUTO_SELECT.value
# A truncated normal number may take several tries, so each four of them have this many counts.
_COUNTS_FOR_TRIES = 256
_SPREAD = 0x9E3779B1


class TensorFlowRandom:
    """See `common.drawing.RandomFunctions`.

    Args:
        compiled: Whether XLA compiles the step. It makes truncated normal numbers in its own way.
    """

    module = keras_random
    seed_function = "draw_seed"
    by_rows = frozenset({"normal", "uniform", "truncated_normal", "randint", "dropout"})
    replaced = FUNCTIONS

    def __init__(self, compiled: bool) -> None:
        self._compiled = compiled

    def shape(self, shape: Any) -> Shape:
        if isinstance(shape, tf.TensorShape):
            return tuple(shape.as_list())
        if not isinstance(shape, tf.Tensor):
            return tuple(_known(size) for size in shape)
        known = _known_vector(shape)
        return tuple(None if size is None else int(size) for size in known)

    def apart(self, seed: Any, start: Any) -> Any:
        return seed + tf.cast(tf.stack([tf.cast(start, tf.int64) * _SPREAD, 0]), seed.dtype)

    def rows(self, function: str, plain: Function, arguments: dict[str, Any], first: Any, total: Any) -> Any:
        # Looked up there, since it stands aside as well.
        seed = cast_seed(keras_random.draw_seed(arguments["seed"]))
        if function == "dropout":
            return self._dropout(arguments, seed, first)
        shape, dtype = arguments["shape"], arguments["dtype"] or floatx()
        if function == "uniform":
            low, high = (tf.cast(arguments[name], dtype) for name in ("minval", "maxval"))
            return self._uniform(shape, seed, first, dtype) * (high - low) + low
        if function == "randint":
            wide = dtype if standardize_dtype(dtype) in ("int32", "int64") else "int64"
            low, high = (tf.convert_to_tensor(arguments[name], wide) for name in ("minval", "maxval"))
            draw = functools.partial(tf.raw_ops.StatelessRandomUniformIntV2, minval=low, maxval=high)
            return tf.cast(self._drawn(draw, shape, seed, first, wide), dtype)
        mean, deviation = (tf.convert_to_tensor(arguments[name], dtype) for name in ("mean", "stddev"))
        if function == "normal":
            draw = functools.partial(tf.raw_ops.StatelessRandomNormalV2, dtype=dtype)
            if self._compiled:
                return _normal_by_xla(draw, self.shape(shape), seed, first, total, dtype) * deviation + mean
            return self._drawn(draw, shape, seed, first, dtype) * deviation + mean
        draw = functools.partial(tf.raw_ops.StatelessTruncatedNormalV2, dtype=dtype)
        numbers = self._drawn(draw, shape, seed, first, dtype, tries=not self._compiled)
        return numbers * deviation + mean

    def _dropout(self, arguments: dict[str, Any], seed: Any, first: Any) -> Any:
        """The arithmetic of `tf.nn.experimental.stateless_dropout`."""
        inputs, rate = tf.convert_to_tensor(arguments["inputs"]), arguments["rate"]
        kept = self._uniform(noise_shape(arguments), seed, first, inputs.dtype) >= rate
        outputs = tf.where(kept, inputs * tf.constant(1 / (1 - rate), inputs.dtype), tf.zeros((), inputs.dtype))
        if not tf.executing_eagerly():
            outputs.set_shape(inputs.shape)
        return outputs

    def _uniform(self, shape: Any, seed: Any, first: Any, dtype: Any) -> Any:
        draw = functools.partial(tf.raw_ops.StatelessRandomUniformV2, dtype=dtype)
        return self._drawn(draw, shape, seed, first, dtype)

    def _drawn(self, draw: Function, shape: Any, seed: Any, first: Any, dtype: Any, tries: bool = False) -> Any:
        """The rows from `first` on of what `draw` would give, which has as many columns."""
        together = 4 if tries else _together(dtype)
        known = self.shape(shape)
        wanted = tf.stack([tf.cast(size, tf.int64) for size in shape]) if isinstance(shape, list | tuple) else shape
        shape = list(known) if None not in known else tf.cast(wanted, tf.int64)
        tail = [size for size in known[1:] if size is not None]
        columns = math.prod(tail) if len(tail) == len(known) - 1 else tf.reduce_prod(shape[1:])
        begin = (tf.cast(first, tf.int64) if tf.is_tensor(first) else first) * columns
        generator = _generator(seed, begin // together * (_COUNTS_FOR_TRIES if tries else 1))
        if math.prod(tail) % together == 0:
            return draw(shape=shape, **generator)
        # The row begins between two counts.
        count = math.prod(shape) if isinstance(shape, list) else tf.reduce_prod(shape)
        numbers = draw(shape=[count + together - 1], **generator)
        return tf.reshape(tf.slice(numbers, [begin % together], [count]), shape)


def _together(dtype: Any) -> int:
    """How many numbers come from one count."""
    return 2 if tf.as_dtype(dtype).size == 8 else 4


def _generator(seed: Any, counts: Any) -> dict[str, Any]:
    """What a random op of TensorFlow makes its numbers from, moved on."""
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    counter = tf.bitcast(counter, tf.int64) + tf.stack([tf.cast(counts, tf.int64), tf.zeros((), tf.int64)])
    return {"key": key, "counter": tf.bitcast(counter, tf.uint64), "alg": _AUTO_SELECT}


def _normal_by_xla(draw: Function, shape: Shape, seed: Any, first: Any, total: int, dtype: Any) -> Any:
    """Rows of normal numbers, of which XLA makes two from two neighbours.

    These are neighbours along the first dimension of even size, or along the longest, made even, where there is none.
    So what is drawn must have as many columns, and a number of rows for which it is the same dimension.
    """
    size, *tail = (operator.index(size) for size in shape)  # type: ignore[arg-type]  # XLA knows every size.
    sizes = [total, *tail]
    even = [axis for axis, size in enumerate(sizes) if size % 2 == 0]
    axis = even[0] if even else sizes.index(max(sizes))
    # From a row on that begins with a count and that is no second neighbour.
    begin, rows = first // 4 * 4, size + 3
    rows += (rows + min(axis, 1)) % 2
    columns = math.prod(tail)
    if axis:
        columns = columns // sizes[axis] * (sizes[axis] + 1) if not even else columns
        if not even and rows >= sizes[axis]:
            begin, rows = first * 0, total
    numbers = draw(shape=[rows, *tail], **_generator(seed, begin * columns // _together(dtype)))
    return tf.slice(numbers, [first - begin, *[0] * len(tail)], [size, *tail])


def _known(size: Any) -> int | None:
    value = _value(size) if tf.is_tensor(size) else size
    return None if value is None else int(value)


def _known_vector(shape: tf.Tensor) -> list[Any]:
    value = _value(shape)
    if value is not None:
        return list(value)
    return list(tensor_util.constant_value_as_shape(shape))


def _value(tensor: tf.Tensor) -> Any:
    found = tf.get_static_value(tensor)
    if found is None and not tf.executing_eagerly():
        found = tensor_util.try_evaluate_constant(tensor)
    return found
