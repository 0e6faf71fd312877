"""The words of the command line: what every flag means, and which words a verb takes without their flag.

Nothing heavy is imported here: completion reads this at every press of a key.
"""

from __future__ import annotations

HELP = {
    "hosts": "a hosts file (hosts/b200.txt) or a node set (b200-[001-016])",
    "limit": "only these hosts of it, as a node set",
    "lock": "the lock file (default: deepep.lock.toml beside tasks.py)",
    "stack": "which stack (bootstrap, plan: the lock's default_stack; verify, test: what `module load deepep` gives; "
    "mirror: all, or some joined by commas)",
    "prefix": "the shared directory everything is installed under (default: the hosts file's)",
    "mirror": "PREFIX=REPLACEMENT, index:NAME=DIR_OR_URL, or the DIR_OR_URL of what invoke mirror wrote; may be "
    "given more than once",
    "directory": "the directory of the mirror",
    "target": "wheels for these targets only, joined by commas: cp312-x86_64,cp311-x86_64 (default: all of the lock)",
    "prune": "remove what the mirror holds beside what is wanted now",
    "python": "path of an existing interpreter with torch on the hosts, instead of the locked wheels",
    "dry_run": "say what would be done and change nothing",
    "yes": "do not ask before changing something",
    "json": "one JSON document on stdout and nothing else",
    "check": "change nothing; the exit code tells (plan: 2 when there is something to do; lock: 1 when a pin is not "
    "as locked; "
    "mirror: 4 when a file is not as the index says, or a pin of the lock is missing)",
    "update": "the pin to renew: a source, python (the wheels of all stacks, or of --stack), or all",
    "download": "check wheels by fetching each (gigabytes) instead of asking its index for hash and size",
    "ref": "what the renewed pin follows: a branch, a tag, refs/pull/N/head or a commit",
    "version": "the project's own version of the renewed pin (default: read from its tag, else kept)",
    "accept_new_host_keys": "trust hosts seen for the first time: print their key's fingerprint and record it",
    "sudo_password_prompt": "ask once for the password of sudo",
    "on_busy_host": "`leave` (default) or `use` a host whose GPUs are in use",
    "forks": "how many hosts to talk to at the same time (default 64)",
    "archs": "compute capabilities to build for besides those of the GPUs that are seen: 9.0,10.0 "
    "(a machine for images, a build farm: these alone)",
    "skip": "host recipes to leave alone: all, or names such as limits,driver-options,module-hook; smoke: no test at "
    "the end",
    "reboot": "hosts that need one: never, ask (default; never without a terminal), rolling, rolling:K or all",
    "as_": "look as this user of the hosts (default: the connection's own)",
    "strict": "exit 4 also when there are warnings",
    "reboot_window": "start reboots only in these hours, local time: 22:00-06:00",
    "reservation": "the Slurm reservation whose nodes may be rebooted",
    "drain_timeout": "how long to wait until a drained node is idle: 90s, 30m, 4h (default)",
    "boot_timeout": "how long a host may take to come back (default 30m)",
    "reload_driver": "load the driver anew instead of a reboot, where no process uses the GPUs",
    "to": "the generation to make current (default: the newest before the current one)",
    "keep": "how many of the newest generations stay (default 5); the current one always does",
    "old": "a generation's number, or a lock file",
    "new": "another generation's number, or another lock file",
    "verbose": "say everything: each fact that differs (diff), also the notes that were shown before (plan, bootstrap)",
    "store": "compare every file of the store with what was published, and nothing else",
    "out": "the file to write: an archive, whose signature gets the same name and .sig (export); the plan (plan)",
    "plan": "the file of `plan --out=FILE`: do exactly that, or say what has changed since",
    "generation": "the generation's number (default: the current one)",
    "sign": "sign with this SSH key: the file of a private key, or of a public one that ssh-agent knows",
    "file": "an archive that `invoke export` wrote",
    "allowed_signers": "whose signature counts: a file in the format ALLOWED SIGNERS of ssh-keygen's manual",
    "insecure_unsigned": "import an archive without looking for a signature",
    "run": "a run of `invoke test`: its folder on this machine, or with --hosts its name (default: the newest)",
    "html": "write the report as one HTML file, to this new file",
    "cluster": "the whole cluster in place of a run: hosts, findings, stacks, generations, last runs",
    "bundle": "write one archive for a bug report, to this file (default: deepep-report-TIME.tar.gz here)",
    "scrub_hosts": "put host-1, host-2 … for the names of hosts and [address] for IP addresses",
    "kind": "internode (default), intranode, low-latency, pressure, ep (DeepEP V2), nccl, pairs, smoke, "
    "example-prefill or example-decode",
    "via": "slurm (default where it runs) or ssh: without Slurm, over the connections to the hosts",
    "nodes": "how many nodes take part (default: the kind's own number; pairs: all)",
    "time_limit": "how long the test may run: 90s, 30m, 4h (default: the kind's own, from 10m for smoke to 4h for "
    "pressure)",
    "save_as_reference": "keep the figures as this site's references, for later runs to be compared with",
    "args": "arguments for upstream's test, e.g. --args='--num-tokens 2048'",
    "start_timeout": "seconds to wait for the nodes (default 600)",
    "logs": "logs, folders of logs (*.log, *.out), globs, or --logs=- for standard input",
    "log": "one more of them; may be given more than once",
    "causes": "a file of causes of your own, in the form of env/rules/causes.toml",
    "action": "up, down or status",
    "layer": "the lab's module system: lmod (default) or environment-modules",
    "dir": "the lab's folder (default: /run/deepep-lab for root)",
}
"""One help text a flag: a flag means the same in every verb."""

OPTIONAL, ITERABLE = frozenset(("bundle",)), frozenset(("mirror", "log"))
MAY_BE_BARE = frozenset(("run",))
"""Parameters of a verb that are also taken without their flag. Invoke knows no optional arguments, so the command
line decides."""

FURTHER = {"logs": "log"}
"""First arguments that may come again and again, and the flag that does the same. Invoke knows no such arguments
either."""
