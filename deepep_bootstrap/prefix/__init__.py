"""The shared directory of a cluster: store entries and their names, generations and their files, the offer,
garbage, and the bill of materials. Python composes texts; recipes on the prefix's host do the file work.

Entry points: entries.entries (names of the store), offer.Offer, modulefiles.render_offer,
generations.publish_generation, history.read_contents.

Must not know: how entries are built, how hosts are prepared, or how a plan is made.
"""
