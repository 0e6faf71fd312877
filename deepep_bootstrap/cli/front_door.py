"""Invoke as the parser and runner of the installed program."""

from __future__ import annotations

import sys

from invoke.exceptions import Exit
from invoke.program import Program

from deepep_bootstrap.cli import app
from deepep_bootstrap.core import program


def run() -> None:
    """Run the verbs of the command line and end with their exit code. No flag of Invoke's own comes through:
    `app.look_at_words` refuses what stands before a verb."""
    try:
        namespace = app.namespace()
        app.look_at_words(namespace)
    except Exit as end:
        sys.exit(end.code)
    Program(name=program.NAME, binary=program.NAME, namespace=namespace).run()
