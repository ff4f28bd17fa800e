"""Takes a rank out of a collective that cannot end, because another rank will never join it.

A rank that waits in gloo, or for the rendezvous store, waits in C code: no signal and no exception reaches it, and
gloo has no way to give up. What it waits for is a connection to another rank. So a thread breaks those connections,
and the collective fails with an ordinary exception, in about 50 ms. The process group is of no use afterwards.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

import psutil

from nb_accelerate.protocol.messages import CutOff

if TYPE_CHECKING:
    from nb_accelerate.protocol.channel import Channel


def listen(channel: Channel) -> None:
    """Answer alarms from now on, also while the main thread is blocked."""
    threading.Thread(target=_listen, args=(channel,), name="nb_accelerate-alarm", daemon=True).start()


def _listen(channel: Channel) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            message, _ = channel.recv()
            if isinstance(message, CutOff):
                _abort_nccl()
                cut_connections(message.fellows)


def cut_connections(fellows: tuple[int, ...]) -> int:
    """Break every TCP connection between this process and others, by their process ids; returns how many."""
    theirs = set()
    for pid in fellows:
        with contextlib.suppress(psutil.Error):
            theirs |= {connection.laddr for connection in psutil.Process(pid).net_connections("tcp")}
    cut = 0
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr not in theirs or connection.fd < 0:
            continue
        with contextlib.suppress(OSError):  # closed meanwhile
            with socket.socket(fileno=os.dup(connection.fd)) as copy:
                copy.shutdown(socket.SHUT_RDWR)
            cut += 1
    return cut


def _abort_nccl() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if "nccl" in str(distributed.get_backend()):
        with contextlib.suppress(Exception):  # it is being torn down already
            distributed.distributed_c10d._abort_process_group()  # noqa: SLF001 - there is no public way
