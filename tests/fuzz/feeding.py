"""Random data, and the forms in which fit takes it. Scripts hold copies of what they use of this."""

import keras
import numpy as np


def words(rng, samples, steps, kinds):
    """Sequences of very different lengths, padded with zeros."""
    lengths = rng.integers(1, steps + 1, samples)
    return np.where(np.arange(steps) < lengths[:, None], rng.integers(1, kinds, (samples, steps)), 0).astype("int32")


def numbers(rng, *shape, calm=False):
    """Normal numbers; `calm` ones are small in the first samples, so that those say little of the others."""
    found = rng.normal(size=shape)
    if calm:
        found[:4] *= 0.1
        found[4:] *= 2.0
    return found


def series(rng, samples, steps, width):
    """Numbers whose last steps are zero, for Masking."""
    found = rng.normal(size=(samples, steps, width))
    lengths = rng.integers(1, steps + 1, samples)
    found[np.arange(steps) >= lengths[:, None]] = 0.0
    return found


def weights(rng, kind, shape):
    """One weight for each sample, or where there are steps or pixels one for each of them; some are zero."""
    shape = shape[:-1] if len(shape) > 2 else shape[:1]
    found = rng.uniform(0.1, 2.0, shape)
    return np.where(rng.uniform(size=shape) < 0.15, 0.0, found)


def targets(rng, kind, shape):
    """Targets of a kind for predictions of a shape."""
    if kind == "classes":
        return rng.integers(0, shape[-1], shape[:-1])
    if kind == "onehot":
        return np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]
    if kind == "binary":
        return rng.integers(0, 2, shape).astype("float64")
    return rng.normal(size=shape)


class Batches(keras.utils.PyDataset):
    """Data as Keras's own kind of sequence."""

    def __init__(self, arrays, size):
        super().__init__()
        self.arrays, self.size = arrays, size

    def __len__(self):
        return -(-len(keras.tree.flatten(self.arrays)[0]) // self.size)

    def __getitem__(self, index):
        start = index * self.size
        return keras.tree.map_structure(lambda a: a[start : start + self.size], self.arrays)


def fed(form, arrays, batch):
    """Arguments of fit that feed these arrays (x, y and perhaps weights) in a form."""
    if form == "arrays":
        return dict(zip(("x", "y", "sample_weight"), arrays, strict=False)) | {"batch_size": batch}
    batches = Batches(as_tuples(arrays), batch)
    if form == "generator":
        return {"x": (batches[i % len(batches)] for i in range(10**6)), "steps_per_epoch": len(batches)}
    if form == "dataset":
        import tensorflow as tf

        return {"x": tf.data.Dataset.from_tensor_slices(as_tuples(arrays)).batch(batch)}
    return {"x": batches}


def as_tuples(arrays):
    """tf.data makes one tensor of a list, and Keras takes no lists from generators on TensorFlow."""
    if isinstance(arrays, list | tuple):
        return tuple(as_tuples(each) for each in arrays)
    return {k: as_tuples(v) for k, v in arrays.items()} if isinstance(arrays, dict) else arrays


def output_shapes(build, x):
    """Shapes of what a model makes of these inputs, one after the other."""
    keras.utils.set_random_seed(1)
    return [tuple(each.shape) for each in keras.tree.flatten(build()(x))]
