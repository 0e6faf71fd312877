"""A launcher that is told to end (SIGTERM) while it starts its ranks, or after: `stopped_demo.py starting|waiting`. Its ranks sleep."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "env" / "programs"))

import launching
import torch


def sleep(_: int) -> None:
    """Be a rank that waits for others that never come."""
    time.sleep(600)


def main(when: str) -> int:
    """Start two ranks, with the signal where it was asked for."""
    spawn = torch.multiprocessing.spawn

    def interrupted(*words: object, **names: object) -> object:
        context = spawn(*words, **names)
        print("ranks", *context.pids(), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # handlers run between two instructions: before this function has returned
        return context

    if when == "starting":
        torch.multiprocessing.spawn = interrupted
    context = launching.start(sleep, (), 2)
    if when == "waiting":
        print("ranks", *context.pids(), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    print(launching.wait_for(context, 60))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
