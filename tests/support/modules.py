"""A small offer for the tests of modules and verify."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.prefix import modulefiles
from deepep_bootstrap.prefix.offer import Offer, SiteSettings, StackRecord
from tests.support.paths import ROOT

REPOSITORY = ROOT


def templates() -> dict[str, str]:
    return read_tree(REPOSITORY / "env")


def record(prefix: str = "/opt/deepep", **changes: object) -> StackRecord:
    """A stack with a Python of the store."""
    plain = StackRecord(
        stack="v1",
        module="deepep/1.2.1-8a07e7e-v1",
        prefix=prefix,
        deepep="0d1xa4qy3rjbnp2d6mxfhw5k1zs7vc8i-deepep-1.2.1",
        nvshmem="1f7yb5rz4skcnq3f7nyghx6l2as8wd9j-nvshmem-3.4.5",
        gdrcopy="2g8zc6sa5tldnr4g8pzhiy7m3bt9xf0k-gdrcopy-2.5.1",
        python="3h9ad7tb6umfns5h9qairz8n4cu0yg1l-python-2.10.0",
        external_python="",
        python_version="3.12.3",
        cuda_home="/usr/local/cuda-12.8",
        archs=("9.0", "10.0"),
        profile="b200",
        environment={"NVSHMEM_IB_GID_INDEX": "3", "NCCL_IB_TC": "52", "TORCH_NCCL_USE_COMM_NONBLOCKING": ""},
        site=SiteSettings(),
        torch="2.10.0",
        cuda="12.8.93",
    )
    return structs.replace(plain, **changes)


def external_record(prefix: str = "/opt/deepep", **changes: object) -> StackRecord:
    """A stack that joins an existing Python environment."""
    return record(
        prefix,
        **{
            "stack": "v1-cu13",
            "module": "deepep/1.2.1-8a07e7e-v1-cu13",
            "deepep": "4i0be8uc7vngnt6i0rbjsa9p5dv1zh2m-deepep-1.2.1",
            "nvshmem": "5j1cf9vd8wphnv7j1sckta0q6fw2ai3n-nvshmem-3.4.5",
            "python": "",
            "external_python": "/opt/venv/bin/python",
            "cuda_home": "/usr/local/cuda",
            "torch": "2.11.0",
            "cuda": "13.0.88",
            "profile": "h200",
            "environment": {"NVSHMEM_IB_GID_INDEX": "5"},
            "site": SiteSettings(
                partition="batch",
                account="ml",
                qos="high",
                gres="gpu:8",
                sbatch_args=("-C", "h200", "--reservation=maint"),
            ),
        }
        | changes,
    )


def cloud_record(prefix: str = "/opt/deepep", **changes: object) -> StackRecord:
    """A stack for hosts that differ, with Google's gIB and a service level for low-latency traffic."""
    maps = {
        "b200-001": "0:mlx5_0:1,1:mlx5_1:1",
        "b200-002": "0:mlx5_0:1,1:mlx5_1:1",
        "b200-003": "0:mlx5_1:1,1:mlx5_2:1",
    }
    return record(
        prefix,
        **{
            "stack": "v1-gcp",
            "module": "deepep/1.2.1-8a07e7e-v1-gcp",
            "profile": "gcp-b200",
            "environment": {
                "NVSHMEM_IBGDA_NIC_HANDLER": "gpu",
                "NVSHMEM_IB_SL": "1",
                "TORCH_NCCL_USE_COMM_NONBLOCKING": "",
            },
            "by_host": {
                host: {
                    "DEEP_EP_DEVICE_TO_HCA_MAPPING": text,
                    **({"NCCL_SOCKET_IFNAME": "=ens3"} if host == "b200-003" else {}),
                }
                for host, text in maps.items()
            },
            "by_kind": {"low-latency": {"NVSHMEM_IB_SL": "2"}},
            "gib": "/usr/local/gib/scripts/set_nccl_env.sh",
        }
        | changes,
    )


def v2_record(prefix: str = "/opt/deepep", **changes: object) -> StackRecord:
    """DeepEP V2: NCCL of its own environment, kernels compiled on the nodes."""
    return record(
        prefix,
        **{
            "stack": "v2",
            "module": "deepep/2.1.0-dd758ca-v2",
            "deepep": "6k2dg0we9xqiow8k2tdlub1r7gx3bj4p-deepep-2.1.0",
            "nvshmem": "7l3eh1xf0yrjpx9l3uemvc2s8hy4ck5q-nvshmem-3.4.5",
            "gdrcopy": "",
            "python": "8m4fi2yg1zskqy0m4vfnwd3t9iz5dl6r-python-2.11.0",
            "cuda_home": "/usr/local/cuda-13.0",
            "torch": "2.11.0",
            "cuda": "13.0.88",
            "environment": {
                "NCCL_IB_SL": "0",
                "EP_OVERRIDE_RDMA_SL": "0",
                "EP_NIC_NAME": "mlx5_0",
                "EP_SUPPRESS_NCCL_CHECK": "",
            },
            "by_kind": {"intranode": {"EP_DISABLE_GIN": "1"}},
            "nccl": "2.30.4",
        }
        | changes,
    )


def v2_beside_torch(prefix: str = "/opt/deepep", **changes: object) -> StackRecord:
    """DeepEP V2 beside an external Python, with the NCCL and NVSHMEM that its torch brings."""
    site = "/opt/vllm/lib/python3.12/site-packages/nvidia"
    return v2_record(
        prefix,
        **{
            "stack": "v2-vllm",
            "module": "deepep/2.0.0-d4f41e4-v2-vllm",
            "deepep": "9n5gj3zh2atlrz1n5wgoxe4uaj0em7xs-deepep-2.0.0",
            "nvshmem": "",
            "python": "",
            "external_python": "/opt/vllm/bin/python",
            "torch": "2.14.0",
            "nccl": "2.30.7",
            "torch_nccl": f"{site}/nccl",
            "torch_nvshmem": f"{site}/nvshmem",
            "nvshmem_version": "3.4.5",
        }
        | changes,
    )


def v2_own_nccl(prefix: str = "/opt/deepep", **changes: object) -> StackRecord:
    """DeepEP V2 beside an external Python whose torch brings an older NCCL: the store's is loaded first."""
    return v2_beside_torch(
        prefix,
        **{
            "stack": "v2-own-nccl",
            "module": "deepep/2.0.0-d4f41e4-v2-own-nccl",
            "deepep": "0p6hk40i3bumsa2p6xhpyf5vbk1fn8yz-deepep-2.0.0",
            "torch": "2.13.0",
            "torch_nccl": "",
            "own_nccl": "1q7il51j4cvntb3q7yiqzg6wcl2gp9za-nccl-2.30.7",
        }
        | changes,
    )


def v25_record(prefix: str = "/opt/deepep", **changes: object) -> StackRecord:
    """DeepEP V2.5: as V2, without NVSHMEM and without V1's kernels."""
    changes = {
        "stack": "v2.5",
        "module": "deepep/2.5.0-93eb6eb-v2.5",
        "deepep": "9n5gj3zh2atlrz1n5wgoxe4uaj06em7s-deepep-2.5.0",
        "cuda_home": "/usr/local/cuda-13.2",
        "torch": "2.15.0",
        "cuda": "13.2.86",
        "nccl": "2.32.3",
    } | changes
    return v2_record(prefix, **changes)


def offer(prefix: str = "/opt/deepep", *records: StackRecord) -> Offer:
    stacks = records or (record(prefix), external_record(prefix))
    return Offer(default_stack=stacks[0].key, stacks={one.key: one for one in stacks}, templates="sha256-test")


def golden() -> dict[str, modulefiles.File]:
    """The files that tests/golden/generation records: one stack of each sort."""
    return modulefiles.render_offer(
        offer(
            "/opt/deepep", record(), external_record(), cloud_record(), v2_record(), v2_beside_torch(), v2_own_nccl()
        ),
        templates(),
    )


def grace_record(prefix: str = "/opt/deepep", **changes: object) -> StackRecord:
    """DeepEP V2 for Grace machines, four GPUs a node, beside that of `v2_record` in one prefix."""
    return v2_record(
        prefix,
        **{
            "deepep": "9n5gj3zh2atlrz1n5wgoxe4u0ja6em7s-deepep-2.1.0",
            "nvshmem": "0p6hk40i3bumsa2p6xhpyf5v1kb7fn8t-nvshmem-3.4.5",
            "python": "1q7il51j4cvntb3q7yiqzg6w2lc8gp9v-python-2.11.0",
            "archs": ("10.0",),
            "profile": "gb200",
            "environment": {"NCCL_IB_SL": "0", "EP_OVERRIDE_RDMA_SL": "0", "NCCL_MNNVL_ENABLE": "1"},
            "by_host": {"tray1": {"EP_NIC_NAME": "mlx5_0"}, "tray2": {"EP_NIC_NAME": "mlx5_1"}},
            "site": SiteSettings(partition="grace", gres="gpu:4"),
            "machine": "aarch64",
            "hosts": ("tray1", "tray2"),
            "gpus": 4,
        }
        | changes,
    )


def golden_of_machines() -> dict[str, modulefiles.File]:
    """The files that tests/golden/machines records: an x86_64 and an aarch64 build of one stack, and a stack that
    only one of the two has."""
    return modulefiles.render_offer(offers_of_machines(), templates())


def offers_of_machines(prefix: str = "/opt/deepep") -> Offer:
    """An x86_64 and an aarch64 offer in one prefix."""
    records = (v2_record(prefix), grace_record(prefix), record(prefix))
    return Offer(default_stack="v2", stacks={one.key: one for one in records}, templates="sha256-test")


def write(folder: Path, files: dict[str, modulefiles.File]) -> None:
    """Write a rendered generation into `folder`."""
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(0o755 if file.executable else 0o644)


def is_copy(name: str) -> bool:
    """Whether a file is left out of tests/golden: it has the text of another, or differs from another by names
    alone."""
    stacks = (
        "sbatch/v1-cu13/internode",
        "sbatch/v1-cu13/intranode",
        "sbatch/v1-cu13/low-latency",
        "sbatch/v1-gcp/low-latency",
    )
    kept = (*stacks, "sbatch/v1-cu13/pressure", "sbatch/v2/internode", "sbatch/v2/ep", "sbatch/v2/smoke")
    kept += ("sbatch/v2-aarch64/internode",)
    if name.startswith("slurm/"):
        return name not in {"slurm/deepep-health-v1-gcp.sh", "slurm/deepep-health-v2.sh"}
    copied = name.startswith(("programs/", "examples/", "bin/deepep-venv"))
    return copied or name in {"env.sh", "deepep-env.sh"} or (name.startswith("sbatch/") and not name.startswith(kept))


def is_of_machines(name: str) -> bool:
    """Whether tests/golden/machines keeps a file: one that several kinds of machine make another."""
    return name.startswith(("modulefiles/", "env-", "sbatch/v2-aarch64/")) and not is_copy(name)


if __name__ == "__main__":
    GOLDEN = REPOSITORY / "tests" / "golden" / "generation"
    write(GOLDEN, {name: file for name, file in golden().items() if not is_copy(name)})
    write(
        GOLDEN.with_name("machines"),
        {name: file for name, file in golden_of_machines().items() if is_of_machines(name)},
    )
