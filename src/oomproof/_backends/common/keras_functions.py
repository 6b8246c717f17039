"""Where Keras calls a step, and what it is given: what is the same on every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keras import tree

from oomproof._backends.common.model import overrides
from oomproof._records.run import Phase

FUNCTIONS: dict[Phase, str] = {"train": "train_function", "test": "test_function", "predict": "predict_function"}


def put_in_place(model: Any, adapters: Mapping[Phase, Callable[..., Any]], *arguments: Any) -> list[Phase]:
    """Puts `adapter(model, *arguments, phase, …)` where Keras looks for its functions. Returns the phases it took."""
    taken: list[Phase] = []
    for phase, function in FUNCTIONS.items():
        # A step of the user's own is left to Keras; only train_step is refused (check_model).
        if not overrides(model, f"{phase}_step"):
            # Not through Keras's __setattr__, which would track what it is given.
            object.__setattr__(model, function, functools.partial(adapters[phase], model, *arguments, phase))
            taken.append(phase)
    return taken


def taken_away(model: Any) -> None:
    """Leaves Keras to make its own functions again."""
    for function in FUNCTIONS.values():
        if isinstance(getattr(model, function, None), functools.partial):
            object.__setattr__(model, function, None)


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
