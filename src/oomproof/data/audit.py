"""`oomproof.data.audit`: what a data pipeline will hold in memory, before it runs."""

from __future__ import annotations

from typing import Any

from oomproof.data.audit_record import DataAudit


def audit(data: Any, *, batch_size: int | None = None) -> DataAudit:
    """Says what a data pipeline will hold in memory, stage by stage, and what could be better.

    Nothing is trained. A few elements are made where shapes do not tell their size.

    Args:
        data: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, NumPy arrays as they are given to
            `fit` (one, or a tuple, list or dict of them), or a Python generator.
        batch_size: Samples in a batch, for arrays (32 by default, as in Keras). A `tf.data.Dataset` that is not batched
            is looked at as if it were batched by this.

    Returns:
        A `DataAudit`. It prints itself.
    """
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"Expected `batch_size` to be a positive int or None. Received: batch_size={batch_size!r}")
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(data).__mro__}
    if any(kind.startswith("tensorflow.python.data.ops.dataset_ops.Dataset") for kind in kinds):
        from oomproof.data.audit_tf import audit_tf

        return audit_tf(data, batch_size, False)
    raise TypeError(
        "Expected a tf.data.Dataset, a keras.utils.PyDataset, a torch DataLoader, NumPy arrays or a generator. "
        f"Received: data={data!r} (of type {type(data).__name__})"
    )
