"""The pipelines of data_tune.py: generators that make their inputs, wait, and yield the pipeline again and again."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from _data_zoo import AUTOTUNE, jpegs, photos, read_and_resize

slices = tf.data.Dataset.from_tensor_slices


def scale(image: Any, label: Any) -> Any:
    return tf.cast(image, tf.float32) / 255, label


def arrays_shuffled_and_batched(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(4096)
    yield
    while True:
        yield slices((x, y)).shuffle(4096, seed=1).batch(64).prefetch(AUTOTUNE)


def arrays_scaled_then_shuffled(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(2048)
    yield
    while True:
        yield slices((x, y)).map(scale).shuffle(2048, seed=1).batch(64)


def arrays_scaled_cached_and_shuffled(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(2048)
    yield
    while True:
        yield slices((x, y)).map(scale).cache().shuffle(2048, seed=1).batch(64).prefetch(AUTOTUNE)


# The same in less memory.
cache_that_does_not_fit = arrays_scaled_cached_and_shuffled


def arrays_augmented(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(2048)
    yield
    while True:
        flipped = slices((x, y)).map(scale).map(lambda a, b: (tf.image.random_flip_left_right(a, seed=1), b))
        yield flipped.shuffle(1000, seed=1).batch(64)


def images_decoded_then_shuffled(folder: pathlib.Path) -> Iterator[Any]:
    paths = jpegs(folder, 512, 256)
    yield
    while True:
        images = slices(paths).map(read_and_resize, num_parallel_calls=AUTOTUNE)
        yield images.shuffle(512, seed=1).batch(32).prefetch(AUTOTUNE)


def images_decoded_on_one_thread(folder: pathlib.Path) -> Iterator[Any]:
    paths = jpegs(folder, 512, 256)
    yield
    while True:
        yield slices(paths).shuffle(512, seed=1).map(read_and_resize).batch(32)


def records_parsed_then_shuffled(folder: pathlib.Path) -> Iterator[Any]:
    path = str(folder / "all.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for index in range(1024):
            pixels = np.full(128 * 128 * 3, index % 255, np.uint8).tobytes()
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[pixels]))
            writer.write(tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString())

    def parse(text: Any) -> Any:
        found = tf.io.parse_single_example(text, {"x": tf.io.FixedLenFeature([], tf.string)})
        return tf.cast(tf.reshape(tf.io.decode_raw(found["x"], tf.uint8), [128, 128, 3]), tf.float32)

    yield
    while True:
        yield tf.data.TFRecordDataset(path).map(parse).shuffle(1024, seed=1).batch(32)


def prefetched_before_batch(_: pathlib.Path) -> Iterator[Any]:
    x, y = photos(2048)
    yield
    while True:
        yield slices((x, y)).map(scale).prefetch(1000).batch(64)
