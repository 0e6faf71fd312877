"""The command line: flags and words checked, one Invoke task made of each command, logs named by people
found.

Entry points: app.verb (the decorator), app.refuse_bad_words, logs.names, lock_view.overview.

Must not know: how things are done. A command calls the packages below and reports the result.
"""
