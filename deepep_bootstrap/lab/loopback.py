"""The lab without root: one sshd per host on addresses of 127.77, Slurm with several slurmd, all as this
user.

Less real than hosts made of namespaces: all hosts share name, /etc, ports, devices and process table,
node names do not resolve, nothing can be rebooted, and the module system is the machine's own, if it has
one.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import shutil
import socket
import time
from pathlib import Path

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.lab import cluster_lab, image, slurm
from deepep_bootstrap.lab.cluster_lab import Lab, LabHost

PACKAGES = ("openssh-server", "slurmctld", "slurmd", "slurm-client", "munge")
CLIENTS = ("sinfo", "squeue", "sbatch", "srun", "salloc", "scancel", "scontrol", "sacct", "sattach", "sstat")
START_LIMIT = 30.0
FIRST_PORT = 20000


def ensure_image(say: cluster_lab.Say) -> Path:
    """Return the folder where the Debian packages that this machine lacks are unpacked, fetching them first where
    needed."""
    lack = _missing_packages()
    folder = cluster_lab.cache_dir() / f"loopback-{hashlib.sha256(' '.join(lack).encode()).hexdigest()[:16]}"
    with image.locked("image"):
        if not folder.exists():
            say(f"unpacking {len(lack)} packages into {folder} (once; nothing is installed)")
            scratch = folder.with_name(f".tmp-{folder.name}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            if lack:
                _unpack(scratch, lack)
            scratch.rename(folder)
    return folder


def _missing_packages() -> list[str]:
    """Ask apt what an installation would bring, as `name=version`; a simulation needs no rights."""
    words = ["apt-get", "-q", "-s", "--no-install-recommends", "install", *PACKAGES]
    done = process.run_program(words, env=cluster_lab.CLEAN_ENV)
    if done.code != 0:
        raise Trouble(
            Problem(
                "lab", "apt-get finds no packages for a lab without root", found=done.tail, try_="sudo apt-get update"
            )
        )
    return sorted(
        f"{name}={version}"
        for name, version in re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", done.out, re.MULTILINE)
    )


def _unpack(folder: Path, packages: list[str]) -> None:
    archives = folder / "archives"
    archives.mkdir()
    done = process.run_program(
        ["apt-get", "-q", "download", *packages], env=cluster_lab.CLEAN_ENV, cwd=archives, timeout=image.BUILD_LIMIT
    )
    if done.code != 0:
        raise Trouble(
            Problem("lab", "fetching packages failed", found=done.tail, try_="sudo apt-get update, then invoke lab up")
        )
    for archive in archives.glob("*.deb"):
        cluster_lab.must(["dpkg-deb", "-x", archive, folder])
    shutil.rmtree(archives)
    # Slurm's daemons come as slurmd-wlm; the links that an installation makes matter: under another name they read no
    # GRES.
    for program in folder.glob("usr/sbin/*-wlm"):
        program.with_name(program.name.removesuffix("-wlm")).symlink_to(program.name)


def prepare(the_lab: Lab) -> None:
    """Write keys, configurations and the wrappers of Slurm's programs; start munged."""
    for folder in ("bin", "run", "log/slurm", "spool/slurmctld", "shared"):
        (the_lab.path / folder).mkdir(parents=True)
    cluster_lab.write_user_files(the_lab, getpass.getuser())
    for name in CLIENTS:
        if Path(_program(the_lab, name)).exists():
            _write_wrapper(the_lab, name)
    for host in the_lab.hosts:
        _prepare_host(the_lab, host)
    _write_slurm_config(the_lab)
    run, log = the_lab.path / "run", the_lab.path / "log"
    key = the_lab.identity.parent / "munge"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = [f"--key-file={key}", f"--socket={run}/munge.sock", f"--pid-file={run}/munged.pid"]
    _daemon(the_lab, "munged", *files, f"--log-file={log}/munged.log", f"--seed-file={run}/munged.seed", "--force")


def boot(the_lab: Lab, *hosts: LabHost) -> None:
    """Start sshd and the Slurm daemon of `hosts` and wait until sshd answers."""
    config = the_lab.path / "slurm" / "slurm.conf"
    for host in hosts:
        home = the_lab.home(host.name)
        (home / "ready").unlink(missing_ok=True)
        _daemon(the_lab, "sshd", "-f", str(home / "sshd_config"), "-E", str(home / "console"))
        if host.role == "gpu":
            _daemon(the_lab, "slurmd", "-N", host.name, "-f", str(config), "-d", _program(the_lab, "slurmstepd"))
        else:
            _daemon(the_lab, "slurmctld", "-f", str(config))
    deadline = time.monotonic() + START_LIMIT
    for host in hosts:
        while not (_answers(host) and (the_lab.home(host.name) / "pid").exists()):
            if time.monotonic() > deadline:
                console = (the_lab.home(host.name) / "console").read_text(encoding="utf-8", errors="replace")
                raise Trouble(Problem(host.name, f"sshd does not answer after {START_LIMIT:g} s", found=console[-500:]))
            time.sleep(0.02)
        (the_lab.home(host.name) / "ready").touch()


def enter(the_lab: Lab, name: str) -> tuple[str, ...]:
    """Return the command prefix that runs something with a host's programs on PATH; all hosts are this machine."""
    return ("env", f"LAB_HOST={name}", f"PATH={_path(the_lab, name)}")


def boot_id(the_lab: Lab, name: str) -> str:
    """Return the machine's boot id for a host whose sshd runs, empty for one that is off."""
    return (
        Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        if cluster_lab.alive(the_lab, name)
        else ""
    )


def logs(the_lab: Lab) -> list[Path]:
    """Return the files that explain a Slurm that does not start."""
    return sorted((the_lab.path / "log").rglob("*.log"))


def _answers(host: LabHost) -> bool:
    try:
        with socket.create_connection((host.address, host.port), timeout=1):
            return True
    except OSError:
        return False


def _prepare_host(the_lab: Lab, host: LabHost) -> None:
    home = the_lab.home(host.name)
    for folder in ("bin", "home", "lab/fake"):
        (home / folder).mkdir(parents=True)
    keys = the_lab.identity.parent
    session = (
        f"HOME={home}/home LAB_HOST={host.name} LAB_FAKES={home}/lab/fake PATH={_path(the_lab, host.name)} "
        f"{cluster_lab.MARK}={the_lab.dir}"
    )
    if host.role == "gpu":
        shutil.copy(cluster_lab.data_folder() / "lab" / "nvidia-smi", home / "bin" / "nvidia-smi")
        toolkit = cluster_lab.data_folder() / "fakes" / "cuda"
        if toolkit.is_dir():
            shutil.copytree(toolkit, home / "cuda", symlinks=True)
            session += f" CUDA_HOME={home}/cuda"
    text = f"""ListenAddress {host.address}:{host.port}
HostKey {keys / host.name}
PidFile {home}/pid
AuthorizedKeysFile {keys / "id.pub"}
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
KexAlgorithms curve25519-sha256
MaxStartups 200
SetEnv {session}
Subsystem sftp internal-sftp -d {home}/home
"""
    (home / "sshd_config").write_text(text, encoding="utf-8")


def _write_slurm_config(the_lab: Lab) -> None:
    nodes = [host.name for host in the_lab.hosts if host.role == "gpu"]
    port = FIRST_PORT + 10 * the_lab.index
    name = socket.gethostname().partition(".")[0]
    for node in nodes:
        (the_lab.path / "spool" / f"slurmd.{node}").mkdir()
    plugins = _folder(the_lab, "usr/lib/*/slurm-wlm")
    extra = [
        f"SlurmdUser={getpass.getuser()}",
        f"SlurmctldPort={port}",
        f"AuthInfo=socket={the_lab.dir}/run/munge.sock",
        f"PluginDir={plugins}",
        *(
            f"NodeName={node} NodeHostname={name} NodeAddr=127.0.0.1 Port={port + 1 + i} {slurm.NODE}"
            for i, node in enumerate(nodes)
        ),
    ]
    values = {
        "controller": f"{name}(127.0.0.1)",
        "user": getpass.getuser(),
        "state": the_lab.dir,
        "run": f"{the_lab.dir}/run",
        "each": ".%n",
        "nodes": ",".join(nodes),
        "extra": "\n".join(extra),
    }
    shown = cluster_lab.must([_program(the_lab, "slurmd"), "-V"], env=_environment(the_lab)).split()[-1].split(".")
    slurm.write_config(the_lab.path / "slurm", values, (int(shown[0]), int(shown[1])), _gpu_files(the_lab))


def _gpu_files(the_lab: Lab) -> str:
    """Return what stands for the GPUs in gres.conf. Slurm numbers GPUs for jobs only where their files are devices,
    and looks no further than that: the consoles will do. Where they are missing, plain files let jobs ask for GPUs,
    but see no numbers."""
    if all(Path(f"/dev/tty{number}").is_char_device() for number in range(8)):
        return "/dev/tty[0-7]"
    for number in range(8):
        (the_lab.path / f"nvidia{number}").touch()
    return f"{the_lab.dir}/nvidia[0-7]"


def _write_wrapper(the_lab: Lab, name: str) -> None:
    file = the_lab.path / "bin" / name
    settings = "\n".join(
        f"export {key}='{value}'"
        for key, value in _environment(the_lab).items()
        if key in ("LD_LIBRARY_PATH", "SLURM_CONF")
    )
    file.write_text(f'#!/bin/sh\n{settings}\nexec {_program(the_lab, name)} "$@"\n', encoding="utf-8")
    file.chmod(0o755)


def _path(the_lab: Lab, name: str) -> str:
    home = the_lab.home(name)
    return f"{home}/bin:{home}/cuda/bin:{the_lab.dir}/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def _folder(the_lab: Lab, pattern: str) -> Path:
    """Find a folder among the unpacked packages, else on the machine."""
    found = sorted(Path(the_lab.image).glob(pattern)) or sorted(Path("/").glob(pattern))
    if not found:
        raise Trouble(
            Problem("lab", f"no {pattern} in the lab's packages", try_=f"rm -rf {the_lab.image}, then invoke lab up")
        )
    return found[0]


def _program(the_lab: Lab, name: str) -> str:
    """Find a program among the unpacked packages, else on the machine; sshd wants an absolute path."""
    for root in (Path(the_lab.image), Path("/")):
        for place in ("usr/sbin", "usr/bin"):
            if (root / place / name).exists():
                return str(root / place / name)
    return f"/usr/sbin/{name}"


def _environment(the_lab: Lab) -> dict[str, str]:
    image = Path(the_lab.image)
    libraries = [*image.glob("usr/lib/*-linux-gnu"), *image.glob("lib/*-linux-gnu"), *image.glob("usr/lib/*/slurm-wlm")]
    config = str(the_lab.path / "slurm" / "slurm.conf")
    own = {cluster_lab.MARK: the_lab.dir, "SLURM_CONF": config, "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    return cluster_lab.CLEAN_ENV | own | {"HOME": str(Path.home())}


def _daemon(the_lab: Lab, name: str, *words: str) -> None:
    """Start a program that goes to the background by itself."""
    program = _program(the_lab, name)
    # A daemon may keep the stream it was started with: give it none of ours, or we would wait for its end.
    shell = 'exec "$@" >>"$0" 2>&1 </dev/null'
    log = the_lab.path / "log" / f"start-{name}.log"
    done = process.run_program(
        ["sh", "-c", shell, log, program, *words], env=_environment(the_lab), timeout=START_LIMIT
    )
    if done.code != 0:
        raise Trouble(
            Problem(
                "lab",
                f"{name} does not start (code {done.code})",
                found=log.read_text(encoding="utf-8", errors="replace")[-500:],
            )
        )
