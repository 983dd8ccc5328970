"""The sandbox of a submission: what its process sees of this machine, by bubblewrap.

It sees Python and its packages, the system's libraries and the package `helpers`, all read-only. The exercises'
reference implementations, the sources with solutions, other submissions and the user's files do not exist there, nor
does a network. What it writes goes to a small /tmp in memory.

Why bubblewrap: Debian, Ubuntu and Fedora have it; it needs no rights, no service and no image, and starts within 20 ms.
firejail runs as root and has profiles for desktop programs, nsjail is not in Debian 12, systemd-run needs systemd and a
user's session, and containers need a service and an image with all packages.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
HIDDEN = "helpers/checks/exercises"
TMP = "/tmp"
TMP_BYTES = 256 * 2**20


class NoSandboxError(Exception):
    """There is no working sandbox; the message says what to do."""


def python_command() -> list[str]:
    """Return the interpreter, without the links of a virtual environment: their targets may not be in the sandbox."""
    return [os.path.realpath(sys.executable), "-s"]


def environment(threads: int) -> dict[str, str]:
    """Return all environment variables of a submission's process."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": TMP,
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, HERE.parent, *_packages()])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "COURSE_MODEL": "",  # grades refer to the embedded model
        "COURSE_KERNEL_CACHE": "/dev/null/none",  # nothing is compiled
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
        "MPLCONFIGDIR": f"{TMP}/matplotlib",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def sandboxed(command: list[str]) -> list[str]:
    """Return the command that runs another one in the sandbox."""
    if os.getuid() == 0:  # the worker becomes another user, which a namespace of users would not know
        options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    options += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", TMP):
        options += ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", folder]
    for folder in ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin"):
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        else:
            options += ["--ro-bind-try", folder, folder]
    for path in ("/etc/alternatives", "/etc/fonts", "/etc/ld.so.cache", "/sys/devices/system/cpu"):
        options += [*_open(Path(path)), "--ro-bind-try", path, path]
    python = [Path("/usr"), Path(os.path.realpath(sys.base_prefix)), *_packages()]
    for path in [*python, ROOT / "helpers", HERE]:
        options += [*_open(path), "--ro-bind", str(path), str(path)]
    for folder in [ROOT, *_packages()]:
        if (folder / HIDDEN).exists():
            options += ["--tmpfs", str(folder / HIDDEN), "--remount-ro", str(folder / HIDDEN)]
    options += ["--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/", "--chdir", TMP]
    return [shutil.which("bwrap") or "bwrap", *options, "--", *command]


def require() -> None:
    """Make sure that the sandbox works on this machine.

    Raises:
        NoSandboxError: it does not.
    """
    if not shutil.which("bwrap"):
        raise NoSandboxError(
            "Submissions are programs, and grading runs them in a sandbox, for which this machine lacks bubblewrap. "
            "On Debian and Ubuntu: apt install bubblewrap; on Fedora: dnf install bubblewrap; on macOS and Windows: "
            "grade on Linux, in a virtual machine or WSL. Or give them all your rights with --no-sandbox."
        )
    command = sandboxed([*python_command(), "-c", "import helpers, grading"])
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NoSandboxError(
            f"Submissions run in a sandbox, and bubblewrap cannot make one here: {done.stderr.strip()[-300:]} "
            f"In a container it needs the right to make user namespaces. On Ubuntu 24.04, "
            f"`sysctl kernel.apparmor_restrict_unprivileged_userns=0` allows them. Or use --no-sandbox."
        )


def _open(path: Path) -> list[str]:
    """Return the options that let every user of the sandbox pass through the folders above a path."""
    folders = [folder for folder in reversed(path.parents) if folder not in (Path("/"), Path(TMP))]
    return [option for folder in folders for option in ("--perms", "0755", "--dir", str(folder))]


def _packages() -> list[Path]:
    """Return the folders of the installed packages."""
    return sorted({Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")})
