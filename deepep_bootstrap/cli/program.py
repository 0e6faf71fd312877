"""The installed program `deepep-bootstrap`: the verbs of tasks.py, without Invoke's own flags."""

from __future__ import annotations

import sys

VERSION = frozenset(("--version", "-V"))


def main() -> None:
    """Run the verb of the command line, or say what may come next on one."""
    words = sys.argv[1:]
    # What follows imports Invoke, rich and more: a shell that completes a word does not wait for that.
    if words[:1] == ["--complete"]:
        from deepep_bootstrap.cli import complete

        complete.main(words[1:])
        return
    if len(words) == 1 and words[0] in VERSION:
        sys.argv[1:] = ["version"]
    from deepep_bootstrap.cli import front_door

    front_door.run()
