"""A stack of the store as one wheel, for environments that have its torch.

Entry points: make.make_wheel, elf.Relocator.

Must not know: connections (what reads the store is passed in), or the command line. What the import of a wheel checks
is in env/wheel.
"""
