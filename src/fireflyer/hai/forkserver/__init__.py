"""The fork server: a process that has imported the slow modules and forks ranks in milliseconds.

    python -P -m fireflyer.hai.forkserver FD MODULE... TITLE_ROOM   (FD: socket to the supervisor)

Forking is safe because this process has exactly one thread (checked before every fork). The process
never runs a tensor operation, which would start a thread pool that a forked child lacks. A rank is
forked twice, and the supervisor, a subreaper, adopts the rank. Exit status and kill therefore work
as for the supervisor's own child. The ranks of a request wait until all of them are forked and
reported; then they run.
"""

import contextlib
import gc
import importlib
import io
import os
import socket
import sys
from types import ModuleType

import msgspec

from fireflyer import allocator, heartbeat
from fireflyer._native.hai import set_process_title
from fireflyer.hai.supervisor.messages import Fork, Forked, RankSpec, Ready, Refused
from fireflyer.hai.supervisor.rankstart import become_rank
from fireflyer.haiprof.inside import prepare as haiprof
from fireflyer.rpc import FrameBuffer, frame

DEFAULT_PRELOAD = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer; 1.2 s
    "fireflyer.ffrecord.torch",
    "fireflyer.checkpoint.manager",
    "fireflyer.hfreduce.torch",
    "fireflyer.haiscale.ddp",
)
"""Modules that a training script imports. They are imported by name at run time, because the
platform itself never needs torch. A machine without torch still runs scripts without torch.
"""


def main(arguments: list[str]) -> RankSpec | None:
    """Serves until the supervisor disconnects (None); in a rank, returns the spec of that rank."""
    haiprof.refuse()
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    preload(arguments[1:-1])
    return serve(control)


def serve(control: socket.socket) -> RankSpec | None:
    """Serves requests after the modules are imported; returns like `main`."""
    encode = msgspec.msgpack.Encoder().encode
    decoder = msgspec.msgpack.Decoder(Fork)
    control.sendall(frame(encode(Ready())))
    buffer = FrameBuffer()
    while data := control.recv(1 << 16):
        for payload in buffer.feed(data):
            request = decoder.decode(payload)
            go_read, go_write = os.pipe()
            try:
                pids = []
                for spec in request.ranks:
                    pid = _fork_rank()
                    if pid == 0:
                        control.close()
                        os.close(go_write)
                        return _enter(spec, request.parent, go_read)
                    pids.append(pid)
            except OSError as error:
                control.sendall(
                    frame(encode(Refused(reason=f"cannot fork a rank: {error.strerror}")))
                )
            else:
                control.sendall(frame(encode(Forked(pids=tuple(pids)))))
                os.write(go_write, bytes(len(pids)))
            os.close(go_read)
            os.close(go_write)
    return None


def preload(names: list[str]) -> None:
    """Imports the modules that exist, so that all forked processes share them."""
    for name in names:
        # Any other error ends this process: a partly imported module cannot be imported again.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    # Garbage collection skips frozen objects. In a rank it would otherwise write to the shared
    # pages, and each written page would be copied.
    gc.freeze()
    require_one_thread()


def require_one_thread() -> None:
    """Ends this process if it has several threads, because a fork would lose all but one of
    them."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(
            f"fork server: {threads} threads after the imports; a fork would lose all but one of them"
        )


def _fork_rank() -> int:
    """Forks twice; returns 0 in the grandchild, and the grandchild's pid in this process. Reaps the
    intermediate process."""
    require_one_thread()
    readable, writable = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            os.close(readable)
            pid = os.fork()
            if pid == 0:
                os.close(writable)
                return 0
            os.write(writable, str(pid).encode())
        except OSError as error:
            os.write(writable, f"-{error.errno}".encode())
        os._exit(0)
    os.close(writable)
    with open(readable, "rb") as pipe:
        # No data: the intermediate process was killed; 10 is ECHILD.
        number = int(pipe.read() or b"-10")
    os.waitpid(between, 0)
    if number < 0:
        raise OSError(-number, os.strerror(-number))
    return number


def _enter(spec: RankSpec, parent: int, go: int) -> RankSpec:
    """Turns the forked process into the rank, once the server sends the start byte."""
    if not os.read(go, 1):  # the server died, or abandoned the request
        os._exit(1)
    os.close(go)
    try:
        become_rank(spec, parent)
    except OSError as error:
        os.write(2, f"rank {spec.rank} cannot start: {error}\n".encode())
        os._exit(1)
    os.environ.clear()
    os.environ.update(spec.env)
    allocator.follow(spec.env)
    heartbeat.write_stacks_on_signal()
    set_process_title(show([sys.executable, "-u", spec.script, *spec.args]), b"")
    _restart_interpreter_state(spec)
    haiprof.allow()
    haiprof.prepare()
    return spec


def show(entries: list[str]) -> bytes:
    """Returns the entries in the form that `set_process_title` takes."""
    return b"".join(os.fsencode(entry) + b"\0" for entry in entries)


def _restart_interpreter_state(spec: RankSpec) -> None:
    """Sets up what a fresh interpreter derives from its arguments and environment."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    sys.argv = [spec.script, *spec.args]
    added = [p for p in spec.env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    sys.path[:0] = [os.path.dirname(spec.script), *added]
    # `random` reseeds itself after a fork; NumPy's global generator does not.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    threads = spec.env.get("OMP_NUM_THREADS", "1")
    if torch is not None and threads.isdecimal() and int(threads) > 1:
        # When the fork server imported torch, torch read OMP_NUM_THREADS=1.
        torch.set_num_threads(int(threads))


def run_script(spec: RankSpec) -> None:
    """Runs the script as `__main__`, as `python script` does.

    This function does not use runpy, which removes `__main__` when the script ends. Threads and
    exit handlers that are still running could then not pickle the script's classes.
    """
    module = ModuleType("__main__")
    module.__dict__.update(__file__=spec.script, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = module
    try:
        with io.open_code(spec.script) as file:
            code = compile(file.read(), spec.script, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except Exception as error:  # noqa: BLE001
        where = error.__traceback__
        while where is not None and where.tb_frame.f_code.co_filename == __file__:
            where = where.tb_next
        sys.excepthook(type(error), error.with_traceback(where), where)
        sys.exit(1)
