"""What a test of ranks.py runs: processes through torch, as DeepEP's own tests start them, that end as the first word says."""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time

import torch

HOW = sys.argv[1] if len(sys.argv) > 1 else "well"
NUMBER = int(sys.argv[2]) if len(sys.argv) > 2 else 2
IMPORTED_AS = __name__


def rank(local_rank: int, how: str, number: int) -> None:
    libc = ctypes.CDLL(None)
    print(f"rank {local_rank} of {number}, imported as {IMPORTED_AS}", flush=True)
    libc.printf(b"C of %d\n", local_rank)
    if how == "lines":
        for line in range(1000):
            print(f"<{local_rank}:{line}:{'x' * (line % 80)}>", file=(sys.stdout, sys.stderr)[line % 2])
        libc.puts(f"<{local_rank}:C>".encode())
        print(f"no newline of {local_rank}", end="")
    elif how == "raise" and local_rank == 1:
        print("unflushed", end=" ")
        raise ValueError("wrong on purpose")
    elif how == "abort" and local_rank == 1:
        print("before the abort")
        libc.printf(b"C before the abort\n")
        libc.abort()
    elif how == "kill" and local_rank == 1:
        print("before the kill")
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit" and local_rank == 1:
        sys.exit(7)
    elif how == "leave" and local_rank == 1:
        subprocess.Popen(["sleep", "8"])  # holds the rank's output, so that its end is waited for
    elif how == "wait":
        print("waiting", flush=True)
        print("half a line", end="", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    print(
        f"launcher {sys.argv[1:]} {os.path.basename(sys.path[0])} {__file__ == os.path.abspath(__file__)}", flush=True
    )
    print(f"pid {os.getpid()}", flush=True)
    if how := {"fork": "fork"}.get(HOW):
        torch.multiprocessing.start_processes(rank, (HOW, NUMBER), NUMBER, start_method=how)
    elif HOW in {"later", "leave"}:
        context = torch.multiprocessing.start_processes(rank, (HOW, NUMBER), NUMBER, join=False)
        while not context.join():
            pass
    else:
        torch.multiprocessing.spawn(rank, args=(HOW, NUMBER), nprocs=NUMBER)
    if HOW == "leave":
        # Runs before what was registered earlier, which then waits: somebody has no patience.
        atexit.register(subprocess.Popen, ["sh", "-c", f"sleep 1; kill -INT {os.getpid()}"])
    print("launcher ends", flush=True)
