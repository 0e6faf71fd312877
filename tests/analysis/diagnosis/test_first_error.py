"""The first error of a failure, whatever its cause: in time over several logs, with rank, node, owner, ends in words,
what changed, and in the verb's screen and JSON. test_recorded_logs.py has those of the recorded logs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_bootstrap.analysis.diagnosis.engine import SURE, TELLS, as_json, brief, diagnose
from deepep_bootstrap.analysis.diagnosis.first_error import FirstError, changes, code_words, package_of, scrubbed
from deepep_bootstrap.analysis.diagnosis.rules import join, load_causes
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.toml import load_toml
from tests.support.diagnosis import A_CAUSE, BOOK, CASES, cases_of_rules, diagnosed
from tests.support.paths import ROOT


def first(**logs: str) -> FirstError:
    found = diagnose(logs, BOOK).first
    assert found
    return found


def test_lines_of_a_state_that_follow_are_no_first_error() -> None:
    sign = "sign = [{ find = 'Failed to start pump', weight = 0.9, state = true }]"
    book = join(BOOK, load_causes(A_CAUSE + sign, "own", BOOK))
    after = "Failed to start pump.socket: see journalctl\n"
    own = "E1126 10:00:00.000000 7 pump.cc:3] no oil in the pump\n"
    told = diagnose({"log": f"{after}{own}"}, book)
    assert [each.cause for each in told.known] == ["a-cause"]
    assert told.first
    assert told.first.evidence.text.endswith("no oil in the pump")
    alone = diagnose({"log": after}, book).first
    assert alone
    assert alone.evidence.text == after.strip()


def test_a_healthy_log_has_no_first_error() -> None:
    found = {path.name: diagnosed(path.name, path.read_text(encoding="utf-8")) for path in cases_of_rules("healthy")}
    assert {name: each.first for name, each in found.items() if each.first} == {}


CHAINED = """1: Traceback (most recent call last):
1: OSError: shard 3 is cut short
1: The above exception was the direct cause of the following exception:
1: Traceback (most recent call last):
1: RuntimeError: loading did not work
"""


SSH = """ssh: Could not resolve hostname n1.odd.svc: Name or service not known
Warning: Permanently added 'n1.odd.svc,10.0.0.1' (ECDSA) to the list of known hosts.
There are not enough slots available in the system to satisfy the 16
"""

TEST_PROGRAM = """gcc -c _configtest.c -o _configtest.o
_configtest.c:2:10: fatal error: odd.h: No such file or directory
failure.
removing: _configtest.c _configtest.o
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (CHAINED, 2),
        # Reasons below an error, as Rust prints them; words within options; a step of docker's build that warns.
        ("error: Failed to install: odd\n  Caused by: could not link odd\n  Caused by: Operation not permitted\n", 3),
        ("error: Failed to spawn: `odd`\n  Caused by: No such file or directory (os error 2)\n", 1),
        # Hosts that ssh reached further down, and one that it never did.
        (SSH, 3),
        (SSH.replace("hostname n1", "hostname n2"), 1),
        # A test program of distutils that a build does without, and one that ends it.
        (f"{TEST_PROGRAM}building 'odd' extension\nodd.c:7:1: error: odd\n", 6),
        (f"{TEST_PROGRAM}error: Cannot compile. Check your configuration!\n", 2),
        # Errors that say nothing, below the line of the same process that says the reason, and of another one.
        ("configure: WARNING: odd wants pmix\nconfigure: WARNING: of its own\nconfigure: error: Cannot continue\n", 1),
        ("0: [WARN] fusermount: mount failed\n1: [ERROR] Failed to mount: /data/odd.img\n", 2),
        ("[n1:1:0] a.c:3 UCX  WARN  'odd' is not available\nstep 1\nnixlBackendError: NIXL_ERR_BACKEND\n", 1),
        # Somebody stopped what waited.
        (
            '^CTraceback (most recent call last):\n  File "a.py", line 3, in <module>\nKeyboardInterrupt\nerror: odd broke\n',
            4,
        ),
        (
            "F77: gfortran -fallow-argument-mismatch -O2\nodd: a server must be named\nsrun: error: n1: task 0: Exited with exit code 2\n",
            2,
        ),
        (
            "+ docker build .\n#9 [build] FROM odd\n#9 1.10 CMake Warning at a.cmake:1 (message):\n#9 1.10   Failed to find odd\n#9 1.20 -- done with it\n#9 1.30 odd.c:1:1: error: odd\n#9 ERROR: process did not complete\n",
            6,
        ),
        (
            "  CMake Warning at a.cmake:1 (message):\n    Failed to find odd\n  Call Stack (most recent call first):\n    b.cmake:8\n\n  CMake Error at a.cmake:18 (odd):\n",
            6,
        ),
        # A step of a build that ended well, whatever it said.
        (
            "#6 [ 3/12] RUN make\n#6 1.10 a\n#6 1.20 b\n#6 1.30 modprobe: FATAL: Module odd not found in directory /lib\n#6 DONE 1.4s\n#7 [ 4/12] RUN odd\n#7 2.10 error: odd\n#7 ERROR: process did not complete\n",
            7,
        ),
        # A traceback whose indents were lost on the way, with another stream of its process between.
        (
            '(E pid=6) ERROR 02-06 16:34:06 [core.py:9] Traceback (most recent call last):\n(E pid=6) ERROR 02-06 16:34:06 [core.py:9] File "/a.py", line 9, in run\n(E pid=6) ERROR 02-06 16:34:06 [core.py:9] engine = Odd()\n(E pid=6) Process Odd:\n(E pid=6) ERROR 02-06 16:34:06 [core.py:9] File "/b.py", line 3, in a\n(E pid=6) ERROR 02-06 16:34:06 [core.py:9] b()\n(E pid=6) ERROR 02-06 16:34:06 [core.py:9] RuntimeError: odd\n',
            7,
        ),
        # What torch.multiprocessing hands on of a process that it started; frames that loguru marks.
        (
            'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    spawn()\nException: \n\n-- Process 0 terminated with the following error:\nTraceback (most recent call last):\n  File "b.py", line 2, in run\n    odd()\nRuntimeError: odd broke\n',
            10,
        ),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    odd()\n> File "b.py", line 2, in odd\n    raise ValueError()\nValueError: odd broke\n',
            6,
        ),
        # A task of Ansible's that failed, whose reason stands in YAML below it.
        ("fatal: [n1]: FAILED! =>\n  changed: false\n  msg: 'An odd error: odd broke'\n", 3),
        ("failed: [n1] (item=odd) => changed=false\n  msg: |-\n    error: odd broke\n", 3),
        # A job that Open MPI ended and a script that ended so, below which another run went well.
        (
            "[n1:1:0] odd.c:3 UCX  ERROR odd broke\nmpirun noticed that process rank 2 with PID 13 on node n1 exited on signal 11 (Segmentation fault).\n# Avg bus bandwidth    : 10.8\n# Out of bounds values : 0 OK\n",
            1,
        ),
        ("odd: error: odd broke\n+ odd-test\nall tests passed\n+ exit 16\n", 1),
        # Settings that are shown, not those of a run.
        ("conflicts = [\n]\nerror: odd\n", 3),
        # Text of a warning of rich's logger, in as many lines as its column needs; an error of it below.
        (
            "[07/23/25 01:51:13] INFO     odd.common - INFO -       init.py:160\n                             Could not find package\n                             odd_torch.\nKeyError: odd\n",
            4,
        ),
        (
            "[07/23/25 01:51:13] INFO     odd.common               init.py:160\n                    ERROR    it failed for want of     init.py:161\n                             odd_torch.\nexit code: 1\n",
            2,
        ),
        # An image that is fetched; what dnf and dkms say of a build that failed above.
        ("Unable to find image 'mirror.example/odd:1' locally\ndocker: Error response from daemon: odd.\n", 2),
        (
            ">>> Failed command:\n>>> 'make' modules\n>>> Autoinstall on 6.17 failed for module(s) odd(10).\nodd.c:1:1: error: odd\n",
            4,
        ),
        # What was logged with a traceback, which tells more.
        (
            "2026-10-27 22:25:32 [ERROR] upload failed\nTraceback (most recent call last):\n  File \"/a.py\", line 3, in a\nKeyError: 'odd'\n",
            4,
        ),
        # A sidecar that waits for its engine, above what the engine fails by.
        (
            "[routing-proxy] 2026-11-20T10:00:00Z waiting for vLLM to be ready: dial tcp 127.0.0.1:8200: connect: connection refused\nRuntimeError: odd\n",
            2,
        ),
        (
            'proxy E1126 10:00:00.000000 1 proxy.go:100] waiting for the engine to become available: Get "http://127.0.0.1:8200/health": connection refused\nRuntimeError: odd\n',
            2,
        ),
        ("nvlink warning : SM Arch ('sm_52') not found in 'liba.a:b.o'\nRuntimeError: odd\n", 2),
        (
            "[2026-04-02T08:15:20.110] error: Couldn't find the specified plugin name for mpi/x looking at all files\n[2026-04-02T08:15:20.311] error: odd could not be done\n",
            2,
        ),
        ("[2026-01-14 22:12:31] trainer: ERROR aborting: odd\nsrun: error: n1: task 0: Exited with exit code 3\n", 1),
        (
            "n1 kernel: gdrdrv: module verification failed: signature and/or required key missing - tainting kernel\n$ gdrcopy_copybw\nRuntimeError: odd\n",
            3,
        ),
        ("debconf: unable to initialize frontend: Dialog\nE: odd could not be done\n", 2),
        (
            "[n1:9] mca_base_component_repository_open: unable to open mca_x: libx.so.1: cannot open shared object file: No such file\nRuntimeError: odd\n",
            2,
        ),
        (
            "(pid=gcs_server) [2026-07-08 06:00:39,001 E 221 221] (gcs_server) a.cc:302: Failed to reach x. Events and metrics will not be exported.\nRuntimeError: odd\n",
            2,
        ),
        # What a line begins with stands behind the time of a collector, on some lines of the log alone.
        (
            "$ kubectl logs --timestamps odd-0\n2025-11-12T02:13:07.118402215Z /bin/bash: line 1: /usr/sbin/oddd: No such file or directory\nRuntimeError: odd\n",
            2,
        ),
        (
            "slurmctld: error: Couldn't find the specified plugin name for topology/odd looking at all files\nslurmctld: error: cannot find topo plugin for topology/odd\nslurmctld: fatal: Failed to initialize topology plugin\n",
            1,
        ),
        (
            "error: s_p_parse_file: cannot stat file /odd.conf: No such file or directory, using defaults\nKeyError: odd\n",
            2,
        ),
        # What a script says of a command that failed; helm, which waited in vain; a warning of the kernel's Makefile.
        ("+ echo 'odd failed, going on'\nodd failed, going on\nKeyError: odd\n", 3),
        (
            "Error: UPGRADE FAILED: resource DaemonSet/odd/odd not ready. status: InProgress\ncontext deadline exceeded\nE1016 13:26:48.2 1 a.go:5] odd is too old\n",
            3,
        ),
        ('Makefile:975: "Cannot use CONFIG_STACK_VALIDATION=y, please install libelf-dev"\na.cpp:3:1: error: odd\n', 2),
        ("FAILED: build/a.o\nsrc/a.cu(3): error: no such type\nninja: build stopped: subcommand failed.\n", 2),
        ("train.py FAILED\nsrun: error: n1: task 0: Exited with exit code 1\nKeyError: 'a'\n", 3),
        ("  FAILED tests/a.py::test_b - Exception\nValueError: odd\n==== 1 failed, 3 passed in 2.1s ====\n", 2),
        ("[W602 06:01:03.1 a.cpp:7] [c10d] could not do it\n[E602 06:01:03.2 a.cpp:9] it broke\nKeyError: 'a'\n", 2),
        ("9: DeepEP dispatch timeout, channel: 1\nterminate called\n  what():  Failed: CUDA error a.cu:3 'odd'\n", 1),
        ("terminate called\n  what():  Failed: CUDA error a.cu:3 'odd'\nsrun: error: n1: task 0: Aborted\n", 2),
        ("libfabric:9:1::core:core:f():4<warn> Failed to dlopen libx.so\nKeyError: 'a'\n", 2),
        ("2026-06-19 16:18 [rank5]: Traceback (most recent call last):\n2026-06-19 16:18 [rank5]: KeyError: 'a'\n", 2),
        ('fatal: [n7]: FAILED! => {"stderr": "could not load x", "rc": 1}\nx: Unknown symbol\nERROR: x is odd\n', 3),
        ("pod-ttx2k   3/4     CrashLoopBackOff   41 (3m10s ago)   3h12m\nERROR: disk odd\n", 2),
        ("ibgda.cpp:3901: non-zero status: 16 ibv_dealloc_pd failed\nibgda.cpp:9: non-zero status: 7 odd\n", 2),
        ("+ python train.py --abort-on error: 3\nRuntimeError: odd\n", 2),
        ("port 0: PCIe Bus Error: severity=Corrected, type=Data Link Layer\nRuntimeError: PCIe error: odd\n", 2),
        ("[n1:9] mca: component_find: unable to open mca_x: (warning, ignored)\nRuntimeError: odd\n", 2),
        ("was unable to find any relevant network interfaces:\n  Host: n1\nRuntimeError: odd\n", 3),
        ("Status:           Failed\nMessage:  Pod: rpc error: odd\n", 2),
        ("Stack trace of the failed collective not found\nRank 2 Watchdog caught collective operation timeout\n", 2),
        ('Traceback (most recent call last):\n  File "a.py", line 3, in f\n    assert x > 3\nAssertionError\n', 3),
        ('Traceback (most recent call last):\n  File "a.py", line 3, in f\n    assert x\nAssertionError: odd\n', 4),
        (
            'Traceback (most recent call last):\n  File "a.py", line 3, in f\nRuntimeError:\n\n    odd was done too early\n',
            5,
        ),
        ('at 3 pod Traceback (most recent call last):\nat 3 pod   File "a.py", line 3\nat 4 pod Odd\n', 3),
        ("Traceback (most recent call last):\nValidationError: 1 validation error for A\n  odd [type=b]\n", 3),
        ("WARN: device x_0 is not enumerated as an mlx5 device. Skipping...\nRuntimeError: CUDA error: odd\n", 1),
        ("free(): invalid next size (fast)\n[n1:9] Signal: Aborted (6)\n", 1),
        ('dpkg: dependency problems prevent configuration of a:\n#3 ERROR: process "x" did not complete\n', 1),
        ("Some packages could not be installed. This may mean\n a : Depends: b but it is not installable\nE: odd\n", 2),
        ('NVRTC compilation failed with options: -a\na.cuh(97): error: identifier "b" is undefined\n', 2),
        ("RuntimeError: Ninja build failed. Ninja output:\nninja: Entering directory `/a'\nsh: 1: x: not found\n", 3),
        ("CMake Warning (dev) at a:6 (message):\n  B could not be detected\n\nninja: error: 'c', missing\n", 4),
        (
            'Traceback (most recent call last):\nray.exceptions.RayTaskError(KeyError): w()\n  File "a"\nKeyError: 3\n',
            4,
        ),
        ("nvshmem initialization failed, exiting\n/a/util/cs.cpp:21: non-zero status: 16: Device busy, exiting\n", 1),
        ("E20260821 12:30:19.433391  5410 a.cpp:9] not without b\nE20260821 12:30:19.43 5 a.cpp:2] failed\n", 1),
        ("request to query it failed with error:WARNING Nothing to do\nRuntimeError: odd\n", 1),
        ("Traceback (most recent call last):\nRuntimeError: retry count exceeded for odd\n", 2),
        ("n1:7:9 [0] NCCL WARN NET/IB : status=12, transport retry counter exceeded\nRuntimeError: odd\n", 1),
        ("2026-08-21 12:30:19 - INFO - try 1 failed\n2026-08-21 12:30:20 - ERROR - disk is odd\nexit code: 1\n", 2),
        ("12:30:19Z\tERROR\tcontroller/a.go:77\tdisk is odd\nexit code: 1\n", 1),
        ("[2026-08-21 12:30:19.433] [error] disk is odd\nexit code: 1\n", 1),
        ("proxy.cc:1 NCCL WARN [Service thread] Could not receive type from localRank 3\nNCCL WARN odd\n", 2),
        (
            "-- Performing Test HAVE_AVX512 - Failed\n-- Could NOT find OpenMP (missing: OpenMP_CXX_FLAGS)\na.cu(3): error: no such type\n",
            3,
        ),
        ("checking for numa_node_of_cpu in -lnuma... failed\nconfigure: error: odd\n", 2),
        (
            '{"level":"info","msg":"started"}\n{"level":"error","ts":1,"msg":"disk is odd"}\n{"level":"fatal","msg":"exit"}\nexit code: 1\n',
            2,
        ),
        ('{"severity":"ERROR","message":"disk is odd"}\nexit code: 1\n', 1),
        ('{"level":"warning","msg":"could not find x"}\n{"level":"error","msg":"disk is odd"}\nexit code: 1\n', 2),
        (
            "n1 systemd[1]: a.service: Main process exited, code=exited, status=1/FAILURE\nn1 systemd[1]: a.service: Failed with result 'exit-code'.\nn1 a[9]: ERROR: disk odd\n",
            3,
        ),
        ("2026-08-21T12:30:19.4Z ERROR dyn_rt::pipe: disk is odd\nexit code: 1\n", 1),
        ("thread 'main' panicked at src/main.rs:7:5:\nexit code: 101\n", 1),
        ('E0821 12:30:19.433391 5410 server.go:77] "disk is odd" err="x"\nexit code: 1\n', 1),
        ("  ERROR: Failed building wheel for a\n  error: failed-wheel-build-for-install\na.cpp:3:1: error: odd\n", 3),
        ("  ERROR: Could not build wheels for a, which is required to install\na.cpp:3:1: error: odd\n", 2),
        (
            "n1:7:9 [0] NCCL WARN NUMA auto balancing enabled which can lead to variability in the performance!\nRuntimeError: odd\n",
            2,
        ),
        (
            'n1:7:9 [0] NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!\nRuntimeError: odd\n',
            2,
        ),
        ("n1 kernel: INFO: task python:991 blocked for more than 120 seconds.\nRuntimeError: odd\n", 1),
        ("n1 kernel: mce: [Hardware Error]: Machine check events logged\nRuntimeError: odd\n", 1),
        ("n1 kernel: watchdog: BUG: soft lockup - CPU#3 stuck for 26s!\nRuntimeError: odd\n", 1),
        (
            "(raylet) [2026-08-21 12:30:19,433 E 9 9] (raylet) node_manager.cc:3287: 2 Workers were killed due to memory pressure\nray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n",
            1,
        ),
        ("RuntimeError: Error compiling objects for extension\na.cu(3): error: odd\n", 2),
        ("[1/3] c++ -DX=error: -c a.cpp\n[2/3] nvcc a.cu\na.cu(3): error: odd\n", 3),
        ("0:   Max error: 3.552714e-15 (forward+inverse)\nRuntimeError: odd\n", 2),
        ("!V! - Version mismatch, communication disabled.\nRuntimeError: odd\n", 2),
        ("  Warning  Unhealthy  3m2s (x180 over 5m)  kubelet  Startup probe failed:\nRuntimeError: odd\n", 1),
        ("Warning  FailedMount  5m  kubelet  a failed: failed to sync secret cache: odd\nRuntimeError: odd\n", 2),
        ("srun: StepId=5.1 aborted before step completely launched.\nRuntimeError: odd\n", 1),
        ("nvidia-container-cli: error parsing disk info: odd\nRuntimeError: odd\n", 1),
        ("ls: cannot access '/sys/class/odd': No such file or directory\nRuntimeError: odd\n", 1),
        ("bash: /opt/a/set_env.sh: No such file or directory\nRuntimeError: odd\n", 1),
        ("a.cpp:3: non-zero status: 7 init_nvtx unavailable, continuing\nRuntimeError: odd\n", 2),
        ("a.cpp:3: non-zero status: 1 cuMemRelease failed, driver shutting down\nRuntimeError: odd\n", 2),
        ("[05/08/2025-03:17:12] [TRT-LLM] [W] Failed when profiling tactic=14, skipped\nRuntimeError: odd\n", 2),
        ("[05/08/2025-03:17:12] [TRT-LLM] [E] disk is odd\nRuntimeError: odd\n", 1),
        ("Call to `setuptools.build_meta.build_wheel` failed (exit\nModuleNotFoundError: No module named 'a'\n", 2),
        ("NVCC compilation failed: In file included from a.cuh:9,\na.h:3:1: error: odd\n", 2),
        ("Readiness probe failed: HTTP 503\nRuntimeError: odd\n", 2),
        (
            "INFO 06-16 11:08:34 [a.py:5] No available shared memory broadcast block found\nengine has shut down, failed\n",
            1,
        ),
        ("INFO 06-16 11:08:34 [a.py:5] No available shared memory broadcast block found\nRuntimeError: odd\n", 2),
        ("<no output since 07:31:55>\nslurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 3 ***\n", 1),
        ("Loading a:      [FAILED]\nmodprobe: ERROR: could not insert a\n", 2),
        ("slurmd: error: _unlink_file: unlink(/a/b) failed: No such file or directory\nRuntimeError: odd\n", 2),
        ("a: can't read version: is ib_umad module loaded?\na: Error: odd\n", 1),
        ('Traceback (most recent call last):\n  File\n"/a/b.py",\nline 3, in c\nKeyError: 3\n', 5),
        (
            '[node 0] [2026-06-06 08:15:25 DP0 TP0] S hit an exception: Traceback (most recent call last):\n[node 0]   File "a", line 3, in f\n[node 0]     assert x > 3\n[node 0] AssertionError\n',
            3,
        ),
        (
            'ERROR 10-11 03:22:41 [DP0 TP2 s.py:28] S hit an exception: \nERROR 10-11 03:22:41 [DP0 TP2 s.py:28] Traceback (most recent call last):\nERROR 10-11 03:22:41 [DP0 TP2 s.py:28]   File "a", line 3, in f\nERROR 10-11 03:22:41 [DP0 TP2 s.py:28] KeyError: 3\n',
            4,
        ),
        (
            "CalledProcessError: ninja\nThe above exception was the direct cause of the following exception:\nRuntimeError: Ninja build failed. Ninja output:\nnvcc warning : odd\na.cuh(623): error: odd\n",
            5,
        ),
        (
            'Traceback (most recent call last):\n  File "a", line 3, in f\n    raise CUDAError("CUDA error: odd")\nCUDAError: odd\n',
            4,
        ),
        (
            "Building module(s)...(bad exit status: 2)\nFailed command:\nmake -j32\n\nError! Bad return status for module build on kernel: 6.13\na/nv.c:130:18: error: odd\n",
            6,
        ),
        (
            "mpirun detected that one or more processes exited with non-zero status\n[n1:9] *** Process received signal ***\n[n1:9] Signal: Segmentation fault (11)\n",
            3,
        ),
        # Headings, whose error is the next line of the same process or stands indented below them.
        ("[E] Failed to initialize the executor:\nRuntimeError: odd\n", 2),
        ("1: Failed to start it:\n0: all is well\n1: RuntimeError: odd\n", 3),
        ("Failed to start it:\nby hand\nRuntimeError: odd\n", 1),
        ("CMake Error at a.cmake:9 (message):\n\n  The compiler said\n    a.h(3): error: odd\n", 4),
        ("CMake Error at a.cmake:9 (message):\n  odd\n\nRuntimeError: odd\n", 1),
        # Rows of states, not those that tell what happened.
        ("NAME   READY   STATUS   RESTARTS\nodd-0   0/1   Failed   2\nRuntimeError: odd\n", 3),
        ("LAST SEEN   TYPE   REASON   MESSAGE\n5m   Warning   FailedMount   odd failed\nRuntimeError: odd\n", 2),
        ("NAME   READY   STATUS\nslurmstepd: error: odd failed\nRuntimeError: odd\n", 2),
        # What somebody typed.
        ("$ grep -c 'fatal error: odd' log\nRuntimeError: odd\n", 2),
        ("userx@n1:~/odd$ ./run --fail-on 'Assertion failed'\nRuntimeError: odd\n", 2),
        ("[root@n1 ~]# journalctl | grep 'error: odd'\nRuntimeError: odd\n", 2),
        # A warning, where nothing else tells of an error.
        ("W0819 07:02:54.757542 1 a.go:9] could not load odd.so\nBack-off restarting failed container\n", 1),
        ("W0819 07:02:54.757542 1 a.go:9] could not load odd.so\nRuntimeError: odd\n", 2),
        # Forms that no pattern of a program knows, but their words.
        ("/opt/a/run.sh: line 76: ODD: unbound variable\nexit code: 1\n", 1),
        ("NET/ODD Unexpected number of rails. Expected 3 but got 2\nRuntimeError: odd\n", 1),
        ("Error to get device. No valid odd devices found\nexit code: 1\n", 1),
        ("nvcc warning : the value is out of range, ignored\nRuntimeError: odd\n", 2),
        # A hint of what to do, and the end of a job whose own words stand below.
        ("sinfo: error: If odd is up, restart it\nsinfo: error: odd: cannot be read\n", 2),
        ("submitit.core.utils.UncompletedJobError: Job 7 (task: 0) with path odd\nsrun: fatal: odd\n", 2),
        # What only says that something ended badly, above what came of the failure.
        ("odd-0   0/1     CrashLoopBackOff   4 (38s ago)   4m21s\nRuntimeError: odd: Failed core proc(s): {}\n", 2),
        ("  error: subprocess-exited-with-error\nfatal: detected dubious ownership in repository at '/odd'\n", 2),
        ("srun: error: n1: task 3: Exited with exit code 1\nRuntimeError: odd: Failed core proc(s): {}\n", 2),
        # The worker's own traceback goes on below.
        (
            "Traceback (most recent call last):\nKeyError: Caught KeyError in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n  File \"a\", line 1, in f\nKeyError: 'odd'\n",
            5,
        ),
    ],
)
def test_a_summary_a_warning_or_a_consequence_is_not_first(text: str, line: int) -> None:
    assert first(log=text).evidence.line == line


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        (
            "hello\nThe odd parameter was set to a path\nthat could not be found:\n  odd_agent: odd\nbye\n",
            2,
            "The odd parameter was set to a path that could not be found: odd_agent: odd",
        ),
        (
            "[    9.6] NVRM: The odd GPU 0000:1b:00.0 (PCI ID: 10de:2901)\n[    9.6] NVRM: installed in this system is not supported by odd\n",
            1,
            "[    9.6] NVRM: The odd GPU 0000:1b:00.0 (PCI ID: 10de:2901) [    9.6] NVRM: installed in this system is not supported by odd",
        ),
        # No sentence goes on: the line above ends, is of another process, or the word is a program's name.
        ("The odd one came.\nis odd: failed to open it\n", 2, "is odd: failed to open it"),
        ("1: The odd one\n2: that could not be found\n", 2, "that could not be found"),
        ("hello\nfor: error: odd\n", 2, "for: error: odd"),
    ],
)
def test_a_sentence_over_several_lines_is_told_as_one(text: str, line: int, told: str) -> None:
    found = first(log=text + "exit code: 1\n").evidence
    assert (found.line, found.text) == (line, told)


def test_lines_of_its_process_stand_around_the_first_error() -> None:
    own = [f"1: line {number}" for number in range(1, 9)]
    own[3] = "1: RuntimeError: odd"
    text = "".join(f"{line}\n1: \n2: other\n1: -----\n" for line in own)
    found = first(log=text)
    assert [each.text for each in found.around] == own[1:7]
    assert [each.line for each in found.around] == [5, 9, 13, 17, 21, 25]
    shown = brief(diagnose({"log": text}, BOOK))
    assert shown[shown.index("around it:") + 1] == "  5: 1: line 2"
    rows = as_json(diagnose({"log": text}, BOOK))["first_errors"][0]["around"]
    assert rows[0] == {"line": 5, "text": "1: line 2"}


def test_of_a_log_of_one_line_nothing_stands_around() -> None:
    assert "around it:" not in brief(diagnose({"log": "RuntimeError: odd"}, BOOK))


def test_a_wait_that_ended_comes_before_the_launch_that_failed_by_it() -> None:
    late = "Rank 9] Process group watchdog thread terminated with exception: CUDA error: unspecified launch failure\n"
    assert first(log="DeepEP timeout check failed: rank = 0\n" + late).evidence.line == 1
    assert first(log="hello\n" + late).evidence.line == 2


def test_of_a_cause_that_shows_in_code_the_exception_below_it_is_first() -> None:
    text = "".join(f"1: {line}\n" for line in TRACEBACK_OF_CODE.splitlines())
    for whole in (TRACEBACK_OF_CODE, text):
        found = diagnose({"log": whole}, load_causes(OF_CODE, "own.toml"))
        assert [each.cause for each in found.findings] == ["a-cause"]
        assert found.first
        assert (found.first.evidence.line, found.first.evidence.text) == (5, "OddError: see the inner exception")


OF_CODE = f"""{A_CAUSE}sign = [{{ find = 'raise OddError', weight = 0.9 }}]
[ending]
badly = ['Traceback']
"""
TRACEBACK_OF_CODE = """Traceback (most recent call last):
  File "a", line 9, in g
  File "a", line 3, in f
    raise OddError(
OddError: see the inner exception
"""


def test_lines_of_what_a_sure_cause_explains_are_errors_too() -> None:
    """The warning alone is none: it tells of the fabric that a service which is not there did not set up."""
    warned = "a.py:9: UserWarning: CUDA initialization: Error 802: system not yet initialized\n"
    late = "AssertionError: no GPU\nUnit nvidia-fabricmanager.service could not be found.\n"
    found = diagnose({"log": warned + late}, BOOK)
    assert found.findings[0].cause == "service-not-installed"
    assert found.first
    assert found.first.evidence.line == 1


def test_of_one_log_the_order_counts_within_seconds() -> None:
    near = "2026-11-20T10:00:08.1Z ERROR: disk odd\n2026-11-20T10:00:05.2Z ERROR: job odd\n"
    assert first(log=near).evidence.line == 1
    assert first(log=near.replace("10:00:08", "10:00:48")).evidence.line == 2


TRACEBACK = """2: Traceback (most recent call last):
3: Traceback (most recent call last):
2:   File "/srv/moe.py", line 9, in forward
3:   File "/srv/moe.py", line 9, in forward
2:     y = layer(x)
2: KeyError: 'experts.7'
3: KeyError: 'experts.7'
srun: error: n2: task 2: Exited with exit code 1
"""


def test_of_a_traceback_the_exception_of_its_own_rank_is_shown() -> None:
    found = first(log=TRACEBACK)
    assert (found.evidence.line, found.evidence.text, found.rank) == (6, "KeyError: 'experts.7'", "rank 2")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("outsider-2026", "nccl-ifname-missing.log"),
        ("blind-2026", "peer-mem-dkms.log"),
        ("outsider-2026-held", "ep2-wrong-api.log"),
        ("outsider-2026-second", "megatron_duplicate_gpu.log"),
        ("outsider-2026-second", "k8s_gpu_is_lost.log"),
    ],
)
def test_lines_of_another_rank_in_between_change_nothing(name: str, file: str) -> None:
    """Before, 9 of 248 recorded logs had another first error so, and 2 no cause."""
    lines = (CASES / name / file).read_text(encoding="utf-8").split("\n")
    alone = diagnose({file: "\n".join(lines)}, BOOK)
    mixed = diagnose({file: "\n".join(f"3: {line}\n4: loading shard 3 of 7" for line in lines)}, BOOK)
    assert alone.first
    assert mixed.first
    assert (mixed.first.evidence.line - 1) // 2 == alone.first.evidence.line - 1
    assert [each.cause for each in mixed.findings][:1] == [each.cause for each in alone.findings][:1]


def test_over_several_logs_the_earliest_time_is_first() -> None:
    late = (
        "[2026-11-20 10:00:09 DP0 TP0] Scheduler hit an exception: Traceback (most recent call last):\nKeyError: 'a'\n"
    )
    early = (
        "[2026-11-20 10:00:03 DP1 TP4] Scheduler hit an exception: Traceback (most recent call last):\nKeyError: 'b'\n"
    )
    found = diagnose({"node-0-n1.log": late, "node-1-n2.log": early}, BOOK).first
    assert found
    assert (found.evidence.log, found.evidence.text, found.node) == ("node-1-n2.log", "KeyError: 'b'", "n2")
    assert (found.rank, found.time) == ("DP1 TP4", "2026-11-20 10:00:03")


def test_a_traceback_that_was_cut_says_less_than_an_error_of_another_log() -> None:
    """The launcher ends what still runs, as a rank is about to print where it was."""
    cut = 'starts\nTraceback (most recent call last):\n  File "/opt/a.py", line 3, in <module>\n    main()\n'
    said = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    found = diagnose({"node-0-n001.log": cut, "node-1-n002.log": f"starts\n{said}\n"}, BOOK).first
    assert found
    assert (found.evidence.log, found.evidence.text) == ("node-1-n002.log", said)
    assert first(log=cut).evidence.line == 2


def test_a_date_of_eight_digits_is_a_time() -> None:
    found = first(log="E20260821 12:30:19.433391  5410 a.cpp:9] odd\nRuntimeError: odd\n")
    assert found.time == "E20260821 12:30:19.433391"


def test_of_a_long_first_error_beginning_and_end_are_shown() -> None:
    line = f"[ERROR] [launch.py:322:sigkill_handler] ['python', '{'odd' * 400}'] exits with return code = -9"
    shown = diagnosed("log", line).first
    assert shown is not None
    assert shown.evidence.text.startswith("[ERROR] [launch.py:322:sigkill_handler] ['python', 'oddodd")
    assert shown.evidence.text.endswith("'] exits with return code = -9")
    assert len(shown.evidence.text) == 600


def test_those_that_waited_or_were_ended_are_not_first() -> None:
    waited = (
        "[rank1]:[E1120 10:00:01.5 ProcessGroupNCCL.cpp:690] [Rank 1] Watchdog caught collective operation timeout: x\n"
    )
    died = "[rank7]:[E1120 10:09:59.1 loader.cpp:12] could not read shard 17\n"
    assert first(log=waited + died + "srun: error: n1: tasks 0-7: Aborted (core dumped)\n").rank == "rank 7"
    assert first(log=waited + "srun: error: n1: tasks 0-7: Aborted (core dumped)\n").rank == "rank 1"


def test_who_was_told_to_end_in_its_exit_handler_is_not_first() -> None:
    ended = """Exception ignored in atexit callback: <function _exit_function at 0x7f4c43a602c0>
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/util.py", line 357, in _exit_function
    p.join()
SystemExit: 143
"""
    own = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    found = first(**{"node-0-n001.log": ended, "node-1-n002.log": own})
    assert (found.evidence.log, found.evidence.line) == ("node-1-n002.log", 1)


@pytest.mark.parametrize(
    ("line", "library", "program"),
    [
        ("n3:91:120 [1] transport/p2p.cc:9 NCCL WARN Could not do it", "NCCL", ""),
        ("/src/nvshmem/src/host/init/init.cu:9: non-zero status: 7 it broke", "NVSHMEM", ""),
        ("RuntimeError: Failed: CUDA error csrc/kernels/internode.cu:3 'odd'", "DeepEP", ""),
        ("(EngineCore pid=3) ERROR 11-20 10:00:00 [core.py:1] ValueError: odd", "", "vLLM"),
        ("kernel: NVRM: Xid (PCI:0000:44:00): 31, pid=3", "the kernel's GPU or NIC driver", ""),
        ("slurmstepd: error: pyxis: odd", "", "enroot or pyxis"),
    ],
)
def test_an_error_belongs_to_a_program_and_a_library(line: str, library: str, program: str) -> None:
    found = first(log=line + "\n")
    assert (found.library, found.program) == (library, program)


def test_the_node_of_a_line_of_nccl_is_its_host() -> None:
    assert first(log="n3:91:120 [1] transport/p2p.cc:9 NCCL WARN Could not do it\n").node == "n3"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (137, "exit code 137: SIGKILL"),
        (-11, "exit code -11: SIGSEGV"),
        (139, "exit code 139: SIGSEGV"),
        (143, "exit code 143: SIGTERM"),
        (127, "exit code 127: the program was not found"),
        (124, "exit code 124: a limit of time"),
        (0, ""),
        (1, ""),
        (255, ""),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert code_words(code).startswith(words)
    assert bool(code_words(code)) == bool(words)


def test_ends_and_codes_of_devices_are_told_in_words() -> None:
    text = (
        "n1: kernel: NVRM: Xid (PCI:0000:44:00): 74, pid=71\nValueError: odd\nexitcode: -6\nexitcode: -6\n"
        "died with signal 9\n"
    )
    words = [each.words for each in first(log=text).ended]
    assert [each.split(":")[0].split(",")[0] for each in words] == ["Xid 74", "exit code -6", "SIGKILL"]


def test_what_such_a_failure_needs_is_asked_for() -> None:
    asked = " ".join(first(log="[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered\n").asks)
    assert "CUDA_LAUNCH_BLOCKING=1" in asked
    asked = " ".join(first(log="n3:91:120 [1] transport/p2p.cc:9 NCCL WARN Could not do it\n").asks)
    assert "NCCL_DEBUG=INFO" in asked


def test_what_changed_since_a_good_run() -> None:
    good = {"kind": "ep", "stack": "v2", "lock_digest": "aa", "nodes": "n1,n2", "code": "0"}
    assert changes({**good, "code": "1"}, good, "a-run") == ("nothing that a run notes, since a-run",)
    assert changes({**good, "lock_digest": "bb", "nodes": "n1,n3"}, good, "a-run") == (
        "since a-run: lock_digest: aa before, bb now",
        "since a-run: nodes: n1,n2 before, n1,n3 now",
    )


def test_kept_apart_from_causes_in_lines_and_json() -> None:
    found = diagnose({"a.log": TRACEBACK}, BOOK)
    document = as_json(found)
    assert document["findings"] == []
    (told,) = document["first_errors"]
    assert (told["file"], told["line"], told["rank"], told["bundle"]) == (
        "a.log",
        6,
        "rank 2",
        "invoke report --bundle",
    )
    lines = brief(found)
    assert lines[0] == "no known cause; the first error in time is:"
    assert lines[1] == "a.log, line 6: KeyError: 'experts.7'"
    assert lines[-1] == "to hand on: invoke report --bundle"
    assert as_json(diagnose({"a.log": "all well\n"}, BOOK))["first_errors"] == []


def test_secrets_are_left_out() -> None:
    found = first(log="ValueError: token=abcdefgh1 refused\n")
    assert "abcdefgh1" not in scrubbed(found, lambda text: text.replace("abcdefgh1", "-")).evidence.text


RUN = "kind=ep\nstack=v2\nmodule=deepep/2.1.0-dd758ca-v2\nnodes={nodes}\nstarted={started}\ncode={code}\n"


@pytest.mark.usefixtures("programs")
def test_the_verb_tells_the_first_error_and_what_changed(tmp_path: Path) -> None:
    for name, nodes, started, code in (("good", "n1,n2", 100, 0), ("late", "n1,n2", 300, 0), ("bad", "n1,n3", 200, 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.env").write_text(RUN.format(nodes=nodes, started=started, code=code), encoding="utf-8")
    (tmp_path / "bad" / "node-1-n3.log").write_text(TRACEBACK, encoding="utf-8")
    call = [sys.executable, "-m", "invoke", "diagnose", str(tmp_path / "bad" / "node-1-n3.log")]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4, "it failed, and no cause is known"
    shown = done.stdout
    assert shown.startswith("no known cause in it")
    assert "since good: nodes: n1,n2 before, n1,n3 now" in shown
    assert "invoke report --bundle" in shown
    document = json.loads(
        subprocess.run([*call, "--json"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    )
    (told,) = document["first_errors"]
    assert (told["node"], told["changed"]) == ("n3", ["since good: nodes: n1,n2 before, n1,n3 now"])


GENERAL = load_toml((CASES / "general.toml").read_text(encoding="utf-8"), "general.toml")


def general_of(line: str, frame: str = "") -> list[str]:
    return [each.slug for each in BOOK.general if each.fits(line, frame)][:1]


def test_each_general_kind_has_lines_of_its_own() -> None:
    assert set(GENERAL) == {each.slug for each in BOOK.general}


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind in GENERAL for line in GENERAL[kind]["lines"]])
def test_what_a_first_error_says_by_itself_is_named_where_no_cause_is_known(kind: str, line: str) -> None:
    assert general_of(line, GENERAL[kind].get("frame", "")) == [kind]


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind in GENERAL for line in GENERAL[kind]["near"]])
def test_a_line_without_such_words_is_of_no_kind(kind: str, line: str) -> None:
    assert general_of(line, GENERAL[kind].get("frame", "")) == []


NAMED = load_toml((CASES / "named.toml").read_text(encoding="utf-8"), "named.toml")


@pytest.mark.parametrize("kind", NAMED)
def test_the_object_that_a_line_names_is_told_with_its_kind(kind: str) -> None:
    for line, title in NAMED[kind].items():
        assert general_of(line, "/vllm/" if kind == "program-parts-differ" else "") == [kind], line
        assert next(each for each in BOOK.general if each.slug == kind).told(line)[0] == title


def test_each_way_of_telling_a_kind_has_a_line() -> None:
    for kind in BOOK.general:
        lines = list(NAMED.get(kind.slug, {}))
        forms = [pattern for each in kind.named for pattern in each.find]
        first = [next((pattern for pattern in forms if pattern.regex.search(line)), None) for line in lines]
        assert [pattern.source for pattern in forms if pattern not in first] == []


NAMED_CAUSES = load_toml((CASES / "named-causes.toml").read_text(encoding="utf-8"), "named-causes.toml")


def test_a_cause_is_told_as_closely_as_its_line_tells_it() -> None:
    causes = {cause.slug: cause for cause in BOOK.causes if cause.named}
    assert set(NAMED_CAUSES) == set(causes)
    for slug, cause in causes.items():
        told = {line: cause.told([line], "odd")[0] for line in NAMED_CAUSES[slug]}
        assert told == NAMED_CAUSES[slug]
        forms = [pattern for form in cause.named for pattern in form.find]
        first = [next((each for each in forms if each.regex.search(line)), None) for line in told]
        assert [each.source for each in forms if each not in first] == []
        assert cause.told(["a line of another kind"], "odd") == (cause.title, cause.fix)


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("/opt/venv/lib/python3.12/site-packages/deepspeed/elasticity/elastic_agent.py", "deepspeed"),
        ("/usr/lib/python3/dist-packages/transformers/trainer.py", "transformers"),
        ("/home/alice/verl/verl/workers/rollout/utils.py", "verl"),
        ("/opt/nemo-rl/nemo_rl/models/policy.py", "nemo_rl"),
        ("/opt/Megatron-LM/megatron/training/training.py", "megatron"),
        ("/sgl-workspace/sglang/python/sglang/srt/server.py", "sglang"),
        ("/srv/mine/src/mine/train.py", "mine"),
        ("/home/alice/train.py", ""),
        ("train.py", ""),
    ],
)
def test_the_package_of_a_frame_is_known_by_its_path(path: str, package: str) -> None:
    assert package_of(f'File "{path}", line 12, in run') == package


def test_a_cause_names_the_package_that_asks() -> None:
    log = """Traceback (most recent call last):
  File "/opt/venv/lib/python3.12/site-packages/apex/amp/__init__.py", line 3, in <module>
    from torch import odd
ImportError: cannot import name 'odd' from 'torch' (/opt/venv/lib/python3.12/site-packages/torch/__init__.py)
"""
    (finding,) = diagnose({"log": log}, BOOK).findings
    assert finding.title.startswith("apex wants something")
    assert "pip install -U apex" in finding.fix
    (finding,) = diagnose(
        {"log": log.replace("/opt/venv/lib/python3.12/site-packages/apex/amp/", "/home/alice/")}, BOOK
    ).findings
    assert finding.title == next(cause.title for cause in BOOK.causes if cause.slug == "python-packages-differ")


def test_a_cause_of_ones_own_is_told_with_its_object_and_without_secrets() -> None:
    rules = load_causes(
        A_CAUSE
        + """sign = [{ find = 'the odd thing broke', weight = 0.9 }]
named = [
  { find = ['broke by (\\S+)'], title = "the odd thing broke: {what}", fix = "mend that" },
  { find = ['broke in two'], title = "the odd thing is in two" },
]
""",
        "own.toml",
        BOOK,
    )

    def told(line: str) -> tuple[str, str]:
        (finding,) = diagnose({"log": line}, rules).findings
        return finding.title, finding.fix

    assert told("the odd thing broke by hand") == ("the odd thing broke: hand", "mend that")
    assert told("the odd thing broke in two") == ("the odd thing is in two", "f")
    assert told("the odd thing broke") == ("t", "f")
    assert "hunter2" not in told("the odd thing broke by odd://me:hunter2@host")[0]


def test_an_object_is_told_short_on_one_line_and_without_secrets() -> None:
    def told(line: str) -> str:
        (finding,) = diagnose({"log": f"{line}\n"}, BOOK).findings
        assert finding.general
        return finding.title

    long = told("RuntimeError: Check failed: " + "count > " * 90 + "none")
    assert "…" in long
    assert long.endswith("count > none"), "the reason stands at the end of what was passed on"
    assert len(long) < 280
    secret = told("RuntimeError: Check failed: odd://me:hunter2@host == 3 with password=hunter2")
    assert "odd://" in secret
    assert "hunter2" not in secret


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{what} is odd", "it is odd"), r"general\[1\]\.named\[1\]\.title: does not say \{what\}"),
        (("odd (\\w+)", "odd \\w+"), r"general\[1\]\.named\[1\]\.find: needs one group"),
        (("odd (\\w+)", "(odd) (\\w+)"), r"general\[1\]\.named\[1\]\.find: needs one group"),
    ],
)
def test_a_rule_that_names_no_object_is_refused(change: tuple[str, str], message: str) -> None:
    rule = """
[[general]]
slug = "a-kind"
title = "t"
confidence = 0.5
find = ['odd']
why = "w"
fix = "f"
named = [{ find = ['odd (\\w+)'], title = "{what} is odd" }]
"""
    assert load_causes(rule, "own.toml").general[0].told("an odd case") == ("case is odd", "f")
    with pytest.raises(Trouble, match=message):
        load_causes(rule.replace(*change), "own.toml")


RAISED = """1: Traceback (most recent call last):
1:   File "/opt/vllm/vllm/worker.py", line 7, in run
2: hello
1:     {call}
1:   File "{file}", line 3, in f
1:     return x.topk
1: AttributeError: 'Given' object has no attribute 'topk'
"""


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("/opt/vllm/vllm/moe.py", "program-parts-differ"),
        ("/a/site-packages/torch/nn/modules/module.py", "program-parts-differ"),
        ("/usr/lib/python3.12/functools.py", "program-parts-differ"),
        ("/a/site-packages/transformers/models/a.py", "versions-do-not-fit"),
        ("/srv/my_own.py", "versions-do-not-fit"),
    ],
)
def test_who_raised_an_error_tells_whose_parts_do_not_fit(file: str, kind: str) -> None:
    found = diagnose({"log": RAISED.format(file=file, call="f(x)")}, BOOK)
    assert [each.cause for each in found.findings] == [kind]


def test_a_general_kind_gives_way_to_a_cause_and_leaves_the_exit_code(tmp_path: Path) -> None:
    refused = "ValueError: --odd does not work with --even\n"
    (kind,) = diagnose({"log": refused}, BOOK).findings
    assert kind.general
    assert kind.confidence < SURE
    known = "n1:7:9 [0] NCCL WARN Duplicate GPU detected : rank 6 and rank 4 both on CUDA device 31000\n"
    assert not any(each.general for each in diagnose({"log": known + refused}, BOOK).findings)
    assert brief(diagnose({"log": refused}, BOOK))[0].startswith("kind of failure: the program does not take")


def test_what_was_got_over_is_of_no_kind() -> None:
    steps = "".join(f"iteration {number}/900 loss: 2.1\n" for number in range(3))
    assert (
        diagnose({"log": f"ConnectionError: failed to reach odd-3:7788\n{steps}KeyError: 'a'\n"}, BOOK).findings == ()
    )


def test_a_kill_after_a_failure_of_its_own_is_no_lack_of_memory() -> None:
    killed = "Killed\nsrun: error: n1: task 2: Exited with exit code 137\n"
    assert [each.cause for each in diagnose({"log": killed}, BOOK).known] == ["host-oom-kill"]
    assert diagnose({"log": "RuntimeError: odd\n" + killed}, BOOK).known == ()


def test_what_kubernetes_tells_is_not_sure_beside_a_programs_own_error() -> None:
    event = "Warning  FailedCreatePodSandBox  kubelet  Failed to create pod sandbox: error getting ClusterInformation: connection is unauthorized\n"
    own = "fabric manager NVIDIA GPU driver interface version 1.2 don't match with driver version 1.3\n"
    assert diagnose({"log": event}, BOOK).findings[0].cause == "calico-cni-token-unauthorized"
    assert diagnose({"log": event}, BOOK).findings[0].confidence >= TELLS
    found = {each.cause: each.confidence for each in diagnose({"log": event + own}, BOOK).findings}
    assert list(found) == ["fabricmanager-not-ready", "calico-cni-token-unauthorized"]
    assert found["calico-cni-token-unauthorized"] < TELLS


def test_what_lasts_is_the_first_error_of_a_run_that_ended_well() -> None:
    lasting = "bash: /usr/local/gib/scripts/set_nccl_env.sh: No such file or directory\n"
    found = diagnose({"log": lasting + "Application startup complete\n"}, BOOK)
    assert [each.cause for each in found.findings] == ["k8s-gib-missing"]
    assert found.first
    assert found.first.evidence.line == 1
    assert (
        diagnose({"log": "bash: /opt/a.sh: No such file or directory\nApplication startup complete\n"}, BOOK).first
        is None
    )


def test_a_program_that_is_shown_tells_no_error() -> None:
    shown = (
        "userx@n1:~$ cat odd.py\n"
        "if odd():\n"
        '    raise RuntimeError("the odd engine failed to start")\n'
        "userx@n1:~$ python odd.py\n"
    )
    ran = "E0102 03:04:05.000000  7 odd.cpp:9] no odd server\nTraceback (most recent call last):\n"
    raised = '  File "odd.py", line 2, in <module>\n    raise RuntimeError("the odd engine failed to start")\n'
    first = diagnose({"log": f"{shown}{ran}{raised}RuntimeError: the odd engine failed to start\n"}, BOOK).failure
    assert first
    assert first.line == 5


@pytest.mark.parametrize(("typed", "line"), [("ls /dev/infiniband", 3), ("./start.sh", 2)])
def test_a_file_that_somebody_looked_for_is_no_error_of_the_run(typed: str, line: int) -> None:
    """What a script says of it is."""
    for prompt in ("root@n1:/srv#", "$"):
        log = (
            f"{prompt} {typed}\nls: cannot access '/dev/infiniband': No such file or directory\nodd: error: no device\n"
        )
        first = diagnose({"log": log}, BOOK).failure
        assert first
        assert first.line == line
