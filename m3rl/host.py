"""Which machine this is."""

from __future__ import annotations

import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Of containers of one machine, too."""


def this_host() -> str:
    """Names the machine, or the container there."""
    return f"{socket.gethostname()} {BOOT_ID.read_text().strip() if BOOT_ID.exists() else ''}"
