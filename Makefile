# make quick        the tests that start no process and open no socket: under a minute
# make test         the tests; P=lock those of one package, tests/lock, and P=analysis/results those of a part of one
# make long         those that `make test` leaves out: minutes each of compilers and clusters, about what changes rarely
# make hostile      every attack and every kill of tests/hostile, about 8 minutes; writes the table of faults into SECURITY.md
# make check        types, style, imports, complexity, shell
# make demo         the main job on the embedded cluster: real hosts, sshd and Slurm in namespaces of this machine
# make docs         the documentation as a site: build/docs/index.html; a broken link ends it
# make screenshots  the pictures of terminals in docs/screens, taken anew on the embedded cluster (root, tmux)
# make clean        everything these made

PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Tests start this program a thousand times: without compiled modules each start would compile all of them.
unexport PYTHONDONTWRITEBYTECODE
COMPILE := $(PYTHON) -m compileall -q deepep_bootstrap tasks.py

# Hosts in namespaces need root: a person with sudo gets all tests, without it those that need no root.
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] || { sudo -n true 2>/dev/null && echo 'sudo -E env PATH="$$PATH" PYTHONDONTWRITEBYTECODE=1'; })

# One package for `make test`, as a folder below tests, and more words for pytest.
P :=
PYTEST_ARGS :=
test: CHOSEN := (not hostile or sample) and not long
long: CHOSEN := long and not hostile

.PHONY: quick test long hostile check demo docs screenshots bench clean

.venv/.ready: pyproject.toml tests/setup.sh
	bash tests/setup.sh venv

demo: .venv/.ready
	bash tests/setup.sh demo
	bash tests/demo.sh

quick: .venv/.ready
	$(COMPILE)
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --hypothesis-profile=quick -m "not system and not e2e and (not hostile or sample)" $(PYTEST_ARGS) tests

# Three workers on two cores, since labs wait much. A file as a whole to one worker: what a module builds is built once. The files that
# take longest come first (tests/support/order.py), and the many short ones fill the end. A worker that dies ends the run: the one that
# would take its place gets no work of a file as a whole, and the run would wait for it for ever.
test long: .venv/.ready
	bash tests/setup.sh test
	$(COMPILE)
	$(AS_ROOT) $(CURDIR)/$(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -m "$(CHOSEN)" $(PYTEST_ARGS) tests/$(P)

hostile: .venv/.ready
	bash tests/setup.sh test
	$(COMPILE)
	$(AS_ROOT) $(CURDIR)/$(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --fault-table=SECURITY.md $(PYTEST_ARGS) tests/hostile

check: .venv/.ready
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-cache
	complexipy deepep_bootstrap tasks.py --max-complexity-allowed 15 --failed --plain
	$(PYTHON) tests/shellcheck_all.py

docs: .venv/.ready
	$(PYTHON) -m sphinx -W --keep-going -q -c docs . build/docs
	printf '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/index.html"><title>deepep-bootstrap</title>\n' >build/docs/index.html

screenshots: .venv/.ready
	bash tests/setup.sh test
	$(COMPILE)
	$(AS_ROOT) $(CURDIR)/$(PYTHON) tests/screenshots.py

bench: .venv/.ready
	for bench in tests/bench/bench_*.py; do $(PYTHON) "$$bench" || exit; done

clean:
	if [ -x $(PYTHON) ]; then $(AS_ROOT) $(CURDIR)/$(PYTHON) -m invoke lab down; fi
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .hypothesis *-test.sbatch
	find . -name __pycache__ -type d -prune -exec rm -r {} +
