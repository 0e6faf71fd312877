"""Judging a run from its files: figures of its logs, references and limits of the hardware, traffic of the
NICs, causes of a failure.

Entry points: assess.assess (all of it), compare.judge, traffic.judge_traffic, site_references.saved.

Must not know: how a test was started or followed, Slurm, or how a report looks. Only tuning.shelf takes a
connection.
"""
