"""The command line: flags and words checked, one Invoke task made of each command, logs named by people
found.

Entry points: program.main (the installed program), app.namespace (the verbs as Invoke's tasks), app.look_at_words,
verbs.declared, logs.names, lock_view.overview.

Must not know: how things are done. A command calls the packages below and reports the result.
"""
