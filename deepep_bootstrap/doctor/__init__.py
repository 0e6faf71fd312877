"""Faults of hosts, why they matter, and the commands that mend them: facts, the checks of host recipes and
the view of a job's user in, findings out.

Entry points: examine.case_of, examine.examine, user_view.user_job, findings.Row (one check).

Must not know: how anything is mended, the command line, or runs of tests. A check is a function of one
host; hosts that should be alike are compared in consistency.
"""
