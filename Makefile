# make demo   the main job on the embedded cluster: real hosts, sshd and Slurm in namespaces of this machine
# make test   all tests
# make check  types, style, imports, shell
# make clean  everything these made

PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# Hosts in namespaces need root: a person with sudo gets all tests, without it those that need no root.
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] || { sudo -n true 2>/dev/null && echo 'sudo -E env PATH="$$PATH" PYTHONDONTWRITEBYTECODE=1'; })

.PHONY: demo test check bench clean

.venv/.ready: pyproject.toml tests/setup.sh
	bash tests/setup.sh venv

demo: .venv/.ready
	bash tests/setup.sh demo
	bash tests/demo.sh

# Three workers on two cores, since labs wait much. A file as a whole to one worker: what a module builds is built once. In the order of
# their names, so that the labs come first and the many short files fill the end. A worker that dies ends the run: the one that would
# take its place gets no work of a file as a whole, and the run would wait for it for ever.
test: .venv/.ready
	bash tests/setup.sh test
	$(AS_ROOT) $(CURDIR)/$(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 tests

check: .venv/.ready
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-cache
	$(PYTHON) tests/shellcheck_all.py

bench: .venv/.ready
	for bench in tests/bench/bench_*.py; do $(PYTHON) "$$bench" || exit; done

clean:
	if [ -x $(PYTHON) ]; then $(AS_ROOT) $(CURDIR)/$(PYTHON) -m invoke lab down; fi
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .hypothesis *-test.sbatch
	find . -name __pycache__ -type d -prune -exec rm -r {} +
