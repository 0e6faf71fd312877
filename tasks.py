"""Invoke tasks: the command line of deepep-bootstrap in the source tree. `invoke --list` shows the verbs, `invoke VERB
--help` their flags; an installed `deepep-bootstrap` has the same.

A verb is a function in deepep_bootstrap/cli/commands; its row in deepep_bootstrap/cli/verbs.py says which common flags
it takes, and what every flag means.
"""

from __future__ import annotations

from deepep_bootstrap.cli import app as _app

namespace = _app.namespace()

_app.look_at_words(namespace)
