"""Decisions, then steps: facts, lock and flags in, a plan with a reason for each step out. No I/O of its
own.

Entry points: decisions.make_decisions (hosts, Python, toolkit, settings, entries, offer),
host_recipes.check_script and host_recipes.parse_checks, steps.make_plan.

Must not know: connections, who carries the steps out, or how the run is shown. What it needs of hosts
comes in as facts.
"""
