"""Processes of their own for scenarios of tests, each forked from one that has imported the framework already.

Importing is most of what a small child process does, so it is done once. `Forks().run("oom_child", "commit", …)` calls
`oom_child.main("commit", …)` in a new process and returns what it printed. Run as a script, this is the process that
forks: it reads a job a line, starts each at once, and prints how each of them ended.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

HERE = pathlib.Path(__file__).parent


class Forks:
    """Starts such processes. `environment` holds for all of them, also while the framework is imported."""

    def __init__(self, environment):
        path = [str(HERE.parents[1] / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment}
        self._folder = tempfile.TemporaryDirectory()
        self._errors = self._file("server").open("wb")
        command = [sys.executable, str(HERE / "forks.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._server = subprocess.Popen(command, env=env, text=True, **pipes)
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._ended = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self, module, *arguments, environment=None, timeout=400):
        """What `module.main(*arguments)` prints in a process whose environment holds this, too."""
        number, ended = next(self._numbers), concurrent.futures.Future()
        self._ended[number] = ended
        files = [str(self._file(f"{number}.{name}")) for name in ("out", "err")]
        job = {"number": number, "module": module, "arguments": arguments, "environment": environment or {}}
        with self._lock:
            self._server.stdin.write(json.dumps(job | {"files": files}) + "\n")
            self._server.stdin.flush()
        code = ended.result(timeout)
        printed, errors = (pathlib.Path(file).read_text(errors="replace") for file in files)
        assert code == 0, f"{module} {arguments} ended with {code}:\n{errors[-4000:]}"
        return printed

    def close(self):
        """Ends the process that forks, and those that are left."""
        self._server.stdin.close()
        self._server.wait()
        self._errors.close()
        self._folder.cleanup()

    def _file(self, name):
        return pathlib.Path(self._folder.name, name)

    def _listen(self):
        for line in self._server.stdout:
            number, code = json.loads(line)
            self._ended[number].set_result(code)
        for ended in self._ended.values():
            if not ended.done():
                ended.set_exception(AssertionError(self._file("server").read_text(errors="replace")[-4000:]))


def serve():
    """Forks for each job a process that waits for its end, and with it the process of the job itself."""
    if os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
        # Keras imports TensorFlow wherever it is installed, which takes hundreds of megabytes.
        sys.modules["tensorflow"] = None
    import keras  # noqa: F401

    import oomproof._backends

    oomproof._backends.current()
    signal.signal(signal.SIGCHLD, _reap)
    os.setpgid(0, 0)
    for line in sys.stdin:
        job = json.loads(line)
        if os.fork() == 0:
            os.write(1, (json.dumps([job["number"], _code_of(job)]) + "\n").encode())
            os._exit(0)
    # Nobody waits for what is still running.
    os.killpg(0, signal.SIGKILL)


def _reap(*_):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _code_of(job):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.environ.update(job["environment"])
    for file, descriptor in zip(job["files"], (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    code = 1
    try:
        importlib.import_module(job["module"]).main(*job["arguments"])
        sys.stdout.flush()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
