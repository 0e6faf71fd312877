"""Building blocks without knowledge of DeepEP: messages and exit codes, the console, processes of this
machine, and the text and file formats that others read and write.

Entry points: errors.Trouble and errors.Problem (expected trouble), guard.guarded (the one place where
everything is caught), console.Screen (the output of a command), process.run_program, toml.Table,
records.read_records and filetree.hash_path.

Must not know: hosts, the lock, Slurm, the network, or any other package of this program.
"""
