"""What JAX and PyTorch do on a card when memory runs out: the facts the two backends are built on.

python tests/gpu/facts.py jax > facts-jax.json
python tests/gpu/facts.py torch > facts-torch.json
"""

import json
import os
import sys
import time

os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.05"


def timed(function, repeats=200):
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - began) / repeats * 1e6


def caught(function):
    """(kind, first line) of the error a function raises, and the seconds it took."""
    began = time.perf_counter()
    try:
        function()
    except Exception as error:
        text = f"{type(error).__module__}.{type(error).__name__}: {str(error)[:300]}"
        return {"error": text, "seconds": round(time.perf_counter() - began, 4)}
    return {"error": None, "seconds": round(time.perf_counter() - began, 4)}


def jax_facts():
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    facts = {"jax": jax.__version__, "device": device.device_kind, "stats": device.memory_stats()}
    facts["memory_stats_us"] = timed(device.memory_stats)

    def hungry(weight, x):
        # Sorting cannot be fused away, so each line holds another array of x's size.
        a = jnp.sort(x, axis=0)
        b = jnp.sort(x, axis=1)
        return weight + jnp.sum(a * jnp.roll(b, 1)), a, b

    # Fits as an argument, not beside its two sorted copies and their workspace.
    x = jnp.ones((400_000, 1000))
    x.block_until_ready()
    for donated in (False, True):
        weight = jnp.ones((1000,))
        program = jax.jit(hungry, donate_argnums=(0,) if donated else ())
        compiled = program.lower(weight, x).compile()
        analysis = compiled.memory_analysis()
        key = "donated" if donated else "kept"
        before = device.memory_stats()["bytes_in_use"]
        held = []
        facts[key] = {
            "need": analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            "free": device.memory_stats()["bytes_limit"] - before,
            "call": caught(lambda program=compiled, weight=weight, x=x, held=held: held.append(program(weight, x))),
            "block": caught(lambda held=held: jax.block_until_ready(held)),
            "weight_deleted": weight.is_deleted(),
            "in_use_grew": device.memory_stats()["bytes_in_use"] - before,
        }
        if held:
            # Does a failed result, handed to a program that donates, take the donated array with it?
            state = jnp.ones((1000,))
            commit = jax.jit(lambda state, gradient: state - gradient, donate_argnums=0)
            poisoned = caught(
                lambda held=held, state=state, commit=commit: commit(state, held[0][0]).block_until_ready()
            )
            facts[key]["poisoned"] = {**poisoned, "state_deleted": state.is_deleted()}
        del held, compiled, program

    values = [jnp.ones((8,)) for _ in range(400)]
    program = jax.jit(lambda values: [value + 1 for value in values])
    compiled = program.lower(values).compile()
    jax.block_until_ready((program(values), compiled(values)))
    facts["dispatch_400_arrays_us"] = {
        "jit": timed(lambda: program(values)),
        "compiled": timed(lambda: compiled(values)),
    }
    return facts


def torch_facts():
    import torch

    torch.cuda.set_per_process_memory_fraction(0.05)
    torch.ones(1, device="cuda")
    facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    facts["limit"] = torch.cuda.get_device_properties(0).total_memory
    ask = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    facts["fraction"] = ask() if ask else None
    facts["mem_get_info"] = torch.cuda.mem_get_info()
    facts["oom"] = caught(lambda: torch.ones(20 * 2**28, device="cuda"))
    facts["allocated_after"] = torch.cuda.memory_allocated()
    generator = torch.cuda.default_generators[0]
    facts["us"] = {
        "cuda get_state": timed(generator.get_state),
        "cuda clone_state": timed(generator.clone_state) if hasattr(generator, "clone_state") else None,
        "cpu get_rng_state": timed(torch.get_rng_state),
        "memory_allocated": timed(torch.cuda.memory_allocated),
        "reset_peak": timed(torch.cuda.reset_peak_memory_stats),
        "mem_get_info": timed(torch.cuda.mem_get_info),
    }
    big = [torch.ones(2**26, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        torch._foreach_copy_(big, [tensor.clone() for tensor in big])
    torch.cuda.synchronize()
    facts["clone_and_copy_gb_per_s"] = 20 * 8 * 2**28 / (time.perf_counter() - began) / 1e9
    # A cuBLAS or cuDNN handle made when the card is full.
    del big
    ballast = []
    caught(lambda: [ballast.append(torch.ones(2**22, device="cuda")) for _ in range(10**6)])
    facts["cublas when full"] = caught(lambda: torch.mm(ballast[0][:4096].view(64, 64), ballast[1][:4096].view(64, 64)))
    image = ballast[0][: 3 * 64 * 64].view(1, 3, 64, 64)
    kernel = ballast[1][: 8 * 27].view(8, 3, 3, 3)
    facts["cudnn when full"] = caught(lambda: torch.nn.functional.conv2d(image, kernel))
    return facts


if __name__ == "__main__":
    print(json.dumps({"jax": jax_facts, "torch": torch_facts}[sys.argv[1]](), indent=2))
