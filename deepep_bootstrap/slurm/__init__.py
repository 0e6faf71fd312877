"""Slurm's words: command lines as argument lists, and parsers of what its clients print, for jobs and for
nodes around a reboot.

Entry points: commands.request_options, commands.parse_job, nodes.parse_look, nodes.drain.

Must not know: who runs the commands and over which connection, and why a job or a reboot is wanted.
"""
