"""Memory that really is limited, for child processes: each backend in its own way, behind the same few names.

TensorFlow's CPU device can use the allocator of its GPUs, with a limit. JAX and torch take their memory from malloc, so
there the data segment of the process is limited (RLIMIT_DATA), from where it stands once the framework is warm. What
they raise then is what they raise on any machine whose memory is full.

A process has more uses for memory than tensors, and most of them answer a shortage with abort(): the matrix products of
XLA, LLVM, OpenMP. So that tensors are what runs out, and equal steps need equal memory:

- small requests find a reserve in the heap, made of holes too small for a tensor;
- large ones find no hole in the heap, so each is a mapping of its own, which counts when it is made and no longer;
- JAX compiles outside of the limit, as it would beside a GPU;
- threads, of which Keras starts one more for its callbacks when the machine is slow, have small stacks, for they count.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import sys
import threading
import time

MIB = 2**20
_LARGE = MIB // 2  # Requests from here on are mapped one by one.
_HOLE = _LARGE - 1024
_RESERVE = 128 * MIB


def environment(backend, limit):
    """What must be in the environment before the process starts. A limit of 0 MiB means none."""
    if backend == "tensorflow":
        # oneDNN allocates past the limited allocator and crashes the process when it cannot.
        found = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
        if limit:
            found |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit)}
        return found
    return {
        # One heap for all threads, that never shrinks: else the reserve would serve some threads only.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        # Given, it stays what it is. By default it grows with what is freed, up to 32 MiB.
        "MALLOC_MMAP_THRESHOLD_": str(_LARGE),
        # Python's own allocator maps arenas of 1 MiB and would be the one to fail.
        "PYTHONMALLOC": "malloc",
        "JAX_PLATFORMS": "cpu",
    }


def is_possible(backend):
    """Limits on malloc need Linux and its C library; TensorFlow brings its allocator along."""
    return backend == "tensorflow" or (sys.platform == "linux" and "glibc" in os.confstr("CS_GNU_LIBC_VERSION"))


def limited(backend, limit):
    if not limit:
        return Unlimited()
    return AllocatorLimit(limit) if backend == "tensorflow" else ProcessLimit(backend, limit)


class Unlimited:
    def start(self, warm_up):
        """From here on memory is limited. `warm_up()` is run before, where that makes a difference."""

    def renew(self):
        """As much memory as at the start, whatever programs were compiled and freed since."""

    def current(self):
        return 0

    def peak(self):
        return 0

    def reset_peak(self):
        pass

    def outside(self):
        """What is allocated in this context, by the test itself, does not count."""
        return contextlib.nullcontext()


class AllocatorLimit(Unlimited):
    """TensorFlow's BFC allocator, limited from the environment."""

    def __init__(self, limit):
        import tensorflow as tf

        self._tf, self._limit = tf, limit * MIB

    def current(self):
        return self._tf.config.experimental.get_memory_info("CPU:0")["current"]

    def peak(self):
        return self._tf.config.experimental.get_memory_info("CPU:0")["peak"]

    def reset_peak(self):
        self._tf.config.experimental.reset_memory_stats("CPU:0")

    def free(self):
        return self._limit - self.current()

    def ballast(self, mib):
        """Memory that is taken, in small tensors: one large one might itself not find a gap."""
        return [self._tf.zeros((MIB // 8,)) for _ in range(2 * mib)]


class ProcessLimit(Unlimited):
    """RLIMIT_DATA: `limit` MiB more than what the warm process has."""

    def __init__(self, backend, limit):
        threading.stack_size(MIB // 2)
        self._backend, self._limit = backend, limit * MIB
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.malloc.argtypes = [ctypes.c_size_t]
        self._libc.free.argtypes = [ctypes.c_void_p]
        self._plugs = []
        self._limiting = False

    def start(self, warm_up):
        # Threads are made when they are first needed, and their stacks are data.
        warm_up()
        if self._backend == "jax":
            self._compile_outside()
        self._reserve()
        self._limiting = True
        self.renew()

    def renew(self):
        gc.collect()
        with self.outside():
            pass
        _set_limit(_settled() + self._limit)

    def current(self):
        return _data()

    def free(self):
        return resource.getrlimit(resource.RLIMIT_DATA)[0] - _settled()

    def ballast(self, mib):
        deadline = time.monotonic() + 20
        while mib > 0:
            try:
                # Private memory counts; memory that could be shared, which is what Python maps by default, does not.
                return mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError:
                # The step before may still be running.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        return None

    @contextlib.contextmanager
    def outside(self):
        if not self._limiting:
            yield
            return
        self._limiting = False
        limit, before = resource.getrlimit(resource.RLIMIT_DATA)[0], _settled()
        _set_limit(resource.RLIM_INFINITY)
        for block in self._plugs:
            self._libc.free(block)
        self._plugs = []
        try:
            yield
        finally:
            self._plug()
            _set_limit(limit + max(_data() - before, 0))
            self._limiting = True

    def _reserve(self):
        """Holes in the heap. Every other block stays, untouched, so that two holes never become one."""
        blocks = [self._libc.malloc(_HOLE) for _ in range(2 * (_RESERVE // _HOLE))]
        for block in blocks[::2]:
            self._libc.free(block)

    def _plug(self):
        """Takes every hole in the heap that is large enough for a tensor."""
        while True:
            block = self._libc.malloc(_LARGE)
            # The bit of a chunk's header that says it is a mapping of its own.
            if ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2:
                self._libc.free(block)
                return
            self._plugs.append(block)

    def _compile_outside(self):
        import jax
        from jax._src import compiler

        original = compiler.compile_or_get_cached

        def compile_or_get_cached(*args, **kwargs):
            # What runs meanwhile would run without a limit, and would be counted as memory of the compiler.
            for array in jax.live_arrays():
                with contextlib.suppress(Exception):
                    array.block_until_ready()
            with self.outside():
                return original(*args, **kwargs)

        compiler.compile_or_get_cached = compile_or_get_cached


def _data():
    """Bytes that count against the limit."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no VmData in /proc/self/status")


def _settled():
    """The same, once it no longer changes: JAX says that a program is done a moment before its memory is freed."""
    found = [_data()]
    while len(found) < 50 and found[-5:] != found[-1:] * 5:
        time.sleep(0.01)
        found.append(_data())
    return found[-1]


def _set_limit(soft):
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard if soft == resource.RLIM_INFINITY else soft, hard))
