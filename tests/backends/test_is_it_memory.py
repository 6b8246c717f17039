"""Which errors are about the memory of the device: by their type, then by their text."""

import builtins

import pytest
from here import BACKEND

from oomproof import _backends as backends

ERRORS = {
    "tensorflow": [
        ("ResourceExhausted", "OOM when allocating tensor with shape[9,9] on GPU:0 by allocator GPU_0_bfc", "step"),
        ("ResourceExhausted", "Graph execution error:\n\nDetected at node a\nOOM when allocating tensor", "step"),
        ("ResourceExhausted", "OOM when allocating tensor\n[[{{node oomproof_commit/adam/mul}}]]", "commit"),
        ("ResourceExhausted", "Out of memory while trying to allocate 123456 bytes.", "step"),
        ("ResourceExhausted", "Out of memory trying to allocate 123456 bytes", "step"),
        ("ResourceExhausted", "failed to allocate memory", "step"),
        ("ResourceExhausted", "Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0", "step"),
        ("Internal", "Failed to allocate scratch space: CUDNN_STATUS_ALLOC_FAILED", "step"),
        ("Internal", "cuDNN launch failure: CUDNN_STATUS_INTERNAL_ERROR", None),
        ("Internal", "Blas xGEMM launch failed : CUBLAS_STATUS_ALLOC_FAILED", "step"),
        ("Internal", "Failed to create cublas handle: CUBLAS_STATUS_NOT_INITIALIZED", "step"),
        ("Internal", "failed to create cublas handle: the resource allocation failed", "step"),
        ("Internal", "Dst tensor is not initialized.", "step"),
        ("Internal", "CUDA_ERROR_OUT_OF_MEMORY: out of memory", "step"),
        ("Unknown", "CUDNN_STATUS_ALLOC_FAILED in tensorflow/stream_executor", "step"),
        ("NotFound", "No algorithm worked!  Error messages: Profiling failure on CUDNN engine 1", "step"),
        ("NotFound", "No such file or directory; No space left", None),
        ("Unknown", "Failed to get convolution algorithm. This is probably because cuDNN failed to initialize", "step"),
        ("Internal", "Blas xGEMM launch failed : a.shape=[1,9,9]", None),
        ("ResourceExhausted", "/data/x.tfrecord; No space left on device", None),
        ("ResourceExhausted", "/data/x.tfrecord; Too many open files", None),
        ("ResourceExhausted", "Disk quota exceeded", None),
        ("ResourceExhausted", "Received message larger than max (5 vs. 4)", None),
        ("ResourceExhausted", "", None),
        ("Internal", "no kernel image is available for execution on the device", None),
        ("InvalidArgument", "OOM when allocating tensor", None),
        ("InvalidArgument", "Cannot parse tensor from proto: dtype: DT_FLOAT\ntensor_shape {}", "step"),
        ("Internal", "Cannot parse tensor from proto", None),
        ("OutOfRange", "End of sequence", None),
        ("MemoryError", "host", None),
        ("RuntimeError", "OOM when allocating", None),
    ],
    "jax": [
        ("JaxRuntime", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123456 bytes.", "step"),
        ("JaxRuntime", "RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.", "step"),
        ("JaxRuntime", "INTERNAL: Failed to allocate 2147483648 bytes for new constant", "step"),
        ("JaxRuntime", "INTERNAL: RET_CHECK failure CUDNN_STATUS_ALLOC_FAILED", "step"),
        ("JaxRuntime", "INTERNAL: CUBLAS_STATUS_NOT_INITIALIZED", "step"),
        ("JaxRuntime", "INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "step"),
        ("JaxRuntime", "RESOURCE_EXHAUSTED: /data/x; No space left on device", None),
        ("JaxRuntime", "RESOURCE_EXHAUSTED: /data/x; Too many open files", None),
        ("JaxRuntime", "INTERNAL: no kernel image is available for execution on the device", None),
        ("JaxRuntime", "INVALID_ARGUMENT: Executable expected parameter 0 of size 4", None),
        ("ValueError", "operands could not be broadcast together", None),
        ("TypeError", "RESOURCE_EXHAUSTED: Out of memory", None),
    ],
    "torch": [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8", "step"),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory", "step"),
        ("RuntimeError", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "step"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "step"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "step"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "step"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", None),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", None),
        ("RuntimeError", "CUDA error: device-side assert triggered", None),
        ("RuntimeError", "unable to write to file: No space left on device", None),
        ("RuntimeError", "Too many open files. Communication with the workers is no longer possible", None),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (8x3 and 4x2)", None),
        ("ValueError", "out of memory", None),
    ],
}[BACKEND]


def error_of(kind, text):
    if hasattr(builtins, kind):
        return getattr(builtins, kind)(text)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return getattr(tf.errors, f"{kind}Error")(None, None, text)
    if BACKEND == "jax":
        import jax

        return getattr(jax.errors, f"{kind}Error")(text)
    import torch

    return getattr(torch, kind)(text)


@pytest.mark.parametrize(("kind", "text", "where"), ERRORS)
def test_is_it_memory(kind, text, where):
    error = error_of(kind, text)
    shortage = backends.current().memory().shortage(error)
    assert (shortage and shortage.where) == where
    if shortage:
        assert shortage.error is error
        assert shortage.text
        assert error.__traceback__ is None


def test_an_interruption_is_not_memory():
    assert backends.current().memory().shortage(KeyboardInterrupt("out of memory")) is None


def test_what_xla_asked_for_is_read():
    """Where a program asks for all it needs at once, the request says what it needs; elsewhere it is one tensor."""
    kind = {"tensorflow": "ResourceExhausted", "jax": "JaxRuntime", "torch": "OutOfMemoryError"}[BACKEND]
    shortage = backends.current().memory().shortage(error_of(kind, "Out of memory trying to allocate 123456 bytes."))
    assert shortage.needed == (123456 if BACKEND == "tensorflow" else None)
