"""TensorFlow 1.x and 2.x: its errors, and what its allocator writes before them."""

from __future__ import annotations

from oomproof._explain.pattern import Pattern

_SIZE = r"[\d.]+\s?[KMGTP]?i?B"

PATTERNS = (
    Pattern(
        "tf-oom-host",
        "failure",
        "oom when allocating",
        r"OOM when allocating tensor(?: with shape ?\[(?P<shape>[\d, ]*)\])?(?: and type (?P<dtype>\w+))?.{0,200}?"
        r"(?:device:CPU:\d+|allocator (?:mkl|bfc_)?cpu)",
        "OOM when allocating tensor with shape[3072,1024] and type float on /job:localhost/replica:0/task:0/"
        "device:CPU:0 by allocator mklcpu",
        "tensorflow",
        "host",
        sure=0.95,
    ),
    Pattern(
        "tf-oom",
        "failure",
        "oom when allocating",
        r"OOM when allocating tensor(?: with shape ?\[(?P<shape>[\d, ]*)\])?(?: and type (?P<dtype>\w+))?",
        "ResourceExhaustedError: OOM when allocating tensor with shape[256,64,112,112] and type float on /job:localhost/"
        "replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
        "tensorflow",
        sure=0.95,
    ),
    Pattern(
        "tf-bfc-host",
        "failure",
        "ran out of memory trying to allocate",
        r"Allocator \((?:\w*cpu\w*|\w*host\w*)\) ran out of memory trying to allocate (?P<size>[\d.]+\s?[KMGTP]?i?B)"
        r"(?: \(rounded to (?P<bytes>\d+)\))?",
        "Allocator (bfc_cpu_allocator_for_gpu) ran out of memory trying to allocate 256.00MiB (rounded to 268435456)"
        "requested by op Fill",
        "tensorflow",
        "host",
        weight=2.5,
    ),
    Pattern(
        "jax-bfc",
        "failure",
        "ran out of memory trying to allocate",
        r"external/xla/.{0,80}Allocator \(\w+\) ran out of memory trying to allocate (?P<size>[\d.]+\s?[KMGTP]?i?B)"
        r"(?: \(rounded to (?P<bytes>\d+)\))?",
        "W external/xla/xla/tsl/framework/bfc_allocator.cc:497] Allocator (GPU_0_bfc) ran out of memory trying to "
        "allocate 2.00GiB (rounded to 2147483648)requested by op",
        "jax",
        weight=2.5,
    ),
    Pattern(
        "tf-bfc",
        "failure",
        "ran out of memory trying to allocate",
        r"ran out of memory trying to allocate (?P<size>[\d.]+\s?[KMGTP]?i?B)(?:\.|\s)*(?:\(rounded to (?P<bytes>\d+)\))?",
        "W tensorflow/core/common_runtime/bfc_allocator.cc:479] Allocator (GPU_0_bfc) ran out of memory trying to "
        "allocate 2.00GiB (rounded to 2147483648)requested by op model/conv/Conv2D",
        "tensorflow",
        weight=2.5,
    ),
    Pattern(
        "tf-dst-not-initialized",
        "hidden",
        "dst tensor is not initialized",
        r"Dst tensor is not initialized",
        "InternalError: Failed copying input tensor from CPU:0 to GPU:0 in order to run _EagerConst: Dst tensor is not "
        "initialized.",
        "tensorflow",
        cause="hidden-oom",
        sure=0.9,
    ),
    Pattern(
        "tf-src-not-initialized",
        "hidden",
        "src tensor is not initialized",
        r"Src tensor is not initialized",
        "InternalError: Src tensor is not initialized.",
        "tensorflow",
        cause="hidden-oom",
        sure=0.7,
    ),
    Pattern(
        "cuda-driver-allocation",
        "soft",
        "failed to allocate",
        r"failed to allocate (?:device memory of )?(?P<size>[\d.]+[KMGTP]?i?B?) ?\((?P<bytes>\d+) bytes\)"
        r"(?: from device)?:? ?.{0,80}?OUT_OF_MEMORY",
        "I tensorflow/stream_executor/cuda/cuda_driver.cc:732] failed to allocate 9.42G (10118955008 bytes) from device: "
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "tensorflow",
        cause="held-elsewhere",
        sure=0.75,
    ),
    Pattern(
        "pinned-host-allocation",
        "soft",
        "bytes on host",
        r"(?:failed to alloc(?:ate)?|could not allocate pinned).{0,60}?(?P<bytes>\d+) bytes on host",
        "E tensorflow/stream_executor/cuda/cuda_driver.cc:890] failed to alloc 17179869184 bytes on host: "
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "tensorflow",
        "host",
        cause="host-ram",
        sure=0.8,
    ),
    Pattern(
        "tf-pinned-host-cache",
        "failure",
        "memory trying to allocate",
        r"Allocator \((?:gpu_host_bfc|cuda_host_bfc)\) ran out of memory trying to allocate (?P<size>[\d.]+\s?[KMGTP]?i?B)",
        "Allocator (gpu_host_bfc) ran out of memory trying to allocate 1.00GiB",
        "tensorflow",
        "host",
        cause="host-ram",
    ),
    Pattern(
        "tf-context",
        "failure",
        "cuda_error_out_of_memory",
        r"(?:cuDevicePrimaryCtxRetain|cuCtxCreate|cuInit|creat\w+ context|initializ\w+ StreamExecutor|create_context|"
        r"CUDA runtime implicit initialization).{0,200}?CUDA_ERROR_OUT_OF_MEMORY",
        "failed initializing StreamExecutor for CUDA device ordinal 0: INTERNAL: failed call to "
        "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory; total memory reported: 25438126080",
        "tensorflow",
        cause="held-elsewhere",
        sure=0.85,
        weight=3.2,
    ),
    Pattern(
        "tf-context-runtime",
        "failure",
        "out of memory",
        r"(?:CUDA runtime implicit initialization on GPU:\d+ failed|cudaSetDevice\(\) on GPU:\d+ failed|"
        r"cudaGetDevice\(\) failed|failed to (?:create|get) (?:a )?(?:cuda )?context).{0,80}?out of memory",
        "InternalError: CUDA runtime implicit initialization on GPU:0 failed. Status: out of memory",
        "tensorflow",
        cause="held-elsewhere",
        sure=0.85,
    ),
    Pattern(
        "tf-memset",
        "failure",
        "cuda_error_out_of_memory",
        r"tensorflow.{0,120}CUDA_ERROR_OUT_OF_MEMORY",
        "E tensorflow/stream_executor/cuda/cuda_event.cc:29] Error polling for event status: CUDA_ERROR_OUT_OF_MEMORY",
        "tensorflow",
        sure=0.6,
        weight=2.0,
    ),
    Pattern(
        "tf-scratch",
        "failure",
        "scratch space|scratch memory|workspace memory|workspace space",
        r"Failed to allocate (?:scratch|workspace) (?:space|memory)|Failed to allocate the required.{0,40}scratch space",
        "InternalError: Failed to allocate scratch space",
        "tensorflow",
        cause="hidden-oom",
        sure=0.7,
        weight=2.4,
    ),
    Pattern(
        "tf-failed-to-allocate",
        "failure",
        "failed to allocate memory",
        r"(?:RESOURCE_EXHAUSTED|ResourceExhausted(?:Error)?|Resource exhausted).{0,120}failed to allocate memory",
        "ResourceExhaustedError: failed to allocate memory [Op:AddV2]",
        "tensorflow",
        sure=0.8,
    ),
    Pattern(
        "tf-ran-out-of-gpu-memory",
        "failure",
        "out of gpu memory",
        r"Ran out of GPU memory when allocating (?P<bytes>\d+) bytes",
        "ResourceExhaustedError: Ran out of GPU memory when allocating 134217728 bytes for",
        "tensorflow",
        sure=0.9,
    ),
    Pattern(
        "tf-node",
        "detail",
        "node",
        r"\[\[\{?\{?node:? (?P<op>[^\s{}()=]+?)\}?\}?(?:\]\]| |\()",
        "\t [[{{node gradient_tape/functional_1/dense_2/MatMul}}]]",
    ),
    Pattern(
        "tf-detected-at-node",
        "detail",
        "detected at node",
        r"Detected at node '?(?P<op>[^\s']+)'? defined at",
        "Detected at node 'model/conv/Conv2D' defined at (most recent call last):",
    ),
    Pattern(
        "tf-caused-by-op",
        "detail",
        "caused by op",
        r"Caused by op '(?P<op>[^\s']+)'",
        "Caused by op 'loss/conv0/Conv2D', defined at:",
    ),
    Pattern(
        "tf-requested-by",
        "detail",
        "requested by op",
        r"requested by op (?P<op>[^\s]+)",
        "(rounded to 2147483648)requested by op model/conv/Conv2D",
    ),
    Pattern(
        "tf-eager-op",
        "detail",
        "[op:",
        r"\[Op:(?!__inference)(?P<op>\w+)\]",
        "by allocator GPU_0_bfc [Op:Conv2D] name:",
    ),
    Pattern(
        "tf-wrapped-op",
        "detail",
        "__wrapped__",
        r"function_node __wrapped__(?P<op>\w+?)_device_",
        "{{function_node __wrapped__Fill_device_/job:localhost/replica:0/task:0/device:GPU:0}} OOM when allocating tensor",
    ),
    Pattern(
        "tf-node-line",
        "detail",
        "node: '",
        r"^\W*Node: '(?P<op>[^']+)'",
        "Node: 'unet/conv2d_17/Conv2D'",
    ),
    Pattern(
        "keras-layer",
        "detail",
        "exception encountered when calling",
        r"Exception encountered when calling layer ['\"](?P<layer>[^'\"]+)['\"]",
        "Exception encountered when calling layer 'conv2d_5' (type Conv2D).",
    ),
    Pattern(
        "tf-created-device",
        "detail",
        "mb memory",
        r"Created (?:TensorFlow )?device .{0,80}?with (?P<capacity>\d+ MB) memory",
        "Created device /job:localhost/replica:0/task:0/device:GPU:0 with 9650 MB memory:  -> device: 0",
    ),
    Pattern(
        "tf-free-memory",
        "detail",
        "freememory",
        r"totalMemory: [\d.]+ ?[KMGT]iB freeMemory: (?P<capacity>[\d.]+ ?[KMGT]iB)",
        "totalMemory: 10.92GiB freeMemory: 187.06MiB",
    ),
    Pattern(
        "tf-node-dtype",
        "detail",
        "t=dt_",
        r"\[\[.{0,400}?\bT=DT_(?P<node_dtype>\w+)",
        '[[Node: conv1/Conv2D = Conv2D[T=DT_FLOAT, data_format="NHWC", strides=[1, 1, 1, 1]](input, filter)]]',
    ),
)
