"""Runs stretches of configurations in child processes, so that neither a crash nor a hang ends the fuzzing."""

import collections
import itertools
import json
import queue
import subprocess
import sys
import threading
import time

from fuzz.grammar import configuration, features
from fuzz.running import failed
from fuzz.shrinking import telling

# Configurations of one child. What frameworks keep of every model adds up.
STRETCH = 25
# A child that says nothing for so long hangs where Python's own alarm does not reach.
SILENCE_SECONDS = 240.0
TOLD_EVERY = 20


def conduct(asked):
    """Fuzzes for the minutes that were asked for; writes progress, minimal scripts and the summary."""
    began = time.monotonic()
    ends = began + 60 * asked.minutes
    found, causes, numbers, numbers_to_come = [], [], [], numbers_of(asked)
    while time.monotonic() < ends:
        numbers += itertools.islice(numbers_to_come, STRETCH - len(numbers))
        # All of a stretch first: a child that waits to be read may be taken for one that hangs.
        for record in list(run_stretch(asked, numbers, ends)):
            found.append(record)
            if failed(record):
                judge(asked, record, causes)
            if len(found) % TOLD_EVERY == 0:
                print(progress(asked, found, began), flush=True)
    summary = summed_up(asked, found, time.monotonic() - began)
    asked.summary.parent.mkdir(parents=True, exist_ok=True)
    asked.summary.write_text(json.dumps(summary, indent=1) + "\n")
    print(progress(asked, found, began), f"→ {asked.summary}", flush=True)
    return 1 if summary["failures"] else 0


def wanted(asked, index):
    held = set(features(configuration(asked.seed, index, asked.backend)))
    return not held & asked.without and (not asked.only or held & asked.only)


def numbers_of(asked):
    """Numbers of configurations to run, without end."""
    return (index for index in itertools.count(asked.first) if wanted(asked, index))


def run_stretch(asked, numbers, ends):
    """Records of these configurations. Takes those out of the list that are done."""
    for line in lines_of(asked, ["--stretch", *map(str, numbers)]):
        if "end" in line:
            numbers.remove(line["end"])
            yield {"index": line.pop("end"), **line}
        if time.monotonic() > ends:
            return
    if numbers:
        # The child is gone, and with it the configuration that it was at.
        lost = numbers.pop(0)
        yield {"index": lost, "status": "crash", "details": ["the process ended or hung"], "said": ""}


def lines_of(asked, more):
    """What a child tells, line by line. Ends with the child, which is ended when it is silent for too long."""
    told = queue.Queue()
    command = [sys.executable, "-m", "fuzz", "--backend", asked.backend, "--seed", str(asked.seed)]
    command += ["--found", str(asked.found), "--shrink-seconds", str(asked.shrink_seconds), *more]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def read():
        for line in child.stdout:
            told.put(line)
        told.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        while (line := told.get(timeout=SILENCE_SECONDS)) is not None:
            if line.startswith("{"):
                yield json.loads(line)
    except queue.Empty:
        return
    finally:
        child.kill()
        child.wait()


def judge(asked, record, causes):
    """Says what failed, and makes it smaller unless it looks like a failure that was made small before."""
    config = configuration(asked.seed, record["index"], asked.backend)
    held = set(features(config))
    for cause in causes:
        if cause["status"] == record["status"] and cause["telling"] and cause["telling"] <= held:
            record["same_as"] = cause["index"]
            return
    print(f"{asked.backend} seed {asked.seed} number {record['index']}: {record['status']}", flush=True)
    for detail in record["details"][:3]:
        print(f"    {detail}", flush=True)
    for line in lines_of(asked, ["--shrink", str(record["index"])]):
        if "shrunk" in line:
            record["script"], record["minimal"] = line["script"], line["config"]
            record["details"] = line["details"] or record["details"]
            held = telling(line["config"])
            causes.append({"index": record["index"], "status": record["status"], "telling": held})
            print(f"    {line['script']}: {', '.join(sorted(held))}", flush=True)


def progress(asked, found, began):
    outcomes = collections.Counter(record["status"] for record in found)
    told = ", ".join(f"{number} {status}" for status, number in outcomes.most_common())
    return f"{asked.backend}: {len(found)} configurations in {time.monotonic() - began:.0f} s: {told}"


def summed_up(asked, found, seconds):
    counts = collections.Counter()
    for record in found:
        counts.update(features(configuration(asked.seed, record["index"], asked.backend)))
    return {
        "backend": asked.backend,
        "seed": asked.seed,
        "first": asked.first,
        "without": sorted(asked.without),
        "configurations": len(found),
        "seconds": round(seconds),
        "outcomes": dict(collections.Counter(record["status"] for record in found).most_common()),
        "failures": [record for record in found if failed(record)],
        "features": dict(sorted(counts.items())),
    }
