"""What a service manager wants to hear (sd_notify): nothing where there is none."""

import contextlib
import socket

from kb_pipeline.settings import notify_socket


def tell_manager(state: str) -> None:
    """``READY=1``, ``STOPPING=1``. A manager that is not there any more is no reason to fail."""
    if not (address := notify_socket()):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract name
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(state.encode("ascii"), address)
