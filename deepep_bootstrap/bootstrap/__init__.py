"""The carrying out of a plan: hosts prepared, entries built, the offer published and proved. State is on the
hosts and in the prefix, so an interrupted run is begun again.

Entry points: planning.decide (from flags to a plan), hosts.run_recipes, reboots.reboot_hosts,
publish.build_entries, publish.publish_offer, publish.prove.

Must not know: words of the command line, figures of tests, or what other commands do. Packages beside it:
analysis, doctor.
"""
