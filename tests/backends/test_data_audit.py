"""oomproof.data.audit: what pipelines hold, and what it says about them."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from here import BACKEND, only

from oomproof.data import DataAudit, audit

tf_data = only("tensorflow", because="tf.data pipelines: `oomproof.data.audit` and `tune`")
MIB = 2**20


def topics(report):
    return {finding.topic for finding in report.findings}


def rows(count=64, columns=1024, dtype="float32"):
    return np.ones((count, columns), dtype), np.arange(count)


@pytest.fixture
def slices():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices


def stage(report, name):
    (found,) = (each for each in report.stages if each.name == name)
    return found


@tf_data
def test_stages_sum_up_and_are_named(slices):
    report = audit(slices(rows()).map(lambda a, b: (a * 2, b)).shuffle(16).batch(8).prefetch(3))
    assert [each.name for each in report.stages][:5] == [
        "from_tensor_slices",
        "map",
        "shuffle(16)",
        "batch(8)",
        "prefetch(3)",
    ]
    assert sum(each.bytes for each in report.stages) == report.host_bytes
    assert report.unknown == ()
    assert stage(report, "prefetch(3)").element == 8 * (4096 + 8)
    assert DataAudit.from_json(report.to_json()) == report
    assert not topics(report) & {"no prefetch", "batch applied twice"}


@tf_data
def test_slices_are_views_where_rows_begin_at_aligned_addresses(slices):
    aligned = audit(slices(np.ones((256, 1024), "float32")).shuffle(256).batch(8).prefetch(1))
    odd = audit(slices(np.ones((256, 1023), "float32")).shuffle(256).batch(8).prefetch(1))
    assert stage(aligned, "shuffle(256)").bytes < 64 * 1024
    assert stage(odd, "shuffle(256)").bytes > 250 * 4092


@tf_data
def test_buffers_by_hand(slices):
    """Figures that can be worked out: 100 elements of a mebibyte are made, none is held before."""
    import tensorflow as tf

    made = tf.data.Dataset.range(100).map(lambda i: tf.zeros([MIB // 4]), num_parallel_calls=4)
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False

    def mebibytes(dataset):
        return round(audit(dataset.with_options(options)).host_bytes / MIB)

    assert mebibytes(made) == 4 + 1
    assert mebibytes(made.prefetch(7)) == 4 + 7 + 1
    assert mebibytes(made.shuffle(50)) == 4 + 50
    assert mebibytes(made.cache()) == 100
    assert mebibytes(made.batch(10)) == 4 + 10 + 10
    assert mebibytes(made.batch(10).prefetch(2)) == 4 + 10 + 3 * 10
    # All of it is in the buffer: what leaves it is not replaced.
    assert mebibytes(made.shuffle(100).batch(10).prefetch(2)) == 4 + 99 + 10


@tf_data
def test_a_batch_size_for_what_is_not_batched(slices):
    assert "batch(16)" in [each.name for each in audit(slices(rows()), batch_size=16).stages]
    assert "batch size" in topics(audit(slices(rows()).batch(8), batch_size=16))


def _findings(tf, slices, tmp_path):
    """{topic: (pipeline that has it, one that has not)}."""
    picture = tf.io.encode_jpeg(np.zeros((64, 64, 3), "uint8")).numpy()
    path = tmp_path / "a.jpg"
    path.write_bytes(picture)

    def shake(a, b):
        return a + tf.random.uniform([]), b

    def shake_in_parts(a, b):
        return tf.cond(tf.reduce_sum(a) > 0, lambda: a + tf.random.normal([]), lambda: a), b

    def read(ratio):
        return lambda p: tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(p), ratio=ratio, channels=3), (8, 8))

    data = slices(rows())
    files = slices([str(path)] * 8)
    wide, narrow = slices(np.ones((64, 4096))), slices(np.ones((64, 4096), "float32"))
    huge = tf.data.Dataset.range(10**9).map(lambda i: tf.zeros([10**6]))
    small = tf.data.Dataset.range(10).map(lambda i: tf.zeros([10]))
    parallel = {"num_parallel_calls": tf.data.AUTOTUNE}
    numbers = tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int32))
    return {
        "no prefetch": (data.batch(8), data.batch(8).prefetch(1)),
        "prefetch before batch": (data.prefetch(8).batch(8), data.batch(8).prefetch(8)),
        "batch applied twice": (data.batch(8).batch(2), data.batch(8).unbatch().batch(2)),
        "cache before a random augmentation": (data.map(shake_in_parts).cache(), data.cache().map(shake)),
        "cache larger than memory": (huge.cache(), small.cache()),
        "cache after batch": (data.batch(8).cache(), data.cache().batch(8)),
        "cache after shuffle": (data.shuffle(64).cache(), data.cache().shuffle(64)),
        "shuffle buffer larger than memory": (huge.shuffle(10**8), small.shuffle(10)),
        "shuffle buffer smaller than useful": (data.shuffle(2), data.shuffle(64)),
        "shuffle after batch": (data.batch(8).shuffle(8), data.shuffle(64).batch(8)),
        "map not parallel": (data.map(lambda a, b: a), data.map(lambda a, b: a, **parallel)),
        "float64 where smaller would do": (wide, narrow),
        "int64 where smaller would do": (slices(np.ones((64, 4096), "int64")), narrow),
        "images decoded at full size": (files.map(read(1)), files.map(read(2))),
        "generator": (numbers, small),
    }


@tf_data
def test_findings(slices, tmp_path):
    import tensorflow as tf

    for topic, (bad, good) in _findings(tf, slices, tmp_path).items():
        (finding,) = (each for each in audit(bad).findings if each.topic == topic)
        assert finding.fix, topic
        assert topic not in topics(audit(good)), topic


@tf_data
def test_what_is_not_known_is_said_and_not_guessed(slices):
    import tensorflow as tf

    numbers = tf.data.Dataset.range(10)
    report = audit(numbers.scan(tf.constant(0, tf.int64), lambda s, i: (s + i, s + i)).batch(2))
    assert report.unknown == ("ScanDataset",)
    assert "at least" in str(report)
    filtered = audit(numbers.filter(lambda i: i > 3).cache())
    assert filtered.unknown == ("cache()",)
    windows = audit(numbers.window(3))
    assert windows.unknown


@tf_data
def test_unknown_shapes_are_measured_and_nothing_is_filled(slices):
    """A shuffle buffer is not filled to find out how large an element is."""
    import tensorflow as tf

    drawn = []

    def draw(i):
        drawn.append(int(i))
        return np.zeros(250_000, "float32")

    made = tf.data.Dataset.range(10_000).map(lambda i: tf.numpy_function(draw, [i], tf.float32))
    report = audit(made.shuffle(5_000).batch(10).prefetch(1))
    assert stage(report, "shuffle(5000)").bytes == pytest.approx(5_000 * 10**6, rel=0.01)
    assert len(drawn) < 100


def test_arrays():
    x, y = np.ones((1024, 256), "float64"), np.arange(1024)
    report = audit((x, y), batch_size=64)
    assert stage(report, "arrays").bytes == x.nbytes + y.nbytes
    # A copy for every epoch whose iterator is still there.
    copies = {"tensorflow": 1, "torch": 2, "jax": 3}[BACKEND]
    assert stage(report, "cast").bytes == copies * x.nbytes // 2
    copied = [each for each in report.stages if each.name == "fit: tensors"]
    assert bool(copied) is (BACKEND == "tensorflow")
    assert "float64 where smaller would do" in topics(report)
    assert ("arrays copied to the device whole" in topics(report)) is (BACKEND == "tensorflow")
    assert not audit(x.astype("float32")[:8]).findings


class Batches(keras.utils.PyDataset):
    def __init__(self, **options):
        super().__init__(**options)
        self.x = np.ones((64, 1024), "float32")

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.x[8 * index : 8 * index + 8], np.zeros(8)


def test_py_dataset():
    batch = 8 * 4096 + 64
    assert "no workers" in topics(audit(Batches()))
    report = audit(Batches(workers=3, max_queue_size=5))
    assert stage(report, "queue").bytes == 5 * batch
    assert stage(report, "dataset").bytes == 64 * 4096
    many = audit(Batches(workers=3, use_multiprocessing=True, max_queue_size=5))
    assert many.host_bytes == report.host_bytes + 3 * 64 * 4096


def test_data_loader():
    import torch

    data = torch.utils.data.TensorDataset(torch.ones(64, 1024))
    report = audit(torch.utils.data.DataLoader(data, batch_size=8, num_workers=3, prefetch_factor=2))
    assert stage(report, "queue").bytes == 3 * 2 * 8 * 4096
    assert "no workers" in topics(audit(torch.utils.data.DataLoader(data, batch_size=8)))


def test_generators():
    everything = np.ones((4096, 1024), "float32")

    def batches(x=everything):
        for start in range(0, 4096, 32):
            yield x[start : start + 32]

    held = audit(batches)
    assert "generator that holds everything" in topics(held)
    assert stage(held, "generator").bytes == pytest.approx(everything.nbytes, rel=0.1)

    def small():
        while True:
            yield np.zeros((8, 4))

    running = small()
    assert audit(running).unknown == ("batches",)
    assert next(running).shape == (8, 4)
    assert audit(small).unknown == ()


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"Expected a tf\.data\.Dataset"):
        audit("text")
    with pytest.raises(ValueError, match="Expected `batch_size`"):
        audit(np.zeros(3), batch_size=0)
    with pytest.raises(ValueError, match="same length"):
        audit((np.zeros(3), np.zeros(4)))


def test_command_line(tmp_path):
    (tmp_path / "train.py").write_text("import numpy as np\ndef make():\n    return np.ones((100, 7)), np.zeros(100)\n")
    command = [sys.executable, "-c", "from oomproof._cli.main import main; main()", "data", "audit", "train:make"]
    answer = subprocess.run([*command, "--batch-size", "10", "--json"], cwd=tmp_path, capture_output=True, timeout=120)
    assert answer.returncode == 0, answer.stderr.decode()[-2000:]
    assert json.loads(answer.stdout)["kind"] == "arrays"
