"""`spawn` and `start_processes`: the function is called as `fn(index, *args)` in each process."""

import ctypes
import multiprocessing
import multiprocessing.connection
import signal
import sys
import traceback

PR_SET_PDEATHSIG = 1
GRACE = 30.0  # seconds between SIGTERM and SIGKILL for the others when one has failed


class ProcessExitedException(Exception):
    """A process ended by a signal or with an exit code that is not 0."""


class ProcessRaisedException(Exception):
    """The function raised; the message holds its traceback."""


def _run(fn, index, args, sender) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    try:
        fn(index, *args)
    except KeyboardInterrupt:
        pass
    except Exception:
        sender.send(traceback.format_exc())
        sys.exit(1)


class ProcessContext:
    """The processes of one start, in the order of their index."""

    def __init__(self, processes: list, receivers: list) -> None:
        self.processes, self._receivers = processes, receivers
        self.sentinels = {process.sentinel: index for index, process in enumerate(processes)}

    def pids(self) -> list:
        """The process ids."""
        return [process.pid for process in self.processes]

    def join(self, timeout=None) -> bool:
        """Wait for the next to end; True once all have. If one failed, the others are ended and an exception is raised."""
        for sentinel in multiprocessing.connection.wait(list(self.sentinels), timeout):
            index = self.sentinels.pop(sentinel)
            self.processes[index].join()
            if self.processes[index].exitcode != 0:
                self._end_others()
                raise self._failure(index)
        return not self.sentinels

    def _end_others(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()

    def _failure(self, index: int) -> Exception:
        code = self.processes[index].exitcode
        try:
            trace = self._receivers[index].recv() if self._receivers[index].poll() else ""
        except EOFError:
            trace = ""
        if trace:
            return ProcessRaisedException(f"\n\n-- Process {index} terminated with the following error:\n{trace}")
        if code < 0:
            return ProcessExitedException(f"process {index} terminated with signal {signal.Signals(-code).name}")
        return ProcessExitedException(f"process {index} terminated with exit code {code}")


def start_processes(fn, args=(), nprocs=1, join=True, daemon=False, start_method="spawn"):
    """Start `nprocs` processes; with `join` wait for all of them, else return their ProcessContext."""
    method = multiprocessing.get_context(start_method)
    processes, receivers = [], []
    for index in range(nprocs):
        receiver, sender = method.Pipe(duplex=False)
        process = method.Process(target=_run, args=(fn, index, args, sender), daemon=daemon)
        process.start()
        sender.close()
        processes.append(process)
        receivers.append(receiver)
    context = ProcessContext(processes, receivers)
    while join and not context.join():
        pass
    return None if join else context


def spawn(fn, args=(), nprocs=1, join=True, daemon=False, start_method="spawn"):
    """`start_processes` with fresh interpreters, whatever `start_method` says, as upstream does."""
    return start_processes(fn, args, nprocs, join, daemon, start_method="spawn")
