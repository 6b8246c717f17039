"""Pipelines that read the same files, and the synthetic files they read, for data_stream.py."""

from __future__ import annotations

import io
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

SHAPE = (64, 64, 3)
RECORD = int(np.prod(SHAPE))
BATCH = 256
IMAGE = (600, 800)
IMAGE_SIZE = (224, 224)
IMAGE_BATCH = 64


# The files


def write_arrays(folder: pathlib.Path, size: int) -> None:
    """x.npy and y.npy of `size` bytes: random bytes, written out."""
    count = max(4 * BATCH, size // RECORD)
    rng = np.random.default_rng(0)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count, *SHAPE))
    del x
    block = rng.integers(0, 256, (2048, *SHAPE), np.uint8)
    with open(folder / "x.npy", "r+b") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        for start in range(0, count, len(block)):
            # Every block differs, or a clever disk would store one.
            file.write((block[: count - start] ^ np.uint8(rng.integers(256))).tobytes())
    np.save(folder / "y.npy", rng.integers(0, 10, count))


def write_hdf5(folder: pathlib.Path, size: int) -> None:
    import h5py

    count = max(4 * BATCH, size // RECORD)
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, (2048, *SHAPE), np.uint8)
    with h5py.File(folder / "a.h5", "w") as file:
        x = file.create_dataset("x", (count, *SHAPE), np.uint8, chunks=(16, *SHAPE))
        for start in range(0, count, len(block)):
            x[start : start + len(block)] = block[: count - start] ^ np.uint8(rng.integers(256))
        file["y"] = rng.integers(0, 10, count)


def write_images(folder: pathlib.Path, size: int, corrupt: int = 0, shape: tuple[int, int] = IMAGE) -> int:
    """JPEGs of `size` bytes in ten class folders. Returns how many. Every file is written out, none is a link."""
    from PIL import Image

    rng = np.random.default_rng(0)
    pool = []
    for _ in range(64):
        # Smooth shapes with some grain, which compress like photographs.
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize(
            shape[::-1], Image.Resampling.BICUBIC
        )
        grain = np.clip(np.asarray(coarse, np.int16) + rng.normal(0, 8, (*shape, 3)).astype(np.int16), 0, 255)
        encoded = io.BytesIO()
        Image.fromarray(grain.astype(np.uint8)).save(encoded, "JPEG", quality=88)
        pool.append(encoded.getvalue())
    count = max(4 * IMAGE_BATCH, size // (sum(map(len, pool)) // len(pool)))
    bad = set(random.Random(0).sample(range(count), corrupt))
    for number in range(count):
        place = folder / f"class{number % 10}"
        if number < 10:
            place.mkdir(parents=True)
        content = pool[number % len(pool)]
        if number in bad:  # Nothing in it, cut short, or no image at all.
            content = (b"", content[: len(content) // 2], b"not an image " * 50)[number % 3]
        (place / f"{number:07d}.jpg").write_bytes(content)
    return count


def samples(workload: str, folder: pathlib.Path) -> int:
    """How many there are."""
    if workload == "images":
        return sum(len(files) for _, _, files in os.walk(folder))
    sizes = {"arrays": "x.npy", "hdf5": "a.h5"}
    return os.path.getsize(folder / sizes[workload]) // RECORD


# Ours


def ours(workload: str, folder: pathlib.Path, shuffle: bool) -> Any:
    from oomproof import data

    if workload == "images":
        return data.from_files(folder, image_size=IMAGE_SIZE, batch_size=IMAGE_BATCH, shuffle=shuffle, seed=1)
    if workload == "hdf5":
        return data.from_arrays(f"{folder}/a.h5:x", f"{folder}/a.h5:y", batch_size=BATCH, shuffle=shuffle, seed=1)
    return data.from_arrays(f"{folder}/x.npy", f"{folder}/y.npy", batch_size=BATCH, shuffle=shuffle, seed=1)


# Written by hand with tf.data. Each is what its author would tune it to; the quicker one is what we compare with.


def records(workload: str, folder: pathlib.Path, shuffle: bool) -> Any:
    """The rows of a .npy file as records of fixed length, read by TensorFlow alone. Shuffled by a buffer."""
    import tensorflow as tf

    x = np.load(folder / "x.npy", mmap_mode="r")
    offset = x.offset
    del x
    dataset = tf.data.FixedLengthRecordDataset(str(folder / "x.npy"), RECORD, header_bytes=offset, buffer_size=2**23)
    dataset = tf.data.Dataset.zip((dataset, tf.data.Dataset.from_tensor_slices(np.load(folder / "y.npy"))))
    if shuffle:
        dataset = dataset.shuffle(10_000, seed=1)
    dataset = dataset.batch(BATCH, num_parallel_calls=tf.data.AUTOTUNE)
    decode = lambda x, y: (tf.reshape(tf.io.decode_raw(x, tf.uint8), (-1, *SHAPE)), y)  # noqa: E731
    return dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def mapped(workload: str, folder: pathlib.Path, shuffle: bool) -> Any:
    """Numbers of batches or samples from tf.data, rows from a memory map (or HDF5) through NumPy."""
    if workload == "hdf5":
        import h5py

        file = h5py.File(folder / "a.h5", "r")
        x, y = file["x"], file["y"][:]
    else:
        x, y = np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy")

    def rows(numbers: Any) -> Any:
        numbers = np.sort(numbers)
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            return np.array(x[numbers[0] : numbers[-1] + 1]), y[numbers]
        return x[numbers], y[numbers]

    return _fetched(rows, len(y), shuffle)


def picked(workload: str, folder: pathlib.Path, shuffle: bool) -> Any:
    """Numbers of samples from tf.data, all of them shuffled, and each row read where it lies, in the order of the file:
    by somebody who knows that a memory map is slow at that."""
    y = np.load(folder / "y.npy")
    offset = np.load(folder / "x.npy", mmap_mode="r").offset
    file = os.open(folder / "x.npy", os.O_RDONLY)

    def rows(numbers: Any) -> Any:
        numbers = np.sort(numbers)
        batch: Any = np.empty((len(numbers), *SHAPE), np.uint8)
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            os.preadv(file, [batch], offset + int(numbers[0]) * RECORD)
            return batch, y[numbers]
        places = [offset + int(number) * RECORD for number in numbers]
        for place in places:
            os.posix_fadvise(file, place, RECORD, os.POSIX_FADV_WILLNEED)
        for row, place in zip(batch, places, strict=True):
            os.preadv(file, [row], place)
        return batch, y[numbers]

    return _fetched(rows, len(y), shuffle)


def _fetched(rows: Any, count: int, shuffle: bool) -> Any:
    """Batches of what a Python function gives for the numbers of their samples."""
    import tensorflow as tf

    def fetch(numbers: Any) -> Any:
        found = tf.numpy_function(rows, [numbers], [tf.uint8, tf.int64])
        return tf.ensure_shape(found[0], (None, *SHAPE)), tf.ensure_shape(found[1], (None,))

    dataset = tf.data.Dataset.range(count)
    if shuffle:
        dataset = dataset.shuffle(count, seed=1)
    dataset = dataset.batch(BATCH, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.map(fetch, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def decoded(workload: str, folder: pathlib.Path, shuffle: bool, **decoding: Any) -> Any:
    """Paths, read, decoded and resized in a parallel map."""
    import tensorflow as tf

    names = sorted(os.listdir(folder))
    paths, labels = [], []
    for label, name in enumerate(names):
        found = sorted(os.listdir(folder / name))
        paths += [f"{folder}/{name}/{file}" for file in found]
        labels += [label] * len(found)

    def image(path: Any, label: Any) -> Any:
        pixels = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, **decoding)
        pixels = tf.image.resize(pixels, IMAGE_SIZE)
        return tf.cast(pixels, tf.uint8), label

    dataset = tf.data.Dataset.from_tensor_slices((paths, labels))
    if shuffle:
        dataset = dataset.shuffle(len(paths), seed=1)
    dataset = dataset.map(image, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(IMAGE_BATCH, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def decoded_small(workload: str, folder: pathlib.Path, shuffle: bool) -> Any:
    """The same by somebody who knows that 600 × 800 may be decoded at half its size, and the quick transform."""
    return decoded(workload, folder, shuffle, ratio=2, dct_method="INTEGER_FAST")


CONTESTANTS = {
    "arrays": {"ours": ours, "records": records, "mapped": mapped, "picked": picked},
    "hdf5": {"ours": ours, "mapped": mapped},
    "images": {"ours": ours, "decoded": decoded, "decoded_small": decoded_small},
}
# These shuffle what is in a buffer; all others shuffle all samples, as ours does.
BUFFERED = {"records"}


def batches(pipeline: Any) -> Iterator[Any]:
    yield from pipeline


def model(workload: str) -> Any:
    """Next to nothing to compute, so that the data is what is measured."""
    import keras

    shape = (*IMAGE_SIZE, 3) if workload == "images" else SHAPE
    inputs = keras.Input(shape, dtype="uint8")
    pixels = keras.layers.Rescaling(1 / 255)(inputs[:, ::8, ::8])
    outputs = keras.layers.Dense(10, activation="softmax")(keras.layers.Flatten()(pixels))
    made = keras.Model(inputs, outputs)
    made.compile("sgd", "sparse_categorical_crossentropy")
    return made
