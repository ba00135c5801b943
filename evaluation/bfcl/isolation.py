"""What the checker's process gives up before it sees a model's text.

The official executor passes the model's text to `eval`, behind a deny-list of eight names. Whatever gets past it runs
with what this process may do, so the process keeps little: its memory and processor time are bounded, it has no
network where the kernel lets it leave the network's namespace, and an audit hook (PEP 578) refuses sockets, other
processes, native libraries, and every file but those of Python and its packages, which can only be read. An audit
hook is no proof against an attacker who writes for it; it stops what a model's text does by the standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import sysconfig
from typing import Any

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 3600

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Families of audit events, and single ones, that nothing in the checkers raises.
_REFUSED_FAMILIES = frozenset(
    ("socket", "subprocess", "shutil", "ctypes", "fcntl", "ftplib", "http", "smtplib", "urllib", "pty")
)
_REFUSED = frozenset(
    (
        *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system"),
        *("os.kill", "os.killpg", "signal.pthread_kill"),
        *("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "os.utime"),
        *("os.chflags", "os.chmod", "os.chown", "os.lockf", "os.setxattr", "os.removexattr"),
        *("os.putenv", "os.unsetenv", "resource.setrlimit", "resource.prlimit"),
        *("code.__new__", "sys.addaudithook"),
    )
)
_FILES = frozenset(("open", "os.listdir", "os.scandir"))


def limit_resources() -> None:
    """No file may grow, no core be dumped, memory and processor time are bounded."""
    for what, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def leave_network() -> bool:
    """Moves this process into a network namespace without interfaces; False where the kernel doesn't allow it.

    Needs Linux and either the right to do so or user namespaces; the process must not have started a thread.
    """
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except (OSError, AttributeError):
        return False
    return any(unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))


def refuse_outside() -> None:
    """Installs the audit hook; it can't be removed. Modules that are still to be imported lie in Python's folders."""
    folders = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    readable = tuple(os.path.realpath(folder) + os.sep for folder in folders)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILES:
            _check_file(event, arguments, readable)
        elif event in _REFUSED or event.partition(".")[0] in _REFUSED_FAMILIES:
            raise PermissionError(f"{event} is refused while model output is executed")

    sys.addaudithook(hook)


def _check_file(event: str, arguments: tuple[Any, ...], readable: tuple[str, ...]) -> None:
    path, flags = arguments[0], arguments[2] if event == "open" else 0
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    inside = isinstance(path, str) and (os.path.realpath(path) + os.sep).startswith(readable)
    if not inside or (isinstance(flags, int) and flags & _WRITING):
        raise PermissionError(f"{event} is refused while model output is executed")


def isolate() -> str:
    """All of it, in order; returns in words what holds, for the record."""
    without_network = leave_network()
    limit_resources()
    refuse_outside()
    network = "no network (namespace of its own)" if without_network else "sockets refused"
    return f"{network}, files and processes refused, {MEMORY_BYTES >> 20} MiB"
