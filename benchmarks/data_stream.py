"""Streaming data larger than memory: resident memory, and speed beside pipelines written by hand with tf.data.

    python benchmarks/data_stream.py    # 128 MB of arrays and of images, a minute or two; writes nothing
    python benchmarks/data_stream.py --gigabytes 20 --seconds 5 --repeats 3 --orders kept shuffled --write
                                        # the published figures; takes 20 GB of disk at a time, and half an hour

For arrays (.npy), HDF5 and JPEGs, in order and shuffled: every contestant reads the same files in a process of its own,
turn and turn about, first with the files dropped from the page cache (cold), then again (warm), for at most `--seconds`
each. Then ours goes through all of the data once in `fit`. Memory is that of the process: RSS, with whatever file pages
it has mapped, and RssAnon, what it has allocated; sampled every 20 ms. tf.data shuffles `records` by a buffer of 10,000
samples; ours, `mapped` and `decoded` shuffle all samples.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import _data_contestants as data
from _common import environment, write_result

KINDS = ("arrays", "hdf5", "images")


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(_child(json.loads(arguments.child))))
        return
    size = int(arguments.gigabytes * 1e9)
    figures: dict[str, Any] = {"command": _command(arguments), "workloads": []}
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="oomproof-data-") as folder:
            free = shutil.disk_usage(folder).free
            if free < size * 1.1 + 2e9:
                raise SystemExit(f"{kind}: {size / 1e9:.1f} GB are needed in {folder}, {free / 1e9:.1f} GB are free.")
            getattr(data, f"write_{kind}")(pathlib.Path(folder), size)
            os.sync()  # What is not on disk yet cannot be dropped from memory.
            orders = [order == "shuffled" for order in arguments.orders]
            figures["workloads"] += [_compare(kind, folder, shuffle, arguments) for shuffle in orders]
    figures["corrupt"] = _corrupt(arguments)
    if arguments.write:
        write_result("data-stream", figures)
    else:
        print(json.dumps({"environment": environment(), **figures}, indent=2))


def _compare(kind: str, folder: str, shuffle: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """All contestants in turn, several times."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for mode in ("iterate", "fit"):
        for _ in range(arguments.repeats):
            for name in data.CONTESTANTS[kind]:
                task = {"kind": kind, "folder": folder, "shuffle": shuffle, "name": name, "mode": mode}
                found = _run(task | {"seconds": arguments.seconds})
                runs.setdefault(mode, {}).setdefault(name, []).append(found)
    files = _files(folder)
    result: dict[str, Any] = {
        "data": kind,
        "shuffled": shuffle,
        "bytes_on_disk": sum(os.stat(file).st_blocks * 512 for file in files),
        "files": len(files),
    }
    for mode, by_name in runs.items():
        result[mode] = {"contestants": {name: _summary(found) for name, found in by_name.items()}}
        for cache in ("cold", "warm"):
            speeds = {n: [run[cache] for run in found] for n, found in by_name.items()}
            best = max((n for n in speeds if n != "ours"), key=lambda n: statistics.median(speeds[n]))
            ratios = [mine / other for mine, other in zip(speeds["ours"], speeds[best], strict=True)]
            result[mode][f"ours_over_best_{cache}"] = {"best": best, "median": round(statistics.median(ratios), 3)}
    whole = _run({"kind": kind, "folder": folder, "shuffle": shuffle, "name": "ours", "mode": "fit", "seconds": None})
    result["all_of_it_in_fit"] = {key: round(value, 1) for key, value in whole.items()}
    print(json.dumps(result, indent=1), file=sys.stderr)
    return result


def _summary(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}


def _corrupt(arguments: argparse.Namespace) -> dict[str, Any]:
    """1,000 files that are no images among 10,000."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = pathlib.Path(name)
        # About 2 kB each, so that there are some more than 10,000; the rest is removed.
        data.write_images(folder, 2**20 * 64, 0, shape=(48, 64))
        files = sorted(_files(name))
        for file in files[10_000:]:
            os.remove(file)
        broken = files[:10_000:10]
        for place, file in enumerate(broken):
            content = pathlib.Path(file).read_bytes()
            pathlib.Path(file).write_bytes((b"", content[: len(content) // 2], b"not an image " * 50)[place % 3])
        return _run({"mode": "corrupt", "folder": name}) | {"files": len(files[:10_000]), "broken": len(broken)}


def _run(task: dict[str, Any]) -> dict[str, Any]:
    """A task in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    quiet = os.environ | {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(command, env=quiet, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def _files(folder: str) -> list[str]:
    return [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]


# In the child


def _child(task: dict[str, Any]) -> dict[str, float]:
    import keras
    import tensorflow  # noqa: F401  # Everybody pays for it, so that memory compares.

    folder = pathlib.Path(task["folder"])
    watch = Watch()
    base = watch.rss
    if task["mode"] == "corrupt":
        from oomproof import data as sources

        stream = sources.from_files(folder, image_size=(32, 32), batch_size=64, shuffle=True, seed=1, on_corrupt="skip")
        began = time.perf_counter()
        sizes = [len(x) for x, _ in stream]
        taken = time.perf_counter() - began
        whole = sum(sizes) == stream.samples and set(sizes[:-1]) == {64}
        return {"found": len(stream.corrupt), "batches_full": whole, "seconds": round(taken, 2)}
    make = data.CONTESTANTS[task["kind"]][task["name"]]
    found: dict[str, float] = {}
    model = data.model(task["kind"]) if task["mode"] == "fit" else None
    for cache in ("cold",) if task["seconds"] is None else ("cold", "warm"):
        if cache == "cold":
            _drop_from_cache(str(folder))
        pipeline = make(task["kind"], folder, task["shuffle"])
        if model is None:
            samples, taken = _iterate(pipeline, task["seconds"])
        else:
            timer = _timer(keras, task)
            model.fit(pipeline, epochs=1, verbose=0, callbacks=[timer])
            samples, taken = timer.samples, timer.taken
        found[cache] = samples / taken
        found[f"{cache}_seconds"] = taken
        del pipeline
        gc.collect()  # Keras's iterator holds itself, and the pipeline would read on.
    watch.stop()
    sample = data.RECORD if task["kind"] != "images" else 3 * data.IMAGE_SIZE[0] * data.IMAGE_SIZE[1]
    return {
        **found,
        "cold_megabytes_per_second": found["cold"] * sample / 1e6,
        "peak_rss_mb": watch.peak_rss / 1e6,
        "peak_anon_mb": watch.peak_anon / 1e6,
        "rss_mb_before_data": base / 1e6,
    }


def _iterate(pipeline: Any, seconds: float | None) -> tuple[int, float]:
    """Samples and seconds, from the second batch on: the first one pays for starting."""
    samples, began = 0, 0.0
    for batch in data.batches(pipeline):
        if not began:
            began = time.perf_counter()
            continue
        samples += len(batch[0])
        if seconds is not None and time.perf_counter() - began > seconds:
            break
    return samples, time.perf_counter() - began


def _timer(keras: Any, task: dict[str, Any]) -> Any:
    batch_size = data.IMAGE_BATCH if task["kind"] == "images" else data.BATCH

    class Timer(keras.callbacks.Callback):  # type: ignore[misc]
        """Stops `fit` after a time and knows how far it came."""

        samples, began, taken = 0, 0.0, 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.perf_counter()
            if not self.began:
                self.began = now
                return
            self.samples += batch_size
            self.taken = now - self.began
            if task["seconds"] is not None and self.taken > task["seconds"]:
                self.model.stop_training = True

    return Timer()


def _drop_from_cache(folder: str) -> None:
    for file in _files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Watch:
    """The largest RSS and RssAnon of this process (nobody here has children), sampled by a thread."""

    def __init__(self) -> None:
        self.peak_rss = self.peak_anon = self.rss = 0
        self._look()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.02):
            self._look()

    def _look(self) -> None:
        status = pathlib.Path("/proc/self/status").read_text()
        found = dict(line.split(":", 1) for line in status.splitlines())
        self.rss, anon = (int(found[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
        self.peak_rss, self.peak_anon = max(self.peak_rss, self.rss), max(self.peak_anon, anon)

    def stop(self) -> None:
        self._look()
        self._stopped.set()


def _command(arguments: argparse.Namespace) -> str:
    """How to come by the same figures, wherever the files are."""
    shown = {name: value for name, value in vars(arguments).items() if name not in ("folder", "write", "child")}
    words = [f"--{name} {' '.join(value) if isinstance(value, list) else value}" for name, value in shown.items()]
    return f"python benchmarks/data_stream.py {' '.join(words)}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.128, help="size of each set of files")
    parser.add_argument("--seconds", type=float, default=1.0, help="longest that a contestant reads at a time")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=["arrays", "images"])
    parser.add_argument("--orders", nargs="*", choices=("kept", "shuffled"), default=["shuffled"])
    parser.add_argument("--folder", help="where to make the files; the system's temporary folder by default")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/data-stream.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
