"""Running a test on the hosts, through Slurm or over SSH, and bringing back the folder it leaves.

Entry points: placement.find_placement (where a test runs), slurm_run.submit, ssh_run.run_over_ssh,
run_folder.collect, run_folder.of_files.

Must not know: what figures and logs mean. A run that somebody else submitted has the same folder and is
treated alike.
"""
