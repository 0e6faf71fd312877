"""Store entries in one file, for a prefix elsewhere: a tar stream whose first member is a signed index,
written and read in one pass and in bounded memory.

Entry points: index.parse_index, stream.read_trees, transfer.pull and transfer.push, signing.verify.

Must not know: what entries are for, offers and generations beyond the manifest that the index quotes, or
the command line. Nothing of an archive is believed before it was compared with its index.
"""
