"""Streaming data larger than memory: resident memory, and speed beside pipelines written by hand with tf.data.

    python benchmarks/data_stream.py    # 128 MB of arrays and of images, a minute or two; writes nothing
    python benchmarks/data_stream.py --gigabytes 20 --seconds 5 --repeats 3 --orders kept shuffled --write
                                        # the published figures; takes 20 GB of disk at a time, and half an hour

For arrays (.npy), HDF5 and JPEGs, in order and shuffled: every contestant reads the same files in a process of its own,
turn and turn about, first with the files dropped from the page cache (cold), then again (warm), for at most `--seconds`
each, after ten batches: those that were made ahead while the model was built are not to count. Then ours goes through
all of the data once in `fit`. Memory is that of the process: RSS, with whatever file pages it has mapped, and RssAnon,
what it has allocated; sampled every 20 ms. tf.data shuffles `records` by a buffer of 10,000 samples; ours and the rest
shuffle all samples, so ours is compared with the best of all and with the best of those. Beside samples in a second
there are microseconds of CPU for a sample, which depend less on what else the machine does.
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
from _common import RESULTS, environment, write_result

KINDS = ("arrays", "hdf5", "images")
WARMING_UP = 10


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(_child(json.loads(arguments.child))))
        return
    size = int(arguments.gigabytes * 1e9)
    figures: dict[str, Any] = {"workloads": []}
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
        write_result("data-stream", _with_earlier(figures))
    else:
        print(json.dumps({"environment": environment(), **figures}, indent=2))


def _with_earlier(figures: dict[str, Any]) -> dict[str, Any]:
    """With the figures of other data that were written before: each takes long, and each has its command."""
    path = RESULTS / "data-stream.json"
    earlier = json.loads(path.read_text())["workloads"] if path.exists() else []
    done = [(each["data"], each["shuffled"]) for each in figures["workloads"]]
    kept = [each for each in earlier if (each["data"], each["shuffled"]) not in done]
    return figures | {"workloads": [*kept, *figures["workloads"]]}


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
        "command": _command(arguments),
        "data": kind,
        "shuffled": shuffle,
        "bytes_on_disk": sum(os.stat(file).st_blocks * 512 for file in files),
        "files": len(files),
    }
    for mode, by_name in runs.items():
        result[mode] = {"contestants": {name: _summary(found) for name, found in by_name.items()}}
        for cache in ("cold", "warm"):
            rivals = [name for name in by_name if name != "ours"]
            result[mode][f"ours_over_best_{cache}"] = _ratio(by_name, rivals, cache)
            if shuffle and (alike := [name for name in rivals if name not in data.BUFFERED]) != rivals:
                result[mode][f"ours_over_best_full_shuffle_{cache}"] = _ratio(by_name, alike, cache)
    whole = _run({"kind": kind, "folder": folder, "shuffle": shuffle, "name": "ours", "mode": "fit", "seconds": None})
    result["all_of_it_in_fit"] = {key: round(value, 1) for key, value in whole.items()}
    print(json.dumps(result, indent=1), file=sys.stderr)
    return result


def _ratio(runs: dict[str, list[dict[str, float]]], rivals: list[str], cache: str) -> dict[str, Any]:
    """Ours over the quickest of these, run by run."""
    best = max(rivals, key=lambda name: statistics.median(run[cache] for run in runs[name]))
    ratios = [mine[cache] / other[cache] for mine, other in zip(runs["ours"], runs[best], strict=True)]
    spread = [round(min(ratios), 3), round(max(ratios), 3)]
    cpu = [statistics.median(run[f"{cache}_cpu_us"] for run in runs[name]) for name in ("ours", best)]
    return {"best": best, "median": round(statistics.median(ratios), 3), "spread": spread,
            "cpu_of_best_over_ours": round(cpu[1] / cpu[0], 3)}  # fmt: skip


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
        clock = Clock(task, folder)
        if model is None:
            for _ in data.batches(pipeline):
                if clock.tick():
                    break
        else:
            model.fit(pipeline, epochs=1, verbose=0, callbacks=[_ticker(keras, clock)])
        found[cache] = clock.samples / clock.taken
        found[f"{cache}_cpu_us"] = clock.cpu / clock.samples * 1e6
        found[f"{cache}_seconds"] = clock.taken
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


class Clock:
    """Samples, seconds and seconds of CPU from one batch on, for at most as long as the task says."""

    def __init__(self, task: dict[str, Any], folder: pathlib.Path) -> None:
        images = task["kind"] == "images"
        self.batch_size = data.IMAGE_BATCH if images else data.BATCH
        batches = data.samples(task["kind"], folder) // self.batch_size
        self._seconds, self._left_out = task["seconds"], min(WARMING_UP, batches // 2)
        self._batches = self.samples = 0
        self.taken = self.cpu = 0.0

    def tick(self) -> bool:
        """A batch was used. Whether that is enough."""
        now, cpu = time.perf_counter(), time.process_time()
        self._batches += 1
        if self._batches <= self._left_out:
            self._began, self._cpu = now, cpu
            return False
        self.samples += self.batch_size
        self.taken, self.cpu = now - self._began, cpu - self._cpu
        return self._seconds is not None and self.taken > self._seconds


def _ticker(keras: Any, clock: Clock) -> Any:
    class Ticker(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if clock.tick():
                self.model.stop_training = True

    return Ticker()


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
