"""`oomproof.data.audit`: how much memory a data pipeline holds, before it runs."""

from __future__ import annotations

import types
from typing import Any

from oomproof._compat.names import TF_DATASET
from oomproof._machine import gpus
from oomproof.data.audit_record import DataAudit


def audit(data: Any, *, batch_size: int | None = None) -> DataAudit:
    """Reports how much memory a data pipeline holds, stage by stage, and what could be better.

    Nothing is trained. Where shapes do not tell the size of an element, a few are produced.

    Args:
        data: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, arrays as for `fit` (one, or a
            tuple, list or dict of them), a Python generator, or a function that returns one of these. A generator is
            not advanced, since what it yields would be lost; pass a function that returns one to measure a batch.
        batch_size: Samples in a batch, for arrays (32 by default, as in Keras) and for a `tf.data.Dataset` without
            batches.

    Returns:
        A `DataAudit`. Print it, or read its fields.
    """
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"Expected `batch_size` to be a positive int or None. Received: batch_size={batch_size!r}")
    fresh = _is_function(data)
    if fresh:
        data = data()
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(data).__mro__}
    if TF_DATASET in kinds:
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
