"""Test equipment: the embedded cluster, with several hosts, their own sshd and a real Slurm on one machine.
Not part of the wheel.

Entry points: cluster.up, cluster.down, cluster.state, cluster.reset.

Must not know: bootstrap, plans, the prefix. Nothing of the program but cli.commands.lab imports it; the
tests do.
"""
