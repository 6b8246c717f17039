"""What the demo trains: a small convolutional network that tells the pitch of sound clips of uneven length.

Most clips are short and a few are long, and every batch is padded to its longest clip. So the first batches need
little memory, and one that needs too much comes in the middle of an epoch, as happens with real recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLIPS = 2000
EPOCHS = 3
PITCHES = 8
SEED = 7

SHORT = (200, 400)
LONG = 2048
_SHARE_OF_LONG_CLIPS = 0.003


class Clips:
    """Clips kept in NumPy, outside of TensorFlow's allocator, and handed out in batches in a fixed order."""

    def __init__(self) -> None:
        rng = np.random.default_rng(SEED)
        is_long = rng.random(CLIPS) < _SHARE_OF_LONG_CLIPS
        lengths = np.where(is_long, LONG, rng.integers(*SHORT, size=CLIPS))
        self.pitches = rng.integers(PITCHES, size=CLIPS)
        self.clips = [
            (np.sin(np.arange(length) * (0.2 + 0.1 * pitch)) + rng.normal(size=length)).astype("float32")
            for length, pitch in zip(lengths, self.pitches, strict=True)
        ]
        self.handed_out: list[range] = []

    def batches(self, batch_size: int) -> Any:
        """A `tf.data.Dataset` of (padded clips, pitches). `handed_out` lists the clips of this epoch's batches."""
        import tensorflow as tf

        def one_epoch() -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
            self.handed_out = []
            for start in range(0, CLIPS, batch_size):
                batch = range(start, min(start + batch_size, CLIPS))
                self.handed_out.append(batch)
                yield self._padded(batch), self.pitches[batch.start : batch.stop]

        signature = (tf.TensorSpec((None, None, 1), tf.float32), tf.TensorSpec((None,), tf.int64))
        dataset = tf.data.Dataset.from_generator(one_epoch, output_signature=signature)
        # Without it plain Keras finds the end of an epoch by a step that fails, and counts that step in `iterations`.
        return dataset.apply(tf.data.experimental.assert_cardinality(-(-CLIPS // batch_size)))

    def _padded(self, batch: range) -> NDArray[np.float32]:
        padded = np.zeros((len(batch), max(len(self.clips[i]) for i in batch), 1), "float32")
        for row, i in enumerate(batch):
            padded[row, : len(self.clips[i]), 0] = self.clips[i]
        return padded


def build_model() -> Any:
    """The same initial weights every time. LayerNormalization looks at one sample, so it can be split exactly."""
    import keras

    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    model = keras.Sequential([keras.Input((None, 1))])
    for filters, strides in ((24, 2), (24, 1), (48, 2)):
        model.add(layers.Conv1D(filters, 9, strides=strides, padding="same"))
        model.add(layers.LayerNormalization())
        model.add(layers.Activation("gelu"))
    model.add(layers.GlobalAveragePooling1D())
    model.add(layers.Dense(PITCHES))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model
