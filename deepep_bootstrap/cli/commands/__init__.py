"""One command a file: flags in, an exit code out. A command reads its flags, calls the packages
below, and reports the outcome on a terminal, as plain lines, or as one JSON document.

Entry points: the function of the file's name, such as bootstrap.bootstrap, test.test and doctor.doctor;
tasks.py declares them.

Must not know: other commands. What two of them need belongs to a package below.
"""
