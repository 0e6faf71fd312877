"""The directory that `invoke mirror` writes: everything that bootstraps of some stacks fetch, in a form that
any web server can serve.

Entry points: selection.choose_contents (stacks and targets it is for), fill.fill,
index.read_mirror_index, index.lacking.

Must not know: hosts, the prefix, or the command line. The truth is the lock: a mirror's own index is
never believed without the hashes.
"""
