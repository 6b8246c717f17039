"""oomproof.data.tune: the elements stay the same, one by one, and the pipeline fits."""

import operator

import numpy as np
import pytest
from here import only

from oomproof.data import tune
from oomproof.data.tuning import Tuning

pytestmark = only("tensorflow", because="tf.data pipelines: `oomproof.data.audit` and `tune`")

MIB = 2**20
N = 300


@pytest.fixture
def tf():
    import tensorflow

    tensorflow.random.set_seed(1)
    return tensorflow


def rows(tf, columns=4096):
    x = np.arange(N * columns, dtype="float32").reshape(N, columns)
    return tf.data.Dataset.from_tensor_slices((x, np.arange(N)))


def scaled(tf, **options):
    return rows(tf).map(lambda a, b: (tf.concat([a * 2, a], 0), b), **options)


def shaken(tf, dataset):
    return dataset.map(lambda a, b: (a + tf.random.uniform([], seed=7), b))


# Not written as a call, since a call of that name is a test that does not run (test_table.py).
without_first = operator.methodcaller("skip", 1)

PIPELINES = {
    "scaled, shuffled": lambda tf: scaled(tf).shuffle(N, seed=3).batch(32),
    "shuffled once": lambda tf: scaled(tf).shuffle(50, seed=3, reshuffle_each_iteration=False).batch(32),
    "global seed only": lambda tf: scaled(tf).shuffle(100).batch(32),
    "cached": lambda tf: scaled(tf).cache().shuffle(N, seed=3).batch(32).prefetch(tf.data.AUTOTUNE),
    "random after cache": lambda tf: shaken(tf, scaled(tf).cache()).shuffle(N, seed=3).batch(32),
    "random before cache": lambda tf: shaken(tf, scaled(tf)).cache().batch(32),
    "random before shuffle": lambda tf: shaken(tf, scaled(tf)).shuffle(N, seed=3).batch(32),
    "random after batch": lambda tf: shaken(tf, scaled(tf).batch(32)).prefetch(1),
    "parallel already": lambda tf: scaled(tf, num_parallel_calls=3, deterministic=True).batch(7, drop_remainder=True),
    "filtered": lambda tf: scaled(tf).filter(lambda a, b: b % 3 > 0).shuffle(N, seed=3).batch(32),
    "repeated": lambda tf: without_first(scaled(tf).shuffle(N, seed=3).repeat(2).batch(32).take(15)),
    "sharded": lambda tf: scaled(tf).shard(3, 1).shuffle(N, seed=3).batch(8),
    "dictionaries": lambda tf: scaled(tf).map(lambda a, b: {"x": a, "y": [b, b]}).shuffle(N, seed=3).batch(32),
    "a list in a tuple": lambda tf: scaled(tf).map(lambda a, b: ((a, b), b)).shuffle(N, seed=3).batch(32),
    "one tensor": lambda tf: scaled(tf).map(lambda a, b: a).shuffle(N, seed=3).batch(32),
    "padded": lambda tf: scaled(tf).map(lambda a, b: a[: b + 1]).shuffle(N, seed=3).padded_batch(16),
    "unbatched": lambda tf: scaled(tf).batch(32).unbatch().shuffle(N, seed=3).batch(16),
    "zipped, shuffled before": lambda tf: tf.data.Dataset.zip((scaled(tf).shuffle(9, seed=3), rows(tf))).batch(32),
    "concatenated, shuffled": lambda tf: scaled(tf).shuffle(50, seed=3).concatenate(scaled(tf).cache()).batch(32),
    "zipped": lambda tf: tf.data.Dataset.zip((scaled(tf), rows(tf))).map(lambda a, b: (a[0], b[0])).batch(32),
    "concatenated": lambda tf: scaled(tf).concatenate(scaled(tf)).shuffle(N, seed=3).batch(32),
    "python": lambda tf: rows(tf).map(lambda a, b: (tf.numpy_function(np.negative, [a], tf.float32), b)).batch(32),
    "generator": lambda tf: tf.data.Dataset.from_generator(
        lambda: iter(np.arange(500)), output_signature=tf.TensorSpec([], tf.int64)
    ).map(lambda i: tf.fill([5000], i)).shuffle(N, seed=3).batch(32),
    "windows": lambda tf: tf.data.Dataset.range(99).window(4).flat_map(lambda w: w.batch(4)).shuffle(9, seed=3),
    "batched before shuffle": lambda tf: scaled(tf).batch(10).shuffle(30, seed=3),
    "prefetched before batch": lambda tf: scaled(tf).prefetch(200).batch(32),
}  # fmt: skip


def elements(tf, dataset, epochs=2):
    """All elements, flat, of several epochs."""
    return [[part.numpy() for part in tf.nest.flatten(each)] for _ in range(epochs) for each in dataset]


def assert_same(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", PIPELINES)
def test_elements_are_the_same(tf, name):
    """In two pipelines made alike, since a shuffle goes on from epoch to epoch."""
    plain = PIPELINES[name](tf)
    tf.random.set_seed(1)
    tuned = tune(PIPELINES[name](tf), budget="200MiB", verbose=False)
    assert tuned.element_spec == plain.element_spec
    assert int(tuned.cardinality()) == int(plain.cardinality())
    assert_same(elements(tf, plain), elements(tf, tuned))


def test_the_comparison_can_fail(tf):
    one = rows(tf).map(lambda a, b: (a * 2, b)).shuffle(N, seed=3).batch(32)
    with pytest.raises(AssertionError):
        assert_same(elements(tf, one), elements(tf, rows(tf).map(lambda a, b: (a * 2, b)).shuffle(N, seed=4).batch(32)))


def names(dataset):
    return [stage.name for stage in dataset.tuning.after.stages]


def test_shuffle_goes_before_the_maps(tf, capsys):
    tuned = tune(PIPELINES["scaled, shuffled"](tf), budget="200MiB")
    assert names(tuned)[:5] == ["from_tensor_slices", "shuffle(300)", "map", "batch(32)", "prefetch(2)"]
    assert tuned.tuning.after.host_bytes < tuned.tuning.before.host_bytes
    printed = capsys.readouterr().out
    assert "before map" in printed
    assert str(tuned.tuning) in printed
    assert Tuning.from_json(tuned.tuning.to_json()) == tuned.tuning


def test_random_functions_stay_where_and_as_they_are(tf):
    tuned = tune(PIPELINES["random before shuffle"](tf), budget="200MiB", verbose=False)
    assert names(tuned)[:4] == ["from_tensor_slices", "map", "map", "shuffle(300)"]
    assert any("random" in reason for reason in tuned.tuning.kept)


def test_only_what_takes_time_is_done_in_parallel(tf):
    quick = rows(tf).map(lambda a, b: (tf.cast(a, "float16") / 255, b)).batch(4)
    slow = rows(tf, 64).map(lambda a, b: (tf.signal.rfft(a), b)).batch(4)
    large = rows(tf, 2**18).take(4).map(lambda a, b: (a / 255, b)).batch(2)
    done = [tune(each, budget="4GiB", verbose=False).tuning.changes for each in (quick, slow, large)]
    assert [any("parallel calls" in change for change in changes) for changes in done] == [False, True, True]


def test_a_cache_that_does_not_fit_is_taken_out(tf):
    tuned = tune(PIPELINES["cached"](tf), budget="14MiB", verbose=False)
    assert "cache()" not in names(tuned)
    assert tuned.tuning.after.host_bytes <= 14 * MIB < tuned.tuning.before.host_bytes
    assert_same(elements(tf, PIPELINES["cached"](tf)), elements(tf, tuned))


def test_a_cache_that_does_not_fit_goes_to_disk_if_there_is_a_place(tf, tmp_path):
    def plain():
        return scaled(tf).cache().shuffle(50, seed=3).batch(8)

    tuned = tune(plain(), budget="10MiB", cache_dir=tmp_path, verbose=False)
    assert "cache(file)" in names(tuned)
    assert tuned.tuning.after.host_bytes <= 10 * MIB < tuned.tuning.before.host_bytes
    assert_same(elements(tf, plain()), elements(tf, tuned))
    assert any(tmp_path.iterdir())


def test_a_cache_of_random_elements_is_kept(tf):
    """Without it every epoch would be another one."""
    tuned = tune(PIPELINES["random before cache"](tf), budget="4MiB", verbose=False)
    assert "cache()" in names(tuned)
    assert tuned.tuning.after.host_bytes > 4 * MIB
    assert "over the budget" in str(tuned.tuning)


def test_a_shuffle_that_cannot_fit_is_made_smaller_and_said(tf):
    made = tf.data.Dataset.range(N).map(lambda i: tf.fill([8192], tf.cast(i, tf.float32)))
    plain = shaken(tf, tf.data.Dataset.zip((made, made))).map(lambda a, b: a).shuffle(N, seed=3).batch(8)
    tuned = tune(plain, budget="6MiB", verbose=False)
    assert tuned.tuning.after.host_bytes <= 6 * MIB < tuned.tuning.before.host_bytes
    assert any("the order changes" in change for change in tuned.tuning.changes)
    labels = sorted(float(part[0][0, 0]) // 1 for part in elements(tf, tuned.unbatch().batch(1), epochs=1))
    assert len(labels) == N


def test_files_are_cached_where_they_fit(tf, tmp_path):
    for index in range(20):
        (tmp_path / f"{index}.jpg").write_bytes(tf.io.encode_jpeg(np.full((64, 64, 3), index, "uint8")).numpy())
    paths = sorted(map(str, tmp_path.iterdir()))

    def read(path):
        return tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path)), (32, 32))

    def plain():
        return tf.data.Dataset.from_tensor_slices(paths).map(read).shuffle(20, seed=3).batch(4)

    tuned = tune(plain(), budget="200MiB", verbose=False)
    assert "cache()" in names(tuned)
    assert_same(elements(tf, plain()), elements(tf, tuned))
    assert "cache()" not in names(tune(plain(), budget="150KiB", verbose=False))


def test_stages_that_cannot_be_built_again_are_left(tf):
    plain = tf.data.Dataset.range(100).map(lambda i: i * 2).scan(tf.constant(0, tf.int64), lambda s, i: (s + i, s + i))
    tuned = tune(plain.map(lambda i: i + 1).batch(8), budget="1GiB", verbose=False)
    assert any("Scan" in reason for reason in tuned.tuning.kept)
    assert_same(elements(tf, plain.map(lambda i: i + 1).batch(8)), elements(tf, tuned))


def test_a_seed_set_since_is_noticed(tf):
    plain = scaled(tf).shuffle(N).batch(32)
    tf.random.set_seed(2)
    tuned = tune(plain, budget="200MiB", verbose=False)
    assert any("set_seed" in reason for reason in tuned.tuning.kept)
    assert names(tuned)[:3] == ["from_tensor_slices", "map", "shuffle(300)"]


def test_determinism_is_left_as_it_was(tf):
    options = tf.data.Options()
    options.deterministic = False
    tuned = tune(scaled(tf).batch(32).with_options(options), budget="200MiB", verbose=False)
    assert tuned.options().deterministic is False
    strict = tune(scaled(tf, num_parallel_calls=2, deterministic=True).batch(4), budget="200MiB", verbose=False)
    from oomproof.data.pipelines.tf_stages import chain_of, walk

    (node,) = (each for each in walk(chain_of(strict)) if each.kind == "map")
    assert node.dataset._deterministic == "true"


def test_bad_arguments(tf, tmp_path):
    with pytest.raises(TypeError, match=r"Expected a tf\.data\.Dataset"):
        tune(np.zeros(3))
    with pytest.raises(ValueError, match="Expected `budget`"):
        tune(rows(tf), budget="much")
    with pytest.raises(ValueError, match="Expected `cache_dir`"):
        tune(rows(tf), cache_dir=tmp_path / "nowhere")


def test_branches_are_tuned_and_what_stays_in_them_is_said(tf):
    shuffled = scaled(tf).shuffle(N, seed=3)
    tuning = tune(tf.data.Dataset.zip((shuffled, rows(tf).cache())).batch(32), verbose=False).tuning
    assert any("branch 1 of zip: shuffle(300) before map" in change for change in tuning.changes)
    assert any("branch 2 of zip" in reason and "cache()" in reason for reason in tuning.kept)
    assert tuning.after.host_bytes < tuning.before.host_bytes
