"""What to do about it, most effective first: each a line of code or a command, with the numbers where there are any.

Nothing of a log but numbers comes into these lines, since they are made to be copied into a shell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from oomproof._records.units import DTYPE_BYTES, format_bytes

_GUARD = "oomproof.guard(model)  # runs each batch in pieces that fit; batch size and result stay the same"
_HALF = 'keras.mixed_precision.set_global_policy("mixed_bfloat16")  # activations take about half'
_WHO = "nvidia-smi --query-compute-apps=pid,used_memory,process_name --format=csv  # processes on the card"
# A first dimension beyond this is hardly a batch.
_LARGEST_BATCH = 8192
_ESTIMATE = "print(oomproof.estimate(model, batch_size))  # memory by layer, before anything runs"
_PLAN = "print(oomproof.plan(model, batch_size))  # ways to fit, and what each costs"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What fixes depend on."""

    cause: str
    raised_by: str
    memory: str
    topic: str
    requested: int | None
    shape: tuple[int, ...] | None
    dtype: str | None
    numbers: Mapping[str, int]
    others: Mapping[int, int]


def fixes_for(facts: Facts) -> tuple[str, ...]:
    """The fixes, most effective first."""
    if facts.cause == "not-memory":
        return _NOT_MEMORY.get(facts.topic, ())
    if facts.cause == "unknown" and facts.memory == "other":
        return ("model.compile(..., jit_compile=False)  # the kernel needs more on-chip memory than there is",)
    return _BY_CAUSE[facts.cause](facts)


def _pieces(facts: Facts) -> str:
    """The call with a size of pieces, where asked and free are known."""
    free = facts.numbers.get("free")
    limit, in_use = facts.numbers.get("limit"), facts.numbers.get("in_use")
    if limit is not None and in_use is not None:
        free = max(limit - in_use, 0)
    if not facts.requested or not free or free >= facts.requested:
        return _GUARD
    # What fails is the last straw: the other tensors of the step shrink with it, so this is enough and to spare.
    pieces = 2
    while pieces * free < facts.requested:
        pieces *= 2
    why = f"{format_bytes(facts.requested)} requested, {format_bytes(free)} free: {pieces} pieces"
    batch = facts.shape[0] if facts.shape else 0
    if pieces <= batch <= _LARGEST_BATCH:
        return (
            f"oomproof.fit(model, x, y, batch_size={batch}, micro_batch_size={batch // pieces})"
            f"  # {why}, if {batch} is the batch"
        )
    return f"{_GUARD} ({why})"


def _steady(facts: Facts) -> tuple[str, ...]:
    found = [_pieces(facts), _PLAN, _HALF]
    if facts.raised_by == "torch":
        found.append(_conf("blocks that can grow"))
    if facts.raised_by in ("jax", "xla"):
        found.append("XLA_PYTHON_CLIENT_MEM_FRACTION=.92 python train.py  # JAX uses 75 % of the card by default")
    return tuple(found)


def _conf(why: str) -> str:
    return f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py  # {why}"


def _too_big(facts: Facts) -> tuple[str, ...]:
    found = [_pieces(facts)]
    if facts.shape:
        found.append(f"print(model.summary())  # look for the layer that makes a tensor of shape {facts.shape}")
    return (*found, _ESTIMATE, _HALF)


def _fragmentation(facts: Facts) -> tuple[str, ...]:
    if facts.raised_by == "torch":
        unused = facts.numbers.get("unallocated")
        why = "lets blocks grow" + ("" if unused is None else f": {format_bytes(unused)} are reserved but fragmented")
        return _conf(why), "torch.cuda.empty_cache()  # between phases whose sizes differ", _GUARD
    if facts.raised_by in ("jax", "xla"):
        first = "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async python train.py  # the driver's own pool"
    else:
        first = "TF_GPU_ALLOCATOR=cuda_malloc_async python train.py  # the driver's own pool"
    return (
        first,
        "dataset.padded_batch(batch_size, padded_shapes=..., drop_remainder=True)  # constant shapes",
        _GUARD,
    )


def _held(facts: Facts) -> tuple[str, ...]:
    found = [
        f"ps -fp {pid}  # holds {format_bytes(size)}; stop it if it is yours"
        for pid, size in sorted(facts.others.items(), key=lambda item: -item[1])[:2]
    ]
    found += [_WHO, "CUDA_VISIBLE_DEVICES=1 python train.py  # another card, if there is one"]
    if facts.raised_by in ("jax", "xla"):
        found.append("XLA_PYTHON_CLIENT_PREALLOCATE=false python train.py  # do not take 75 % of the card at once")
    elif facts.raised_by != "torch":
        found.append("TF_FORCE_GPU_ALLOW_GROWTH=true python train.py  # do not take the whole card at once")
    return (*found, 'oomproof.guard(model, budget="90%")  # stays within what is left')


def _leak(facts: Facts) -> tuple[str, ...]:
    keep = "total += float(loss)  # keep numbers, not tensors: a tensor keeps the whole step alive"
    if facts.memory == "host":
        return (
            keep,
            "python -X tracemalloc=10 train.py  # then tracemalloc.take_snapshot() shows what grows",
            "dataset.shuffle(1000)  # a smaller buffer, and no .cache() of data that does not fit",
        )
    if facts.raised_by == "torch":
        more = "print(torch.cuda.memory_summary())  # every few hundred steps: what grows?"
    elif facts.raised_by in ("jax", "xla"):
        more = 'jax.profiler.save_device_memory_profile("memory.prof")  # every few hundred steps: what grows?'
    else:
        more = 'print(tf.config.experimental.get_memory_info("GPU:0"))  # every epoch: what grows?'
    return (
        keep,
        "keras.backend.clear_session()  # between models that are built in a loop",
        more,
        "oomproof.guard(model)  # runs batches in pieces that fit while you look for the leak",
    )


def _hidden(facts: Facts) -> tuple[str, ...]:
    if facts.raised_by == "nccl":
        return (_WHO, _GUARD, "NCCL_BUFFSIZE=1048576 torchrun train.py  # smaller buffers")
    growth = {
        "torch": "torch.cuda.set_per_process_memory_fraction(0.9)  # leaves room for cuDNN and cuBLAS",
        "jax": "XLA_PYTHON_CLIENT_MEM_FRACTION=.7 python train.py  # leaves room for cuDNN and cuBLAS",
    }.get(facts.raised_by, "TF_FORCE_GPU_ALLOW_GROWTH=true python train.py  # leaves room for cuDNN and cuBLAS")
    return growth, _WHO, _GUARD


def _host(facts: Facts) -> tuple[str, ...]:
    found = []
    if facts.dtype == "float64" and facts.requested:
        half = format_bytes(facts.requested * DTYPE_BYTES["float32"] / DTYPE_BYTES["float64"])
        found.append(f'array.astype("float32")  # or read it as float32: {half} instead')
    if facts.raised_by == "dataloader":
        found.append("DataLoader(..., num_workers=2)  # each worker has a copy of the dataset")
    found += [
        'np.load("data.npy", mmap_mode="r")  # or a keras.utils.PyDataset: read what a batch needs, not everything',
        "dataset.shuffle(1000).prefetch(2)  # shuffle and prefetch buffers hold whole samples",
    ]
    if facts.raised_by == "kernel":
        found += [
            "dmesg -T | grep -i 'killed process'  # was it the OOM killer, and how large was the process?",
            "cat /sys/fs/cgroup/memory.max  # the container's limit; docker run --memory=64g, or Slurm's --mem=64G",
        ]
    else:
        found.append("free -h  # free memory; oomproof doctor also shows container limits")
    return tuple(found)


def _shm(facts: Facts) -> tuple[str, ...]:
    size = "8g"
    return (
        f"docker run --shm-size={size} ...  # containers default to 64 MB; or --ipc=host",
        f"mount -o remount,size={size.upper()} /dev/shm  # outside of containers, as root",
        "NCCL_SHM_DISABLE=1 torchrun train.py  # slower, without shared memory"
        if facts.raised_by == "nccl"
        else "DataLoader(..., num_workers=0)  # no workers, no shared memory",
        "df -h /dev/shm  # how full it is; earlier runs may have left files",
    )


def _unknown(facts: Facts) -> tuple[str, ...]:
    return _GUARD, _ESTIMATE, _WHO


_BY_CAUSE: dict[str, Callable[[Facts], tuple[str, ...]]] = {
    "steady-exhaustion": _steady,
    "too-big-single-tensor": _too_big,
    "fragmentation": _fragmentation,
    "held-elsewhere": _held,
    "leak-over-time": _leak,
    "hidden-oom": _hidden,
    "host-ram": _host,
    "shm": _shm,
    "unknown": _unknown,
}
_NOT_MEMORY = {
    "disk": ("df -h . /tmp  # which disk is full; df -i for the number of files", "TMPDIR=/elsewhere python train.py"),
    "files": (
        "ulimit -n 65536  # more open files",
        'torch.multiprocessing.set_sharing_strategy("file_system")  # if torch workers hold them',
    ),
    "illegal": (
        "CUDA_LAUNCH_BLOCKING=1 python train.py  # the traceback then shows the line that failed",
        "compute-sanitizer python train.py  # finds the invalid access",
    ),
    "grpc": ('options=[("grpc.max_receive_message_length", -1)]  # for grpc.insecure_channel and the server',),
    "nccl": ("NCCL_DEBUG=INFO torchrun train.py  # which rank failed first, and why",),
    "processes": ("ulimit -u  # processes and threads of this user",),
    "harmless": (),
}
