"""Failures as frameworks write them, for the tests of `explain`. One for each cause."""

TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of "
    "which {free} is free. {others}Including non-PyTorch memory, this process has {own} memory in use. Of the "
    "allocated memory {used} is allocated by PyTorch, and {loose} is reserved by PyTorch but unallocated.\n"
)


def torch_text(
    asked="2.00 GiB",
    total="23.69 GiB",
    free="512.00 MiB",
    others="",
    own="23.15 GiB",
    used="22.60 GiB",
    loose="110.50 MiB",
):
    return TORCH.format(asked=asked, total=total, free=free, others=others, own=own, used=used, loose=loose)


BFC = """W tensorflow/core/common_runtime/bfc_allocator.cc:479] Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.50GiB (rounded to 1610612736)requested by op gradient_tape/model/dense_7/MatMul/MatMul_1
If the cause is memory fragmentation maybe the environment variable 'TF_GPU_ALLOCATOR=cuda_malloc_async' will improve the situation.
I tensorflow/core/common_runtime/bfc_allocator.cc:1034] BFCAllocator dump for GPU_0_bfc
I tensorflow/core/common_runtime/bfc_allocator.cc:1090] Free  at 7f2300000000 of size {free} next 6
I tensorflow/core/common_runtime/bfc_allocator.cc:1105] total_region_allocated_bytes_: {region} memory_limit_: 14000000000 available bytes: 0 curr_region_allocation_bytes_: 28000000000
I tensorflow/core/common_runtime/bfc_allocator.cc:1111] Stats:
Limit:                     14000000000
InUse:                     {in_use}
MaxInUse:                  13900000000
LargestFreeBlock:                    0

ResourceExhaustedError: OOM when allocating tensor with shape[16384,24576] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc
\t [[{{{{node gradient_tape/model/dense_7/MatMul/MatMul_1}}}}]]
"""  # noqa: E501

BY_CAUSE = {
    "too-big-single-tensor": torch_text(asked="149.01 GiB", free="22.40 GiB", own="1.27 GiB", used="0.90 GiB"),
    "steady-exhaustion": BFC.format(free=104857600, region=14000000000, in_use=13895142400),
    "fragmentation": BFC.format(free=1400000000, region=14000000000, in_use=8804682956),
    "held-elsewhere": torch_text(others="Process 3391 has 15.50 GiB memory in use. ", own="7.00 GiB", used="6.20 GiB"),
    "leak-over-time": "".join(f"step {50 * step} | loss 0.5 | mem {4 + 0.5 * step:.2f} GB\n" for step in range(1, 37))
    + torch_text(asked="64.00 MiB"),
    "hidden-oom": "E cuda_dnn.cc:328] Could not create cudnn handle: CUDNN_STATUS_ALLOC_FAILED\n"
    "UnknownError: Failed to get convolution algorithm. This is probably because cuDNN failed to initialize\n"
    "\t [[node model_1/conv1/Conv2D (defined at train.py:551) ]]\n",
    "host-ram": "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 36.5 GiB for an array with shape "
    "(70000, 70000) and data type float64\n",
    "shm": "RuntimeError: DataLoader worker (pid 4161) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.\n",
    "not-memory": "ResourceExhaustedError: ckpt-10.data-00000-of-00001; No space left on device [Op:SaveV2]\n",
}
