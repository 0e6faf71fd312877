"""Invoke tasks: the command line of deepep-bootstrap in the source tree. `invoke --list` shows the verbs, `invoke VERB
--help` their flags; an installed `deepep-bootstrap` has the same.

A verb is a function in deepep_bootstrap/cli/commands; its row in deepep_bootstrap/cli/verbs.py says which common flags
it takes, and what every flag means.
"""

from __future__ import annotations

import sys as _sys

# Invoke forbids it while it reads this file, and then Python would compile all of this package for every command.
_sys.dont_write_bytecode = bool(_sys.flags.dont_write_bytecode)

try:
    from deepep_bootstrap.cli import app as _app
except ModuleNotFoundError as _error:
    if _error.name is None or _error.name.startswith("deepep_bootstrap"):
        raise
    # As core/guard.py says it once the engine is there: its own message cannot be made here, it needs msgspec itself.
    _sys.exit(
        f"invoke: the Python package of `import {_error.name}` is not there — found none for {_sys.executable}, "
        f"wanted the dependencies in pyproject.toml. Try: {_sys.executable} -m pip install ., in the checkout"
    )

namespace = _app.namespace()

_app.look_at_words(namespace)
