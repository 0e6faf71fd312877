"""Network cards of the embedded cluster: their counters grow as if messages had gone over them."""

import os

from . import cuda

SWITCHES = "/run/lab/fake"  # only hosts of the embedded cluster have it; a file STANDIN_FROZEN_NIC names a card that stands still
INFINIBAND = "/sys/class/infiniband"
SENT = 1 << 28  # words of four bytes


def move() -> None:
    """Let the card that belongs to this process's GPU count."""
    if not os.path.isdir(SWITCHES) or not os.path.isdir(INFINIBAND):
        return
    devices = sorted(os.listdir(INFINIBAND))
    device = devices[cuda.current % len(devices)]
    try:
        with open(f"{SWITCHES}/STANDIN_FROZEN_NIC") as file:
            frozen = file.read().strip()
    except OSError:
        frozen = ""
    for name in ("port_xmit_data", "port_rcv_data") if device != frozen else ():
        with open(f"{INFINIBAND}/{device}/ports/1/counters/{name}", "r+") as file:
            count = int(file.read()) + SENT
            file.seek(0)
            file.write(f"{count}\n")
