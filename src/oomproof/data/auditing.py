"""`oomproof.data.audit`: what a data pipeline will hold in memory, before it runs."""

from __future__ import annotations

import types
from typing import Any

from oomproof._machine import gpus
from oomproof.data.audit_record import DataAudit


def audit(data: Any, *, batch_size: int | None = None) -> DataAudit:
    """Says what a data pipeline will hold in memory, stage by stage, and what could be better.

    Nothing is trained. A few elements are made where shapes do not tell their size.

    Args:
        data: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, arrays as they are given to `fit`
            (one, or a tuple, list or dict of them), a Python generator, or a function that returns one of these. From a
            generator nothing is taken, since it could not be given back; from one that the function made, one batch.
        batch_size: Samples in a batch, for arrays (32 by default, as in Keras). A `tf.data.Dataset` that is not batched
            is looked at as if it were batched by this.

    Returns:
        A `DataAudit`. It prints itself.
    """
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"Expected `batch_size` to be a positive int or None. Received: batch_size={batch_size!r}")
    fresh = _is_function(data)
    if fresh:
        data = data()
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(data).__mro__}
    if "tensorflow.python.data.ops.dataset_ops.DatasetV2" in kinds:
        from oomproof.data.pipelines.tf_audit import audit_tf

        return audit_tf(data, batch_size, gpus.local() is not None)
    from oomproof.data.pipelines import arrays as audit_arrays

    if any(kind.endswith(".PyDataset") and kind.startswith("keras.") for kind in kinds):
        return audit_arrays.audit_py_dataset(data)
    if "torch.utils.data.dataloader.DataLoader" in kinds:
        return audit_arrays.audit_data_loader(data)
    if isinstance(data, types.GeneratorType):
        return audit_arrays.audit_generator(data, fresh)
    arrays = list(audit_arrays.leaves(data))
    if arrays and all(audit_arrays.is_array(each) for each in arrays):
        return audit_arrays.audit_arrays(data, batch_size)
    raise TypeError(
        "Expected a tf.data.Dataset, a keras.utils.PyDataset, a torch DataLoader, arrays, a generator, or a function "
        f"that returns one of these. Received: data={type(data).__name__}"
    )


def _is_function(data: Any) -> bool:
    """Whether it has to be called for the data."""
    return isinstance(data, types.FunctionType | types.MethodType)
