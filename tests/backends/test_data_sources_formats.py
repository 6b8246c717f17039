"""Images, tables, records, generators: what comes out of them, and what is said where they are broken."""

from __future__ import annotations

import itertools
import sys

import keras
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from PIL import Image

from oomproof import BackendError, data

# Images


@pytest.fixture
def images(tmp_path):
    """Ten images of each of two classes in five formats; the middle of each has the colour of its number."""
    for label, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        for number in range(10):
            colour = (number * 20, 255 - number * 20, label * 200)
            suffix = ("jpg", "png", "bmp", "gif", "webp")[number % 5]
            options = {"lossless": True} if suffix == "webp" else {}
            Image.new("RGB", (64 + number, 48), colour).save(tmp_path / name / f"{number}.{suffix}", **options)
    return tmp_path


def test_images_and_labels(images):
    stream = data.from_files(images, image_size=(8, 12), batch_size=6)
    x, y = (np.concatenate(parts) for parts in zip(*stream, strict=True))
    assert x.shape == (20, 8, 12, 3)
    assert x.dtype == np.uint8
    assert y.tolist() == [0] * 10 + [1] * 10
    assert stream.source.class_names == ["a", "b"]
    for number in range(20):
        expected = (number % 10 * 20, 255 - number % 10 * 20, number // 10 * 200)
        np.testing.assert_allclose(x[number].mean((0, 1)), expected, atol=4)


@pytest.mark.parametrize(
    ("options", "shapes", "dtypes"),
    [
        ({"dtype": "float32"}, [(4, 8, 12, 3), (4,)], ["float32", "int32"]),
        ({"color_mode": "grayscale"}, [(4, 8, 12, 1), (4,)], ["uint8", "int32"]),
        ({"color_mode": "rgba"}, [(4, 8, 12, 4), (4,)], ["uint8", "int32"]),
        ({"labels": None}, [(4, 8, 12, 3)], ["uint8"]),
        ({"labels": list(range(20))}, [(4, 8, 12, 3), (4,)], ["uint8", "int32"]),
        ({"label_mode": "categorical"}, [(4, 8, 12, 3), (4, 2)], ["uint8", "float32"]),
        ({"label_mode": "binary"}, [(4, 8, 12, 3), (4, 1)], ["uint8", "float32"]),
    ],
    ids=str,
)
def test_what_a_batch_of_images_is(images, options, shapes, dtypes):
    batch = data.from_files(images, image_size=(8, 12), batch_size=4, **options)[0]
    assert [part.shape for part in batch] == shapes
    assert [str(part.dtype) for part in batch] == dtypes


def test_large_jpegs_are_never_decoded_whole(tmp_path, monkeypatch):
    """A gradient that shows where each pixel came from, with and without cropping."""
    ramp = np.broadcast_to(np.linspace(0, 255, 800, dtype=np.uint8)[None, :, None], (400, 800, 3))
    Image.fromarray(ramp).save(tmp_path / "wide.jpg", quality=95)
    sizes = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, *a, **k: (sizes.append(self.size), resize(self, *a, **k))[1]
    )
    whole = data.from_files(tmp_path, labels=None, image_size=(50, 50))[0][0][0]
    middle = data.from_files(tmp_path, labels=None, image_size=(50, 50), crop_to_aspect_ratio=True)[0][0][0]
    assert sizes == [(100, 50), (100, 50)]  # An eighth.
    assert abs(int(whole[25, 0, 0]) - 2) < 8
    assert abs(int(whole[25, -1, 0]) - 253) < 8
    assert abs(int(middle[25, 0, 0]) - 64) < 8
    assert abs(int(middle[25, -1, 0]) - 191) < 8


def broken(images, count=3):
    contents = (b"", (images / "b" / "0.jpg").read_bytes()[:300], b"no image")
    for number in range(count):
        (images / "a" / f"bad{number}.jpg").write_bytes(contents[number % 3])


def test_a_corrupt_file_is_named(images):
    broken(images)
    with pytest.raises(ValueError, match=r"bad0\.jpg is not a readable image \(UnidentifiedImageError"):
        list(data.from_files(images, image_size=(8, 8)))


def test_corrupt_files_are_skipped_when_asked(images):
    broken(images)
    stream = data.from_files(images, image_size=(8, 8), batch_size=5, on_corrupt="skip", shuffle=True, seed=1)
    for _ in range(2):
        assert [len(x) for x, _ in stream] == [5, 5, 5, 5, 3]
    assert [path[-8:] for path, _ in stream.corrupt] == ["bad0.jpg", "bad1.jpg", "bad2.jpg"]
    assert "truncated" in dict(stream.corrupt)[str(images / "a" / "bad1.jpg")].lower()
    model = keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert np.isfinite(model.fit(stream, verbose=0).history["loss"][0])


def test_nothing_but_corrupt_files(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(b"no")
    stream = data.from_files(tmp_path, labels=None, image_size=(8, 8), on_corrupt="skip")
    with pytest.raises(ValueError, match="None of 5 files is a readable image"):
        list(stream)


def test_a_split_has_every_file_once(images):
    options = {"image_size": (8, 8), "validation_split": 0.3, "seed": 5, "batch_size": 100}
    parts = [data.from_files(images, subset=subset, **options)[0][0] for subset in ("training", "validation")]
    assert [len(part) for part in parts] == [14, 6]
    together = np.concatenate(parts)
    whole = data.from_files(images, image_size=(8, 8), batch_size=100)[0][0]
    assert sorted(map(bytes, together)) == sorted(map(bytes, whole))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_size": 8}, r"Expected `image_size` to be \(height, width\). Received: image_size=8"),
        ({"image_size": (8, 0)}, "at least 1. Received: image_size=0"),
        ({"image_size": (8, 8), "batch_size": 0}, "Received: batch_size=0"),
        ({"image_size": (8, 8), "labels": [1, 2]}, "each of 20 images .* Received: 2 labels"),
        ({"image_size": (8, 8), "on_corrupt": "ignore"}, "one of 'error', 'skip'. Received: on_corrupt='ignore'"),
        ({"image_size": (8, 8), "validation_split": 0.01, "subset": "training", "seed": 1}, "0 of 20 files"),
        ({"image_size": (8, 8), "validation_split": 0.5}, "together"),
    ],
    ids=str,
)
def test_bad_arguments_for_images(images, options, words):
    with pytest.raises(ValueError, match=words):
        data.from_files(images, **options)


# Tables

ROWS = 300
TABLE = pa.table(
    {
        "a": np.arange(ROWS),
        "b": np.arange(ROWS) * 0.5,
        "text": [f"row {i}" for i in range(ROWS)],
        "y": np.arange(ROWS) % 3,
    }
)


@pytest.fixture(params=["parquet", "arrow", "feather", "csv"])
def table(request, tmp_path, monkeypatch):
    monkeypatch.setattr("oomproof.data.sources.tables._CSV_BLOCK", 1000)
    path = tmp_path / f"table.{request.param}"
    if request.param == "parquet":
        pa.parquet.write_table(TABLE, path, row_group_size=64)
    elif request.param == "csv":
        pa.csv.write_csv(TABLE, path)
    elif request.param == "feather":
        pa.feather.write_feather(TABLE, path, chunksize=64)
    else:
        with pa.ipc.new_file(str(path), TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=64)
    return path


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_a_table(table, shuffle):
    stream = data.from_table(table, columns=["a", "b"], label="y", batch_size=32, shuffle=shuffle, seed=1, mix_blocks=2)
    x, y = (np.concatenate(parts) for parts in zip(*stream, strict=True))
    assert x.dtype == np.float32
    rows = x[:, 0].astype(int)
    np.testing.assert_array_equal(np.sort(rows), np.arange(ROWS))
    assert (rows == np.arange(ROWS)).all() != shuffle
    np.testing.assert_array_equal(x[:, 1], rows * 0.5)
    np.testing.assert_array_equal(y, rows % 3)
    half = [
        batch[0][:, 0].tolist()
        for batch in data.from_table(table, columns=["a"], label="y", batch_size=32).resume(
            data.from_table(table, columns=["a"], label="y", batch_size=32).state_at(0, 4)
        )
    ]
    assert half[0][0] == 128


def test_columns_of_a_table(table):
    (x,) = data.from_table(table, output="columns", batch_size=4)[1]
    assert set(x) == {"a", "b", "text", "y"}
    assert x["text"].tolist() == [f"row {i}" for i in range(4, 8)]


def test_a_table_trains(table):
    stream = data.from_table(table, columns=["a", "b"], label="y", batch_size=64, shuffle=True)
    model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert len(model.fit(stream, epochs=2, verbose=0).history["loss"]) == 2


def test_bad_tables(table, tmp_path):
    with pytest.raises(ValueError, match=r"a, b, text, y\. Received: c"):
        data.from_table(table, columns=["c"])
    with pytest.raises(TypeError, match="column 'text' of type string"):
        data.from_table(table)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        data.from_table(tmp_path / "nowhere.csv")
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 not at all")
    with pytest.raises(ValueError, match=r"bad\.parquet is not a readable parquet file"):
        data.from_table(bad)
    pa.parquet.write_table(pa.table({"a": [1, None, 3]}), bad)
    with pytest.raises(ValueError, match="1 missing ones in 'a'"):
        data.from_table(bad)


# Records


@pytest.fixture
def records(tmp_path):
    import tensorflow as tf

    for file in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / f"{file}.tfrecord")) as writer:
            for number in range(file * 25, file * 25 + 25):
                features = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, number * 2])),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 3])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    return tmp_path


def spec():
    import tensorflow as tf

    return {"x": tf.io.FixedLenFeature([2], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


def test_records(records):
    stream = data.from_records(records, features=spec(), label="y", batch_size=8, shuffle=True, seed=1)
    x, y = (np.concatenate(parts) for parts in zip(*stream, strict=True))
    assert sorted(x[:, 0]) == list(range(50))
    np.testing.assert_array_equal(x[:, 1], x[:, 0] * 2)
    np.testing.assert_array_equal(y, x[:, 0] % 3)
    model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(stream, verbose=0)
    lengths = data.from_records(records / "0.tfrecord", parse=lambda record: np.float32(len(record)), batch_size=25)
    assert lengths[0][0].shape == (25,)


def test_damaged_records_are_named_by_file_and_offset(records):
    path = records / "0.tfrecord"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little") + 16
    content[3 * size + 20] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"0\.tfrecord at byte {3 * size:,} cannot be read"):
        list(data.from_records(records, features=spec(), label="y"))
    stream = data.from_records(records, features=spec(), label="y", batch_size=50, on_corrupt="skip")
    assert stream[0][0][:, 0].astype(int).tolist() == [0, 1, 2, 4, 4, *range(5, 50)]
    assert len(stream.corrupt) == 1
    path.write_bytes(content[: 5 * size + 30])
    with pytest.raises(ValueError, match=rf"at byte {5 * size:,} .*truncated: it has 18 of {size - 16} bytes"):
        data.from_records(records, features=spec(), label="y")
    assert data.from_records(records, features=spec(), label="y", on_corrupt="skip").samples == 30


def test_records_without_tensorflow(records, monkeypatch):
    given = spec()
    monkeypatch.setitem(sys.modules, "oomproof._compat.tf_data", None)  # As where TensorFlow cannot be imported.
    with pytest.raises(BackendError, match=r"pip install 'oomproof\[tensorflow\]'"):
        data.from_records(records, features=given)


# Generators


def numbers(count=10, fail_at=None):
    def samples():
        for number in range(count):
            if number == fail_at:
                raise RuntimeError("the sensor is off")
            yield np.full(2, number, "float32"), np.float32(number)

    return samples


def seen(stream):
    return [batch[0][:, 0].astype(int).tolist() for batch in stream]


def test_samples_and_batches_of_a_generator():
    assert seen(data.from_generator(numbers(), batch_size=4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert seen(data.from_generator(numbers(), batch_size=4, drop_remainder=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    ready = data.from_generator(lambda: (np.full((3, 2), i) for i in range(2)))
    assert seen(ready) == [[0, 0, 0], [1, 1, 1]]


def test_a_generator_is_resumed_by_skipping():
    stream = data.from_generator(numbers(), batch_size=4, steps=3)
    assert seen(stream.resume(stream.state_at(2, 1))) == [[4, 5, 6, 7], [8, 9]]
    assert stream.state["epoch"] == 3


@pytest.mark.parametrize("steps", [3, None])
def test_a_generator_trains(steps):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(data.from_generator(numbers(), batch_size=4, steps=steps), epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


def test_what_a_generator_raises_is_seen():
    with pytest.raises(RuntimeError, match="the sensor is off") as raised:
        seen(data.from_generator(numbers(fail_at=5), batch_size=2))
    assert "at item 5 of an epoch" in raised.value.__notes__[0]
    assert any(entry.name == "samples" for entry in raised.traceback)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(Exception, match="the sensor is off"):
        model.fit(data.from_generator(numbers(fail_at=5), batch_size=2, steps=5), verbose=0)


def test_a_generator_that_ends_early():
    with pytest.raises(ValueError, match=r"ended after 3 batches\. Expected: steps=5"):
        seen(data.from_generator(numbers(), batch_size=4, steps=5))


def test_a_generator_is_not_read_far_ahead():
    made = []

    def endless():
        while True:
            made.append(1)
            yield np.zeros((2, 2))

    batches = iter(data.from_generator(endless, max_queue_size=3))
    for _ in range(5):
        next(batches)
    assert len(made) <= 5 + 3
    batches.close()


def test_sequences():
    samples = [(np.full(2, i), i) for i in range(10)]
    stream = data.from_generator(samples, batch_size=4, shuffle=True, seed=1)
    assert sorted(itertools.chain(*seen(stream))) == list(range(10))
    with pytest.raises(TypeError, match="used up after one"):
        data.from_generator(iter(samples), batch_size=2)
    with pytest.raises(ValueError, match=r"length 0"):
        data.from_generator([], batch_size=2)
    with pytest.raises(ValueError, match=r"\[\(2,\)\] and \[\(3,\)\]"):
        seen(data.from_generator([np.zeros(2), np.zeros(3)], batch_size=2))


# Arrays


def test_bad_arrays():
    with pytest.raises(ValueError, match="x has 5, y has 4"):
        data.from_arrays(np.zeros((5, 2)), np.zeros(4))
    with pytest.raises(ValueError, match=r"x of shape \(0, 2\)"):
        data.from_arrays(np.zeros((0, 2)))
    with pytest.raises(TypeError, match=r"batch_size=2\.5"):
        data.from_arrays(np.zeros((5, 2)), batch_size=2.5)
    with pytest.raises(TypeError, match="x of <class 'int'>"):
        data.from_arrays(5)
    with pytest.raises(ValueError, match="Received: workers=-1"):
        data.from_arrays(np.zeros((5, 2)), workers=-1)


def test_an_npz_file_with_its_names(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(10)[:, None], y=np.arange(10))
    x, y = data.from_arrays(tmp_path / "a.npz", batch_size=10)[0]
    np.testing.assert_array_equal(x[:, 0], y)
    np.savez(tmp_path / "b.npz", images=np.arange(10))
    with pytest.raises(ValueError, match=r"names x, y and sample_weight .* Received: images"):
        data.from_arrays(tmp_path / "b.npz")
