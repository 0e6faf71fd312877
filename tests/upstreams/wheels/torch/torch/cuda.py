"""GPUs as far as the device files tell."""

import pathlib
from types import SimpleNamespace

MEMORY = 2 << 20  # bytes that a GPU is said to have: who goes by it moves no more than CPUs can
nccl = SimpleNamespace(version=lambda: (2, 27, 5))  # of torch 2.10; the messages go over TCP


current = 0  # the GPU of this process


def device_count() -> int:
    """How many GPU device files there are."""
    return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def is_available() -> bool:
    """Say whether there is any."""
    return device_count() > 0


def get_device_properties(device) -> SimpleNamespace:
    """What is known of a GPU: its memory."""
    return SimpleNamespace(name="CPU stand-in", total_memory=MEMORY)


def set_device(device) -> None:
    """Which GPU is this process's: its network card is the one that counts."""
    global current
    current = device if isinstance(device, int) else device.index


def synchronize() -> None:
    """Nothing runs by itself."""
