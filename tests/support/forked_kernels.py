"""A plugin of pytest that starts the lessons' kernels as forks of one process, which has imported PyTorch.

A new process spends three seconds on imports, and every lesson has a kernel of its own. Only the packages of others are
imported before the fork. `helpers` is not, because a lesson's own imports are under test.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module

from jupyter_client.provisioning import local_provisioner


class ForkedKernel:
    """What jupyter_client uses of a `Popen`, for a process that is not a child of this one."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    wait = poll  # jupyter_client waits for a process that has ended

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def server() -> subprocess.Popen:
    """Start the process that forks. It ends when its standard input does, so at the latest with this one."""
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def launch_kernel(command: list[str], *, env: dict[str, str], cwd: str | None = None, **others) -> ForkedKernel:
    """Replace jupyter_client's function of this name."""
    order = {"arguments": command[command.index("ipykernel_launcher") + 1 :], "env": env, "cwd": cwd or os.getcwd()}
    server().stdin.write(json.dumps(order).encode() + b"\n")
    server().stdin.flush()
    return ForkedKernel(int(server().stdout.readline()))


def pytest_configure():
    if sys.platform == "linux":  # elsewhere, a process that has imported PyTorch may not be forked
        local_provisioner.launch_kernel = launch_kernel


def pytest_unconfigure():
    if server.cache_info().currsize:
        server().communicate()


def forget_ended(*_) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve() -> None:
    """Fork a kernel for each line of standard input, and write its process id."""
    for name in ("ipykernel.kernelapp", "matplotlib.figure", "transformers"):
        import_module(name)
    for name in ("AutoModelForCausalLM", "AutoTokenizer", "GenerationMixin", "GPT2LMHeadModel"):
        getattr(sys.modules["transformers"], name)  # imports a good part of PyTorch and transformers
    gc.freeze()
    signal.signal(signal.SIGCHLD, forget_ended)
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            become_kernel(**json.loads(line))
            return


def become_kernel(arguments: list[str], env: dict[str, str], cwd: str) -> None:
    from ipykernel import kernelapp

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # jupyter_client sends signals to the kernel's group
    print(os.getpid(), flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.environ.clear()
    os.environ.update(env, JPY_PARENT_PID=str(os.getppid()))
    os.chdir(cwd)
    del sys.path[0]  # the folder of this file
    sys.argv[1:] = arguments
    kernelapp.launch_new_instance()


if __name__ == "__main__":
    serve()
