"""Connections to hosts: scripts sent over one SSH session per host, or run on this machine, and their output
read back line by line. The only package that imports paramiko and fabric.

Entry points: fleet.ConnectionPool (connections to all hosts of a run), jobs.Job (a script for one host),
jobs.Transport (the interface that others take as an argument), host.Host.

Must not know: what the scripts are for, facts, recipes, the prefix, or the lock. The ssh modules are for
this package alone.
"""
