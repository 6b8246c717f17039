"""`oomproof.data.tune`: the same pipeline within a RAM budget."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from oomproof._compat.names import TF_DATASET
from oomproof._machine import host
from oomproof._records.record import Record
from oomproof._records.units import format_bytes, parse_budget
from oomproof.data.audit_record import DataAudit

# What is free is not all for the data: the model's own copies, Python and the page cache live there too.
_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Tuning(Record):
    """What `tune` did to a pipeline: the attribute `tuning` of the dataset it returns.

    Attributes:
        budget: RAM budget in bytes.
        before: The audit of the pipeline as it was.
        after: The audit of the new one.
        changes: What was changed.
        kept: What was not changed, and why.
    """

    budget: int
    before: DataAudit
    after: DataAudit
    changes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = f"{format_bytes(self.before.host_bytes)} before, {format_bytes(self.after.host_bytes)} after"
        fits = "" if self.after.host_bytes <= self.budget else ", over the budget"
        lines = [f"tf.data: {sizes}{fits} (budget {format_bytes(self.budget)})"]
        lines += [f"  {change}" for change in self.changes or ("no changes",)]
        return "\n".join(lines + [f"  unchanged: {reason}" for reason in self.kept])


def tune(
    dataset: Any,
    *,
    budget: int | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    verbose: bool = True,
) -> Any:
    """Rebuilds a tf.data pipeline within a RAM budget, without changing what the model sees.

    The elements stay the same, one by one, also with a seed. One exception: a shuffle buffer that does not fit whatever
    else is done is made smaller, which changes the order and is reported.

    Args:
        dataset: A `tf.data.Dataset`.
        budget: RAM it may use: bytes, a size such as `"4GiB"`, or a share of the machine's, such as `"50%"`. Defaults
            to three quarters of what is free.
        cache_dir: A folder for caches that do not fit in memory. Without one, such a cache is removed where its
            elements can be computed again.
        verbose: Whether to print what was done.

    Returns:
        The new dataset. Its attribute `tuning` is a `Tuning`: audits before and after, and what was changed.
    """
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(dataset).__mro__}
    if TF_DATASET not in kinds:
        raise TypeError(f"Expected a tf.data.Dataset. Received: dataset={dataset!r} (of type {type(dataset).__name__})")
    size = parse_budget(budget, host.total())
    if size is None:
        free = host.available()
        if free is None:
            raise ValueError(
                'Expected `budget`, such as "4GiB": the amount of free RAM cannot be read here. Received: budget=None'
            )
        size = int(free * _SHARE)
    folder = None if cache_dir is None else pathlib.Path(cache_dir)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"Expected `cache_dir` to be a folder that exists. Received: cache_dir={cache_dir!r}")
    from oomproof.data.pipelines.tf_tune import tuned

    result, tuning = tuned(dataset, size, folder)
    if verbose:
        print(tuning)
    return result
