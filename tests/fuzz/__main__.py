"""python -m fuzz --backend jax --minutes 10 --seed 3: see `python -m fuzz --help`."""

import argparse
import json
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).parents[1]
RESULTS = HERE.parent / "benchmarks" / "results"


def main():
    asked = arguments()
    os.environ["KERAS_BACKEND"] = asked.backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path.insert(0, str(HERE))
    if asked.stretch:
        return stretch(asked)
    if asked.shrink is not None:
        return shrink_one(asked)
    from fuzz.conducting import conduct

    return conduct(asked)


def arguments():
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Trains random models plain and guarded.")
    parser.add_argument("--backend", default=os.environ.get("KERAS_BACKEND", "tensorflow"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first configuration")
    parser.add_argument("--without", default="", help="features to leave out, separated by commas")
    parser.add_argument("--only", default="", help="run only configurations with one of these features")
    parser.add_argument("--found", type=pathlib.Path, default=pathlib.Path(".fuzz"), help="where minimal scripts go")
    parser.add_argument("--summary", type=pathlib.Path, help="default: benchmarks/results/fuzz-BACKEND.json")
    parser.add_argument("--shrink-seconds", type=float, default=120.0, help="time to make each failure smaller")
    parser.add_argument("--stretch", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--shrink", type=int, help="make one configuration smaller, and nothing else")
    asked = parser.parse_args()
    asked.without, asked.only = (set(filter(None, each.split(","))) for each in (asked.without, asked.only))
    asked.summary = asked.summary or RESULTS / f"fuzz-{asked.backend}.json"
    return asked


def tell(**what):
    print(json.dumps(what), flush=True)


def compile_quickly(backend):
    """Programs here run once or twice: compiling well would take nearly all of the time."""
    if backend == "jax":
        import jax

        jax.config.update("jax_disable_most_optimizations", True)


def stretch(asked):
    """Runs configurations in this process and tells of each, one JSON line before and one behind it."""
    from fuzz.grammar import configuration
    from fuzz.running import run

    compile_quickly(asked.backend)
    for index in asked.stretch:
        tell(begin=index)
        began = time.perf_counter()
        found = run(configuration(asked.seed, index, asked.backend))
        tell(end=index, seconds=round(time.perf_counter() - began, 2), **found)


def shrink_one(asked):
    """Makes one configuration smaller and writes its script."""
    from fuzz.grammar import configuration
    from fuzz.running import failed, kind_of, run
    from fuzz.shrinking import shrink
    from fuzz.writing import script

    compile_quickly(asked.backend)
    config = configuration(asked.seed, asked.shrink, asked.backend)
    path = asked.found / f"{asked.backend}-{asked.seed}-{asked.shrink}.py"
    asked.found.mkdir(parents=True, exist_ok=True)
    last = run(config)
    if not failed(last):
        return tell(shrunk=asked.shrink, config=config, script=None, **last)
    ends, kind = time.monotonic() + asked.shrink_seconds, kind_of(last)

    def fails(candidate):
        nonlocal last
        found = run(candidate, seconds=40)
        tell(trying=asked.shrink)
        same = failed(found) and kind_of(found) == kind
        last = found if same else last
        return same

    config = shrink(config, fails, lambda: time.monotonic() < ends)
    told = "\n".join(
        [f"Seed {asked.seed}, number {asked.shrink}, {asked.backend}: {last['status']}.", *last["details"]]
    )
    path.write_text(script(config, title=told.replace('"""', "'''")))
    return tell(shrunk=asked.shrink, config=config, script=str(path), **last)


if __name__ == "__main__":
    sys.exit(main())
