"""Pipelines that people write, for benchmarks of `oomproof.data`. Each takes a few hundred megabytes.

A pipeline is a generator: it makes its inputs (arrays, files), waits for the meter to be read, and yields the dataset.
So what is measured is what the pipeline holds, and not the arrays of the user.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

AUTOTUNE = tf.data.AUTOTUNE
Dataset = tf.data.Dataset
Pipeline = Callable[[pathlib.Path], Iterator[Any]]
PIPELINES: dict[str, Pipeline] = {}


def pipeline(function: Pipeline) -> Pipeline:
    PIPELINES[function.__name__] = function
    return function


def photos(count: int, side: int = 128, dtype: str = "uint8") -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    block = rng.integers(0, 255, (16, side, side, 3)).astype(dtype)
    return np.tile(block, (count // 16, 1, 1, 1)), rng.integers(0, 10, count)


def made(count: int, kilobytes: int, **options: Any) -> Any:
    """Elements that are computed, not held."""
    size = kilobytes * 250
    return Dataset.range(count).map(lambda i: tf.fill([size], tf.cast(i, tf.float32)), **options)


def jpegs(folder: pathlib.Path, count: int, side: int) -> list[str]:
    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 255, side)[:, None, None] * np.ones((1, side, 3))
    paths = []
    for index in range(count):
        path = folder / f"{index}.jpg"
        noise = rng.integers(0, 30, (side, side, 3))
        path.write_bytes(tf.io.encode_jpeg(np.clip(ramp + noise, 0, 255).astype("uint8")).numpy())
        paths.append(str(path))
    return paths


def read_and_resize(path: Any) -> Any:
    image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    return tf.image.resize(image, (224, 224))


@pipeline
def arrays_batched(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(4096)
    yield
    yield Dataset.from_tensor_slices((x, y)).batch(64).prefetch(AUTOTUNE)


@pipeline
def arrays_shuffled(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(4096)
    yield
    yield Dataset.from_tensor_slices((x, y)).shuffle(4096).batch(64).prefetch(2)


@pipeline
def arrays_of_odd_rows_shuffled(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(4096, side=127)
    yield
    yield Dataset.from_tensor_slices((x, y)).shuffle(4096).batch(64).prefetch(2)


@pipeline
def arrays_scaled_then_shuffled(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(1024)
    yield
    scaled = Dataset.from_tensor_slices((x, y)).map(lambda a, b: (tf.cast(a, tf.float32) / 255, b))
    yield scaled.shuffle(1024).batch(64).prefetch(2)


@pipeline
def arrays_scaled_and_cached(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(1024)
    yield
    scaled = Dataset.from_tensor_slices((x, y)).map(lambda a, b: (tf.cast(a, tf.float32) / 255, b))
    yield scaled.cache().shuffle(512).batch(64).prefetch(2)


@pipeline
def arrays_cached(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(4096)
    yield
    yield Dataset.from_tensor_slices((x, y)).cache().shuffle(1000).batch(64).prefetch(AUTOTUNE)


@pipeline
def arrays_of_float64(_: pathlib.Path) -> Iterator[Any]:
    x = np.random.default_rng(0).random((20_000, 1_000))
    yield
    yield Dataset.from_tensor_slices(x).shuffle(20_000).batch(256).prefetch(2)


@pipeline
def arrays_in_one_element(_: pathlib.Path) -> Iterator[Any]:
    x, _y = photos(2048)
    yield
    yield Dataset.from_tensors(x).repeat(3)


@pipeline
def two_sources_zipped(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(2048)
    yield
    pairs = Dataset.zip((Dataset.from_tensor_slices(x), Dataset.from_tensor_slices(x), Dataset.from_tensor_slices(y)))
    yield pairs.batch(128).prefetch(1)


@pipeline
def computed_and_shuffled(_: pathlib.Path) -> Iterator[Any]:
    yield
    yield made(2048, 600).shuffle(500).batch(32).prefetch(2)


@pipeline
def computed_and_cached(_: pathlib.Path) -> Iterator[Any]:
    yield
    yield made(500, 600).cache().batch(50).prefetch(2)


@pipeline
def cached_after_batch(_: pathlib.Path) -> Iterator[Any]:
    yield
    yield made(640, 600).batch(32).cache().prefetch(2)


@pipeline
def prefetched_far(_: pathlib.Path) -> Iterator[Any]:
    yield
    yield made(2000, 600).batch(32).prefetch(12)


@pipeline
def prefetched_before_batch(_: pathlib.Path) -> Iterator[Any]:
    yield
    yield made(2000, 600).prefetch(400).batch(32)


@pipeline
def without_prefetch(_: pathlib.Path) -> Iterator[Any]:
    yield
    yield made(1500, 600).batch(150)


@pipeline
def mapped_in_parallel(_: pathlib.Path) -> Iterator[Any]:
    yield
    yield made(200, 20_000, num_parallel_calls=8).prefetch(4)


@pipeline
def mapped_in_parallel_and_batched(_: pathlib.Path) -> Iterator[Any]:
    yield
    yield made(2000, 600, num_parallel_calls=AUTOTUNE).batch(128).prefetch(2)


@pipeline
def augmented_at_random(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(1024)
    yield
    images = Dataset.from_tensor_slices((x, y)).map(lambda a, b: (tf.cast(a, tf.float32), b))
    flipped = images.map(lambda a, b: (tf.image.random_flip_left_right(a), b))
    yield flipped.shuffle(1000).batch(64).prefetch(2)


@pipeline
def mapped_after_batch(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(2048)
    yield
    batches = Dataset.from_tensor_slices((x, y)).shuffle(2048).batch(128)
    yield batches.map(lambda a, b: (tf.cast(a, tf.float32) / 255, b), num_parallel_calls=4).prefetch(2)


@pipeline
def not_optimised(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(4096)
    yield
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    yield Dataset.from_tensor_slices((x, y)).shuffle(4096).batch(256).prefetch(2).with_options(options)


@pipeline
def table_captured_by_a_function(_: pathlib.Path) -> Iterator[Any]:
    rows = np.ones((100_000, 500), np.float32)
    yield
    table = tf.constant(rows)
    yield Dataset.range(100_000).shuffle(100_000).batch(10_000).map(lambda i: tf.gather(table, i)).prefetch(4)


@pipeline
def sequences_padded(_: pathlib.Path) -> Iterator[Any]:
    yield
    sequences = Dataset.range(8_000).map(lambda i: tf.fill([20_000 + (i * 7919) % 40_000], i))
    yield sequences.shuffle(800).padded_batch(64).prefetch(2)


@pipeline
def images_decoded_and_shuffled(folder: pathlib.Path) -> Iterator[Any]:
    paths = jpegs(folder, 600, 256)
    yield
    images = Dataset.from_tensor_slices(paths).map(read_and_resize, num_parallel_calls=AUTOTUNE)
    yield images.shuffle(300).batch(64).prefetch(2)


@pipeline
def images_decoded_and_cached(folder: pathlib.Path) -> Iterator[Any]:
    paths = jpegs(folder, 500, 256)
    yield
    images = Dataset.from_tensor_slices(paths).map(read_and_resize, num_parallel_calls=AUTOTUNE)
    yield images.cache().shuffle(500).batch(50).prefetch(AUTOTUNE)


def _records(folder: pathlib.Path, count: int, floats: int) -> list[str]:
    """Eight files of so many records of so many numbers."""
    files = [str(folder / f"{index}.tfrecord") for index in range(8)]
    for file in files:
        with tf.io.TFRecordWriter(file) as writer:
            for _ in range(count):
                writer.write(np.ones(floats, np.float32).tobytes())
    return files


@pipeline
def records_interleaved(folder: pathlib.Path) -> Iterator[Any]:
    files = _records(folder, 100, 150_000)
    yield
    records = Dataset.from_tensor_slices(files).interleave(tf.data.TFRecordDataset, cycle_length=4)
    images = records.map(lambda text: tf.reshape(tf.io.decode_raw(text, tf.float32), [150_000]))
    yield images.shuffle(400).batch(32).prefetch(2)


@pipeline
def records_interleaved_in_parallel(folder: pathlib.Path) -> Iterator[Any]:
    files = _records(folder, 40, 750_000)
    yield
    records = Dataset.from_tensor_slices(files).interleave(
        tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=4, deterministic=True
    )
    images = records.map(lambda text: tf.reshape(tf.io.decode_raw(text, tf.float32), [750_000]))
    yield images.shuffle(60).batch(8).prefetch(2)


@pipeline
def generator_shuffled(_: pathlib.Path) -> Iterator[Any]:
    def rows() -> Iterator[Any]:
        for index in range(1_000):
            yield np.full(150_000, index, np.float32)

    yield
    images = Dataset.from_generator(rows, output_signature=tf.TensorSpec([150_000], tf.float32))
    yield images.shuffle(400).batch(32).prefetch(2)
