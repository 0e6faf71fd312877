"""Rolling reboots: hosts drained in Slurm, changed, rebooted, looked at and resumed, some at a time, without
ending a job.

Entry points: rollout.roll, rollout.bring_back, policy.read_policy (flags), drained.left_behind.

Must not know: recipes, facts or plans: what is done on a host comes in as policy.RebootActions. The
reason of a drained node is all that is remembered between runs.
"""
