"""Reading the next batch, which is not part of a step: what fails here has not failed there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keras import tree


def pulled(iterator: Iterator[Any]) -> Any:
    """The next batch. An error while it is read says that it is none of a training step."""
    try:
        return next(iterator)
    except StopIteration:
        raise
    except Exception as error:
        error.add_note(
            "oomproof: this was raised while the next batch was read from the data, not by a training step; "
            "the model is as it was after the last finished batch."
        )
        raise


def samples_in(data: Any) -> int:
    """Samples in every tensor of the data, or a ValueError where they differ."""
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    sizes = {leaf.shape[0] for leaf in leaves if len(leaf.shape)}
    if len(sizes) != 1 or None in sizes or any(len(leaf.shape) == 0 for leaf in leaves):
        raise ValueError(
            "Expected every tensor in `data` to have the same known number of samples in its first dimension. "
            f"Received shapes: {[tuple(leaf.shape) for leaf in leaves]}"
        )
    return int(sizes.pop())


def batch_size_of(x: Any) -> int | None:
    """The batch size `fit` will use for this data when none is given, or `None` when it is not known yet."""
    if hasattr(x, "element_spec"):  # A tf.data dataset, which Keras takes on every backend.
        leaf = next(iter(tree.flatten(x.element_spec)), None)
        return leaf.shape[0] if leaf is not None and leaf.shape.rank else None
    if hasattr(x, "batch_sampler"):  # A torch DataLoader, likewise.
        return None if x.batch_size is None else int(x.batch_size)
    if all(hasattr(leaf, "shape") for leaf in tree.flatten(x)) and not hasattr(x, "__next__"):
        return 32  # What Keras takes for arrays.
    return None
