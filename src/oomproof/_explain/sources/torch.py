"""PyTorch: the caching allocator's message in its old and new wording, CPUs, MPS, XPU, HIP."""

from __future__ import annotations

from oomproof._explain.pattern import Pattern

_SIZE = r"[\d.]+ ?[KMGT]?i?(?:B|bytes)"

PATTERNS = (
    Pattern(
        "torch-xpu-device-memory",
        "failure",
        "ur_result_error_out_of",
        r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY|UR_RESULT_ERROR_OUT_OF_RESOURCES",
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "torch",
        sure=0.8,
    ),
    Pattern(
        "vllm-no-room",
        "failure",
        "no available memory for the cache blocks",
        r"No available memory for the cache blocks",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        "torch",
        sure=0.8,
    ),
    Pattern(
        "vllm-card-held",
        "failure",
        "less than desired gpu memory utilization",
        r"Free memory on device .{0,120}is less than desired GPU memory utilization",
        "ValueError: Free memory on device (3.20/23.69 GiB) on startup is less than desired GPU memory utilization (0.9)",
        "torch",
        cause="held-elsewhere",
        sure=0.85,
    ),
    Pattern(
        "torch-cuda",
        "failure",
        "out of memory. tried to allocate",
        rf"(?:CUDA|HIP|XPU|NPU|ROCm|Vulkan|device)? ?out of memory\. Tried to allocate (?P<size>{_SIZE})",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.78 GiB "
        "of which 1.20 GiB is free.",
        "torch",
        sure=0.95,
    ),
    Pattern(
        "torch-mps",
        "failure",
        "mps backend out of memory",
        rf"MPS backend out of memory \(MPS allocated: (?P<allocated>{_SIZE}), other allocations: "
        rf"(?P<other_process>{_SIZE}), max allowed: (?P<total>{_SIZE})\)\. Tried to allocate (?P<size>{_SIZE})",
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.03 GB, other allocations: 1.08 GB, max allowed: "
        "18.13 GB). Tried to allocate 256.00 MB on private pool.",
        "torch",
        sure=0.95,
    ),
    Pattern(
        "torch-mps-bare",
        "failure",
        "mps backend|mps: out|kiogpucommandbuffer|insufficient memory",
        r"MPS backend out of memory|MPS: out of memory|kIOGPUCommandBufferCallbackErrorOutOfMemory|"
        r"MPS.{0,60}Insufficient Memory",
        "Error: command buffer exited with error status. Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory) MPS",
        "torch",
        sure=0.85,
    ),
    Pattern(
        "metal-buffer",
        "failure",
        "invalid buffer size",
        r"Invalid buffer size: (?P<size>[\d.]+ ?[KMGT]?i?B)",
        "RuntimeError: Invalid buffer size: 24.00 GB",
        "torch",
        cause="too-big-single-tensor",
        sure=0.85,
    ),
    Pattern(
        "torch-cpu",
        "failure",
        "defaultcpuallocator",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (?P<bytes>\d+) bytes",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 34359738368 bytes. Error code 12 (Cannot allocate memory)",
        "torch",
        "host",
        sure=0.97,
    ),
    Pattern(
        "torch-cpu-old",
        "failure",
        "buy new ram",
        r"you tried to allocate (?P<size>[\d.]+ ?[KMGT]?i?B)\. Buy new RAM",
        "RuntimeError: $ Torch: not enough memory: you tried to allocate 12GB. Buy new RAM!",
        "torch",
        "host",
        sure=0.97,
    ),
    Pattern(
        "torch-cpu-bare",
        "failure",
        "defaultcpuallocator",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        "DefaultCPUAllocator: can't allocate memory",
        "torch",
        "host",
        sure=0.97,
    ),
    Pattern(
        "torch-pinned",
        "failure",
        "out of memory",
        r"(?:pin_memory|pinned|cudaHostAlloc|CachingHostAllocator).{0,120}out of memory",
        "RuntimeError: Caught RuntimeError in pin memory thread: cudaHostAlloc: CUDA error: out of memory",
        "torch",
        "host",
        cause="host-ram",
        sure=0.6,
    ),
    Pattern(
        "torch-cuda-error",
        "failure",
        "out of memory",
        r"(?:CUDA|HIP) (?:runtime )?error ?(?:\(2\))? ?:? ?(?:hipErrorOutOfMemory|out of memory)|"
        r"cuda runtime error \(2\) ?: ?out of memory|CUDA driver error: out of memory",
        "RuntimeError: CUDA error: out of memory",
        "torch",
        sure=0.6,
    ),
    Pattern(
        "torch-out-of-memory-error",
        "failure",
        "out of memory|cuda oom",
        r"(?:torch\.\S*|(?<![\w.]))OutOfMemoryError: .{0,40}out of memory|CUDA out of memory|CUDA OOM\b",
        "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "torch",
        sure=0.75,
    ),
    Pattern(
        "directml",
        "failure",
        "gpu video memory",
        r"Could not allocate tensor with (?P<bytes>\d+) bytes\. There is not enough GPU video memory",
        "RuntimeError: Could not allocate tensor with 67108864 bytes. There is not enough GPU video memory available!",
        "torch",
        sure=0.9,
    ),
    Pattern(
        "torch-allowed",
        "detail",
        " allowed",
        rf"(?P<limit>{_SIZE}) allowed",
        "(GPU 0; 23.69 GiB total capacity; 1.00 GiB already allocated; 22.00 GiB free; 2.37 GiB allowed; 1.10 GiB reserved",
    ),
    Pattern(
        "torch-capacity",
        "detail",
        "total capac",
        rf"GPU \d+ has a total capaci?ty of (?P<total>{_SIZE}) of which (?P<free>{_SIZE}) is free",
        "GPU 0 has a total capacty of 15.78 GiB of which 1.20 GiB is free.",
    ),
    Pattern(
        "torch-old-capacity",
        "detail",
        "total capacity;",
        rf"\(GPU \d+; (?P<total>{_SIZE}) total capacity; (?P<allocated>{_SIZE}) already allocated; (?P<free>{_SIZE}) free"
        rf"(?:; {_SIZE} allowed)?(?:; (?P<reserved>{_SIZE}) (?:reserved in total by PyTorch|cached))?",
        "(GPU 0; 15.78 GiB total capacity; 13.10 GiB already allocated; 1.20 GiB free; 13.90 GiB reserved in total by "
        "PyTorch)",
    ),
    Pattern(
        "torch-this-process",
        "detail",
        "this process has",
        rf"this process has (?P<this_process>{_SIZE}) memory in use",
        "Including non-PyTorch memory, this process has 16.51 GiB memory in use.",
    ),
    Pattern(
        "torch-allocated",
        "detail",
        "is allocated by pytorch",
        rf"Of the allocated memory (?P<allocated>{_SIZE}) is allocated by PyTorch"
        rf"(?:.{{0,90}}? and (?P<unallocated>{_SIZE}) is reserved by PyTorch but unallocated)?",
        "Of the allocated memory 15.20 GiB is allocated by PyTorch, and 612.00 MiB is reserved by PyTorch but unallocated.",
    ),
)
