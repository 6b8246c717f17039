"""Configurations run in this process, one after the other. Whoever wants to survive a crash starts a child for it."""

import contextlib
import gc
import pathlib
import runpy
import signal
import tempfile

from fuzz.writing import script

# What ends a shrinking or a run with a non-zero exit status.
FAILURES = ("different", "raised", "did not raise", "did not refuse", "hang", "crash", "broken script")


class Hang(BaseException):
    """Not an Exception: what is tried must not catch it."""


@contextlib.contextmanager
def at_most(seconds):
    def ring(*_):
        raise Hang

    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def run(config, seconds=120):
    """What became of a configuration: see `comparing.outcome`, and "hang" and "broken script"."""
    with tempfile.TemporaryDirectory() as folder:
        # A file, because TensorFlow reads the source of functions.
        path = pathlib.Path(folder, "fuzzed.py")
        path.write_text(script(config))
        try:
            with at_most(seconds):
                found = runpy.run_path(str(path))
                return found["outcome"](found["CASE"])
        except Hang:
            return {"status": "hang", "details": [f"not done after {seconds} s"], "said": ""}
        except Exception as error:
            return {"status": "broken script", "details": [f"{type(error).__name__}: {error}"[:300]], "said": ""}
        finally:
            gc.collect()


def failed(found):
    return found["status"] in FAILURES


def kind_of(found):
    """What has to stay the same while a failing configuration is made smaller."""
    if found["status"] in ("raised", "broken script"):
        return "raised", found["details"][0].partition(":")[0]
    return (found["status"],)
