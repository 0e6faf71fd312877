"""Run a test so that each of its ranks has a log file of its own.

    python ranks.py --logs DIR -- SCRIPT ARGUMENTS...

SCRIPT runs as `python SCRIPT ARGUMENTS...` would run it: the same __main__, arguments, search path, exit code and
signals, in this very process. What it prints goes where it went before. In addition, whatever a process started through
torch.multiprocessing writes to stdout or stderr, by Python, by a C library or by a kernel's printf, is added to
DIR/rank-<number>.log, up to the last byte before it crashed or was killed. The number is RANK x processes per node +
index of the process: RANK is this node's index, as for DeepEP's own tests. The file ends with the traceback where the
rank ended by an exception.

On the shared output, lines of different ranks are never mixed within a line. A script that starts no process through
torch is not changed by this program. Where DIR cannot be written, a warning says so and the script runs without rank
logs.
"""

import argparse
import builtins
import importlib.machinery
import os
import sys
import types

HERE = os.path.dirname(os.path.realpath(__file__))
ISOLATED = sys.path[:1] != [HERE]  # python -P or -I: there SCRIPT's folder is not on the path either
if ISOLATED:
    sys.path.insert(0, HERE)

import rank_logs  # noqa: E402 - after the line that makes it importable


def parse(words: list[str]) -> argparse.Namespace:
    """Return the command line's values: logs, script, arguments."""
    parser = argparse.ArgumentParser(
        prog="ranks.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--logs", required=True, metavar="DIR", help="folder for rank-<number>.log; it is made if it is not there"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the Python program to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what it gets")
    return parser.parse_args(words)


def become(script: str, arguments: list[str]) -> None:
    """Run `script` as the main program of this process; ends with code 2 where it cannot be read, as Python does."""
    path = os.path.abspath(script)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"ranks.py: can't open file '{path}': {error.strerror}", file=sys.stderr)
        sys.exit(2)
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path, __builtins__=builtins, __loader__=importlib.machinery.SourceFileLoader("__main__", path)
    )
    sys.modules["__main__"] = module
    sys.argv = [script, *arguments]
    sys.path[:1] = [] if ISOLATED else [os.path.dirname(os.path.realpath(path))]
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the program that the user named


def main() -> None:
    """Run the command line."""
    chosen = parse(sys.argv[1:])
    rank_logs.install(os.path.abspath(chosen.logs))
    become(chosen.script, chosen.arguments)


if __name__ == "__main__":
    main()
