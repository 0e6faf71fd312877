"""The network beyond the hosts: git sources, single files, wheels, package indexes and mirrors. Nothing that
is brought is read before its hash was compared with the lock.

Entry points: sources.fetch_source, wheels.fetch_wheels, locations.read_mirrors, renew.renew_source.

Must not know: hosts and their connections, the prefix, or what is built from what it brings. It writes
caches, never the lock.
"""
