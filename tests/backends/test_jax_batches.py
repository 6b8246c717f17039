"""Batches on JAX that stay on the host: where they are when a step begins, and that nothing else changes."""

import dataclasses

import keras
import numpy as np
import pytest
from here import only, out_of_memory
from models import BATCH, SAMPLES, check_same, classes, classifier, numbers, train

import oomproof

pytestmark = only("jax", because="XLA programs that take pieces from the host, and are told of a limit")


@pytest.fixture
def apart(monkeypatch):
    """As on a GPU: Keras puts batches there one ahead, and the host's memory is another. Where inputs were is noted."""
    from keras.src.backend.jax.trainer import JAXEpochIterator

    from oomproof._backends.jax import step
    from oomproof._backends.jax.device import JaxMemory

    class ApartStep(step.JaxStep):
        def __init__(self, model, memory):
            super().__init__(model, memory)
            self._apart_from_host = True

        def _program(self, kind, data, pieces):
            if kind in ("train", "gradients"):
                seen.append((pieces, *(leaf.sharding.memory_kind for leaf in data)))
            return super()._program(kind, data, pieces)

    seen: list[tuple[object, ...]] = []
    describe = JaxMemory.describe
    monkeypatch.setattr(JaxMemory, "describe", lambda self: dataclasses.replace(describe(self), limit=2**30))
    monkeypatch.setattr(step, "_LARGE", 0.0)
    monkeypatch.setattr("oomproof._backends.jax.JaxStep", ApartStep)
    monkeypatch.setattr(
        JAXEpochIterator,
        "_get_iterator",
        lambda self: self._one_batch_ahead_iterator(self.data_adapter.get_jax_iterator()),
    )
    return seen


def trained(**guard):
    return train(lambda: classifier(metrics=["accuracy"]), numbers(), classes(), epochs=3, guard=guard)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("micro", [3, 4], ids=["unequal", "equal"])
def test_pieces_are_taken_from_the_host_and_train_the_same(apart, micro):
    expected = train(lambda: classifier(metrics=["accuracy"]), numbers(), classes(), epochs=3)
    received = trained(micro_batch_size=micro)
    check_same(expected, received)
    assert {row[1:] for row in apart if row[0] > 1} == {("pinned_host", "device")}


def test_a_short_batch_that_runs_whole_changes_nothing_for_the_others(apart):
    trained(micro_batch_size=6)
    assert SAMPLES % BATCH <= 6
    assert {row for row in apart if row[0] > 1} == {(2, "pinned_host", "device")}
    assert {row for row in apart if row[0] == 1} == {(1, "device", "device")}


def test_a_batch_on_the_device_stays_there_and_the_next_ones_do_not_follow(apart):
    def fit_again(model):
        model.train_on_batch(numbers()[:BATCH], classes()[:BATCH])
        model.fit(numbers(), classes(), batch_size=BATCH, verbose=0)

    model = classifier()
    oomproof.guard(model, micro_batch_size=4)
    model.fit(numbers(), classes(), batch_size=BATCH, verbose=0)
    apart.clear()
    fit_again(model)
    on_the_device = [row[1] for row in apart].index("pinned_host")
    assert on_the_device == 1
    assert {row[1] for row in apart[1:]} == {"pinned_host"}


@pytest.mark.usefixtures("float64")
def test_memory_that_runs_out_in_a_later_batch(apart, monkeypatch):
    from oomproof._backends.jax.pending_steps import PendingStep

    original, waited = PendingStep.wait, []

    def wait(step):
        waited.append(step)
        # Where nearly all is free, the same size is tried once more before it is cut.
        if len(waited) in (4, 5):
            raise out_of_memory()
        return original(step)

    expected = train(lambda: classifier(metrics=["accuracy"]), numbers(), classes(), epochs=5)
    monkeypatch.setattr(PendingStep, "wait", wait)
    received = train(lambda: classifier(metrics=["accuracy"]), numbers(), classes(), epochs=5, guard={})
    check_same(expected, received)
    assert apart[-1][1] == "pinned_host"


@pytest.mark.usefixtures("float64")
def test_where_the_host_has_no_such_memory_batches_are_on_the_device(apart, monkeypatch):
    import jax

    from oomproof._backends.jax import host_batches

    def refused(leaf):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: failed to allocate pinned host memory")

    monkeypatch.setattr(host_batches, "_to_host", refused)
    expected = train(lambda: classifier(metrics=["accuracy"]), numbers(), classes(), epochs=3)
    check_same(expected, trained(micro_batch_size=4))
    assert {row[1:] for row in apart} == {("device", "device")}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", ["eager", "uncompiled"])
@pytest.mark.parametrize("guard", [{"verbose": 0}, {"micro_batch_size": 4}], ids=["whole", "pieces"])
def test_steps_that_run_op_by_op_are_fed_by_keras(apart, mode, guard):
    expected = train(classifier, numbers(), classes(), epochs=1, mode=mode)
    check_same(expected, train(classifier, numbers(), classes(), epochs=1, mode=mode, guard=guard))
    assert {row[1:] for row in apart} == {("device", "device")}


@pytest.mark.parametrize("guard", [{"verbose": 0}, {"micro_batch_size": 4}], ids=["whole", "pieces"])
def test_sparse_inputs_are_on_the_device(apart, guard, monkeypatch):
    import keras
    import scipy.sparse

    from oomproof._backends.jax.step import JaxStep

    monkeypatch.setattr("oomproof._backends.jax.JaxStep._program", JaxStep._program)
    inputs = keras.Input((4,), sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    oomproof.guard(model, **guard)
    model.fit(scipy.sparse.csr_matrix(numbers()), classes(), batch_size=BATCH, verbose=0)


def test_targets_are_on_the_device_and_planned_for():
    import keras

    def plan_of(targets):
        inputs = keras.Input((256,))
        model = keras.Model(inputs, keras.layers.Dense(targets)(inputs))
        model.compile("sgd", "mse")
        return oomproof.plan(model, 2**16, budget=96 * 2**20, cache=False)

    # 64 MiB of inputs, and either next to no targets or as many, once for this batch and once for the next.
    assert plan_of(1).predicted < 96 * 2**20
    with pytest.raises(oomproof.CannotFitError):
        plan_of(256)


@pytest.mark.usefixtures("float64")
def test_whole_batches_are_put_on_the_device(apart):
    expected = train(lambda: classifier(metrics=["accuracy"]), numbers(), classes(), epochs=3)
    check_same(expected, trained(verbose=0))
    assert set(apart) == {(1, "device", "device")}


def test_small_batches_in_pieces_are_where_keras_puts_them(apart, monkeypatch):
    monkeypatch.setattr("oomproof._backends.jax.step._LARGE", 1.0)
    trained(micro_batch_size=4)
    assert {row[1:] for row in apart} == {("device", "device")}


def test_inputs_that_an_own_loss_may_read_are_on_the_device(apart):
    import keras

    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))

    def make():
        inputs = keras.Input((4,))
        model = Own(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd")
        return model

    train(make, numbers(), classes(), epochs=1, guard={"micro_batch_size": 4})
    assert {row[1] for row in apart} == {"device"}


def test_a_feed_hands_out_every_batch_in_order_and_one_ahead():
    from oomproof._backends.jax.host_batches import Feed

    read = []

    def batches():
        for number in range(4):
            read.append(number)
            yield (np.full((2, 3), number, "float32"), np.array([number, number]))

    model, handed = classifier(), []
    for x, y in Feed(model, batches()):
        handed.append((float(x[0, 0]), int(y[0]), len(read)))
    # How batches run is not known before one has: the first is handed out before another is read.
    assert handed == [(0.0, 0, 1), (1.0, 1, 3), (2.0, 2, 4), (3.0, 3, 4)]


def test_a_batch_that_has_no_place_is_handed_out_all_the_same(monkeypatch):
    import jax

    from oomproof._backends.jax import host_batches

    def no_room(data, from_host):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(host_batches, "placed", no_room)
    model, batch = classifier(), (np.ones((2, 3)), np.ones(2))
    assert next(host_batches.Feed(model, iter([batch]))) is batch


def test_iterators_of_others_and_such_that_have_begun_are_left_alone():
    from keras.src.backend.jax.trainer import JAXEpochIterator

    from oomproof._backends.jax.host_batches import Feed, fed

    model, data = classifier(), [(np.ones((2, 8)), np.ones(2))] * 3
    others = (batch for batch in data)
    assert fed(model, others) is others
    epoch = JAXEpochIterator(np.ones((6, 8)), np.ones(6), batch_size=2)
    begun = epoch._one_batch_ahead_iterator(iter(data))
    next(begun)
    assert fed(model, begun) is begun
    fresh = epoch._one_batch_ahead_iterator(iter(data))
    assert isinstance(fed(model, fresh), Feed)
    assert fed(model, fresh) is fed(model, fresh)


def test_xla_is_told_of_the_room_there_is_where_that_is_less_than_it_thinks():
    import jax

    from oomproof._backends.jax.compiled import limited_to
    from oomproof._backends.jax.device import Room

    given, made = [jax.device_put(np.zeros(100, "int8"))], [jax.ShapeDtypeStruct((200,), "int8")]
    name = "xla_gpu_memory_limit_slop_factor"
    # Of 1300 bytes less 300 of arguments and results, 700 less 200 of results may be taken.
    assert limited_to(Room(1300, 700), given, made) == {name: 50}
    # What is on the host still has to be put on the device.
    assert limited_to(Room(1300, 700), [np.zeros(100, "int8")], made) == {name: 40}
    assert limited_to(Room(1300, 1200), given, made) == {}
    assert limited_to(Room(1300, 150), given, made) == {}


def test_programs_that_read_the_host_are_not_scheduled_for_speed():
    import jax

    from oomproof._backends.jax.compiled import scheduled_for
    from oomproof._backends.jax.host_batches import placed

    batch = np.ones((4, 8), "float32"), np.zeros(4, "int32")
    assert scheduled_for(([jax.numpy.ones(3)], placed(batch, from_host=False))) == {}
    options = scheduled_for(([jax.numpy.ones(3)], placed(batch, from_host=True)))
    assert options == {"xla_disable_hlo_passes": "latency-hiding-scheduler"}
    # A name that XLA takes.
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


def memory_with(monkeypatch, **stats):
    """The memory of a GPU whose allocator says so."""
    from oomproof._backends.jax import device

    memory = device.JaxMemory()
    monkeypatch.setattr(device.JaxMemory, "_stats", lambda self: {"bytes_limit": 1000, **stats})
    monkeypatch.setattr(device, "_GPUS", ("cpu",))
    memory._limit = 1000
    return memory


def test_what_is_free_in_several_places_is_not_promised_to_one_program(monkeypatch):
    from oomproof._backends.jax.compiled import Program
    from oomproof._backends.jax.device import NotEnoughMemoryError

    memory = memory_with(monkeypatch, bytes_in_use=100)
    assert memory.largest_block() is None
    # A part of what is free is kept back where nobody knows how it lies.
    assert 800 < memory.room(None).free < 850
    assert memory.room(500).free < 400
    memory = memory_with(monkeypatch, bytes_in_use=100, pool_bytes=1000, largest_free_block_bytes=600)
    assert memory.room(None).free == memory.largest_block() == 600
    program = Program(None, False)
    program.temporary = 500
    program.check_room(memory, None, ())
    program.temporary = 700
    with pytest.raises(NotEnoughMemoryError, match="700 B"):
        program.check_room(memory, None, ())
    # What the allocator has not taken from the device yet lies in one block.
    memory = memory_with(monkeypatch, bytes_in_use=100, pool_bytes=200, largest_free_block_bytes=60)
    program.check_room(memory, None, ())


def test_memory_that_comes_back_a_moment_later_is_waited_for(monkeypatch):
    memory = memory_with(monkeypatch)
    in_use = iter([900, 900, 200])
    monkeypatch.setattr(type(memory), "current", lambda self: next(in_use))
    assert memory.free(None, wanted=500) == 800
    # Not for ever, and not where nothing is wanted.
    monkeypatch.setattr(type(memory), "current", lambda self: 900)
    assert memory.free(None, wanted=500) == memory.free(None) == 100


def test_a_program_that_ran_out_of_memory_says_what_all_of_it_needs():
    from oomproof._backends.jax.compiled import Program
    from oomproof._backends.jax.device import JaxMemory

    program, memory = Program(None, False), JaxMemory()
    program.temporary = 700
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED") as raised, program.telling_its_needs(()):
        raise out_of_memory()
    assert memory.shortage(raised.value).needed == 700


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_on_the_host_nothing_is_proven_with_kernels_of_the_gpu(monkeypatch, precision):
    """Keras picks cuDNN's attention by the devices of the process; proofs run on the CPU whatever these are."""
    import jax
    from keras import layers
    from keras.src.backend.jax import nn

    asked, original = [], jax.nn.dot_product_attention

    def attention(*args, implementation=None, **kwargs):
        asked.append(implementation)
        return original(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(nn, "_can_use_flash_attention", lambda *_, **__: True)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    x = keras.Input((6, 8))
    attended = layers.MultiHeadAttention(2, 4, flash_attention=True, dtype=precision)(x, x)
    pooled = layers.GlobalAveragePooling1D()(attended)
    model = keras.Model(x, layers.Dense(3)(pooled))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    step = oomproof._backends.current().step(model)
    batch = np.ones((4, 6, 8), "float32"), np.zeros(4, "int32")
    step.prepare(batch, "train")
    asked.clear()
    step.step_values(batch, 2)
    assert set(asked) == {"xla"}
    asked.clear()
    step.probe(batch, 4, "train") if precision == "float32" else None
    assert ("cudnn" in asked) == (precision == "float32")
