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
from deepep_bootstrap.inventory.survey import Flags

verb = _partial(_app.verb, root=_Path(__file__).resolve().parent)

bootstrap = verb(_bootstrap.bootstrap)
plan = verb(_plan.plan)
facts = verb(_facts.facts)
doctor = verb(_doctor.doctor)
status = verb(_status.status)
remove = verb(_remove.remove)
rollback = verb(_rollback.rollback)
report = verb(_report.report)
test = verb(_test.test)


@verb
def lock(
    flags: Flags, check: bool = False, update: str = "", ref: str = "", version: str = "", download: bool = False
) -> int:
    """Say what is pinned and how old it is; check that it is still there and the same; update pins."""
    return _lock.lock(flags, check=check, update=update, ref=ref, version=version, download=download)


@verb
def mirror(flags: Flags, directory: str, check: bool = False, target: str = "", prune: bool = False) -> int:
    """Put everything that a bootstrap fetches into one directory, for --mirror where there is no network; --check
    hashes it again."""
    return _mirror.mirror(flags, directory, check=check, target=target, prune=prune)


@verb
def generations(flags: Flags) -> int:
    """List what the prefix offered over time and what it offers now: number, date, stacks, hosts, size."""
    return _generations.generations(flags)


@verb
def gc(flags: Flags, keep: str = "5") -> int:
    """Remove generations beyond the newest few, and store entries that no generation, running build or process of
    the hosts needs."""
    return _gc.gc(flags, keep=keep)


@verb
def diff(flags: Flags, old: str, new: str) -> int:
    """Say what changed between two generations (numbers) or two lock files (paths)."""
    return _diff.diff(flags, old=old, new=new)


@verb
def export(flags: Flags, out: str = "", generation: str = "", sign: str = "") -> int:
    """Write the store entries of a generation into one archive, with hashes and a signature, for another prefix to
    import."""
    return _export.export(flags, out=out, generation=generation, sign=sign)


@verb
def import_(flags: Flags, file: str, allowed_signers: str = "", insecure_unsigned: bool = False) -> int:
    """Bring the store entries of an archive into the prefix, once signature and hashes are right; bootstrap then
    builds nothing."""
    return _import.import_(flags, file=file, allowed_signers=allowed_signers, insecure_unsigned=insecure_unsigned)


@verb
def verify(flags: Flags, store: bool = False) -> int:
    """Load the module and import deep_ep through a login shell of every host; say which NVSHMEM is really used."""
    return _verify.verify(flags, store=store)


@verb
def results(logs: str, log: list[str] | None = None, json: bool = False) -> int:
    """Say what logs of DeepEP's tests tell: cases, best figures, slow and missing ranks, and whether all is well."""
    return _results.results((logs, *(log or ())), json=json)


@verb
def diagnose(logs: str, log: list[str] | None = None, causes: str = "", json: bool = False) -> int:
    """Say why something failed, out of its logs: causes with the lines that show them, why, and what mends it."""
    return _diagnose.diagnose((logs, *(log or ())), causes=causes, json=json)


@verb
def lab(action: str, layer: str = "lmod", dir: str = "", json: bool = False) -> int:
    """Bring the embedded cluster up or down (`invoke lab up`, `status`, `down`): hosts, sshd and Slurm in
    namespaces."""
    return _lab.lab(action, layer=layer, dir=dir, json=json)


_app.refuse_bad_words(globals())
