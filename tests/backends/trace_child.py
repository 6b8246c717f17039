"""What real steps of plain `fit` take from TensorFlow's own allocator on a CPU, as one JSON line: {model: figures}.

    python trace_child.py MODEL...
    python trace_child.py --events MODEL      what the allocator was asked for and did, from the model's making on

Two figures each: the bytes that were asked for when they were most, and the peak the allocator reports, which counts
the blocks it gave for them. One thread starts all ops, as on a GPU, so that the order is always the same. Each model
has a process and so an allocator of its own; TensorFlow is imported once, before they part.
"""

import glob
import json
import os
import sys
import tempfile

os.environ |= {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "8000",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

import keras
import tensorflow as tf
from keras import tree
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from trace_models import MODELS


class SecondStep(keras.callbacks.Callback):
    """Profiles the second step: in the first, variables may be made."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            tf.config.experimental.reset_memory_stats("CPU:0")
            tf.profiler.experimental.start(self.folder)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            tf.profiler.experimental.stop()


def one_region():
    """Has the allocator take one region for everything. Returns what to keep for that, and the bytes it counts."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    # What is left of the small region the allocator begins with is kept out of the way. A large one, asked for once and
    # given back, stays the allocator's: one region for everything, as it has on a GPU.
    rest = tf.raw_ops.Empty(shape=[300_000], dtype=tf.float32)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    region = tf.raw_ops.Empty(shape=[2**30], dtype=tf.float32)
    del region
    return rest, before


def batches_for(batch, data):
    def tensor(kind):
        shape, high = (batch, *kind.shape), kind.below
        return tf.random.uniform(shape, maxval=high, dtype=tf.int32) if high else tf.random.uniform(shape)

    # A batch that is prepared ahead of its step would not be seen as part of it.
    options = tf.data.Options()
    options.autotune.enabled = options.experimental_optimization.apply_default_optimizations = False
    made = tf.data.Dataset.range(2).map(lambda _: tree.map_structure(tensor, data))
    return made.with_options(options)


def measured(name):
    rest, before = one_region()
    model, batch, data = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:
        second = SecondStep(folder)
        model.fit(batches_for(batch, data), verbose=0, callbacks=[second])
        variables = model.variables + model.optimizer.variables + model.metrics_variables
        kept = sum(tf.size(v.value).numpy() * v.value.dtype.size for v in variables)
        del rest
        return {"asked for": int(kept + most_asked_for(folder)), "peak": second.peak - before}


def events_of(name):
    """[address, bytes asked for (0 where it is given back), bytes in use after it] for all it did, in order."""
    rest, before = one_region()
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        model, batch, data = MODELS[name]()
        model.fit(batches_for(batch, data), verbose=0)
        tf.profiler.experimental.stop()
        found = profiled(folder)
    del rest
    return [
        [event["addr"], event["requested_bytes"] if sign > 0 else 0, event["bytes_allocated"] - before]
        for sign, event in found
    ]


def most_asked_for(folder):
    now = most = 0
    for sign, event in profiled(folder):
        now += sign * event["requested_bytes"]
        most = max(most, now)
    return most


def profiled(folder):
    """(1 or -1, what is known of it) for every block that was handed out or given back, in order."""
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    space = xplane_pb2.XSpace()
    with open(path, "rb") as file:
        space.ParseFromString(file.read())
    events = []
    for plane in space.planes:
        names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
        stats = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if names[event.metadata_id] in ("MemoryAllocation", "MemoryDeallocation"):
                    found = {stats[s.metadata_id]: getattr(s, s.WhichOneof("value")) for s in event.stats}
                    sign = 1 if names[event.metadata_id] == "MemoryAllocation" else -1
                    events.append((line.timestamp_ns * 1000 + event.offset_ps, sign, found))
    return [(sign, found) for _, sign, found in sorted(events, key=lambda event: event[0])]


def in_a_process(function, *args):
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            with os.fdopen(writing, "w") as answer:
                json.dump(function(*args), answer)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return json.loads(answer.read() or "null")


def main(*names):
    if names[0] == "--events":
        print(json.dumps(in_a_process(events_of, names[1])))
    else:
        print(json.dumps({name: in_a_process(measured, name) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
