"""GPUs that XLA can compile for without having one: the facts it asks a device for, by compute capability.

What a program needs depends on the architecture, hardly on the model of card: the numbers of a well-known card stand
for all of an architecture. How much memory the card has decides whether XLA starts to recompute in order to save some,
so that can be set.
"""

from __future__ import annotations

import dataclasses

from oomproof.errors import BackendError

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """A card that stands for its architecture.

    Attributes:
        card: Its name.
        cores: Streaming multiprocessors.
        units: Single-precision units of each.
        threads: Threads each can hold.
        shared: Bytes of shared memory of each, and how many of them one block may ask for.
        cache: Bytes of second-level cache.
        bandwidth: Of its memory, in bytes a second.
        clock: In GHz.
        memory: Bytes.
    """

    card: str
    cores: int
    units: int
    threads: int
    shared: tuple[int, int]
    cache: int
    bandwidth: float
    clock: float
    memory: int


# From NVIDIA's data sheets and the table of technical specifications per compute capability.
ARCHITECTURES: dict[tuple[int, int], Architecture] = {
    (7, 5): Architecture("T4", 40, 64, 1024, (64 * _KIB, 64 * _KIB), 4 * _MIB, 320e9, 1.59, 16 * _GIB),
    (8, 0): Architecture("A100", 108, 64, 2048, (164 * _KIB, 163 * _KIB), 40 * _MIB, 2039e9, 1.41, 80 * _GIB),
    (8, 6): Architecture("RTX 3090", 82, 128, 1536, (100 * _KIB, 99 * _KIB), 6 * _MIB, 936e9, 1.70, 24 * _GIB),
    (8, 9): Architecture("RTX 4090", 128, 128, 1536, (100 * _KIB, 99 * _KIB), 72 * _MIB, 1008e9, 2.52, 24 * _GIB),
    (9, 0): Architecture("H100", 132, 128, 2048, (228 * _KIB, 227 * _KIB), 50 * _MIB, 3352e9, 1.98, 80 * _GIB),
    (10, 0): Architecture("B200", 148, 128, 2048, (228 * _KIB, 227 * _KIB), 126 * _MIB, 7672e9, 1.96, 180 * _GIB),
    (12, 0): Architecture("RTX 5090", 170, 128, 1536, (100 * _KIB, 99 * _KIB), 96 * _MIB, 1792e9, 2.41, 32 * _GIB),
}
# Which cuDNN XLA may count on. It decides between kernels that all versions in use have.
_CUDNN = (9, 10)


def target_config(capability: tuple[int, int], memory: int | None = None) -> str:
    """XLA's description of a GPU, as it reads it.

    Args:
        capability: Compute capability, such as `(8, 0)`.
        memory: Bytes the card has; those of a well-known card when not given.

    Raises:
        BackendError: For an architecture that is not in the table.
    """
    known = ARCHITECTURES.get(capability)
    if known is None:
        have = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise BackendError(
            f"No description of a GPU with compute capability {capability[0]}.{capability[1]} is known to compile for. "
            f"There is one for {have}."
        )
    facts = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIB,
        "shared_memory_per_block_optin": known.shared[1],
        "shared_memory_per_core": known.shared[0],
        "threads_per_core_limit": known.threads,
        "core_count": known.cores,
        "fpus_per_core": known.units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(known.bandwidth),
        "l2_cache_size": known.cache,
        "clock_rate_ghz": known.clock,
        "device_memory_size": memory or known.memory,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in facts.items())
    major, minor = capability
    return f"""\
gpu_device_info {{
{lines}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}
device_description_str: "{known.card}"
"""
