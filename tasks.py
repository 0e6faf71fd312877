"""Invoke tasks: the command line of deepep-bootstrap. Declarations only; `invoke --list` shows them,
`invoke VERB --help` their flags.

Every verb but `lab`, `results` and `diagnose` takes the common flags: the fields of `survey.Flags`. A verb's own flags
are the parameters of its function in cli/commands, the help texts of all flags are in `cli.app`.
"""

from __future__ import annotations

from functools import partial as _partial
from pathlib import Path as _Path

from deepep_bootstrap.cli import app as _app
from deepep_bootstrap.cli.commands import bootstrap as _bootstrap
from deepep_bootstrap.cli.commands import diagnose as _diagnose
from deepep_bootstrap.cli.commands import diff as _diff
from deepep_bootstrap.cli.commands import doctor as _doctor
from deepep_bootstrap.cli.commands import env as _env
from deepep_bootstrap.cli.commands import export as _export
from deepep_bootstrap.cli.commands import facts as _facts
from deepep_bootstrap.cli.commands import gc as _gc
from deepep_bootstrap.cli.commands import generations as _generations
from deepep_bootstrap.cli.commands import import_ as _import
from deepep_bootstrap.cli.commands import lab as _lab
from deepep_bootstrap.cli.commands import lock as _lock
from deepep_bootstrap.cli.commands import mirror as _mirror
from deepep_bootstrap.cli.commands import plan as _plan
from deepep_bootstrap.cli.commands import remove as _remove
from deepep_bootstrap.cli.commands import report as _report
from deepep_bootstrap.cli.commands import results as _results
from deepep_bootstrap.cli.commands import rollback as _rollback
from deepep_bootstrap.cli.commands import status as _status
from deepep_bootstrap.cli.commands import test as _test
from deepep_bootstrap.cli.commands import verify as _verify

verb = _partial(_app.verb, root=_Path(__file__).resolve().parent)

bootstrap = verb(_bootstrap.bootstrap)
plan = verb(_plan.plan)
facts = verb(_facts.facts)
env = verb(_env.env)
doctor = verb(_doctor.doctor)
status = verb(_status.status)
remove = verb(_remove.remove)
rollback = verb(_rollback.rollback)
report = verb(_report.report)
test = verb(_test.test)
lock = verb(_lock.lock)
mirror = verb(_mirror.mirror)
generations = verb(_generations.generations)
gc = verb(_gc.gc)
diff = verb(_diff.diff)
export = verb(_export.export)
import_ = verb(_import.import_)
verify = verb(_verify.verify)
results = verb(_results.results)
diagnose = verb(_diagnose.diagnose)
lab = verb(_lab.lab)

_app.refuse_bad_words(globals())
