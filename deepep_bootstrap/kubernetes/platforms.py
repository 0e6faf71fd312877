"""The kinds of clusters that manifests are made for, and what every cluster of a kind has in common."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from deepep_bootstrap.kube import names

OBJECTS, DRANET, PLUGIN, HOST = "network-objects", "dranet", "device-plugin", "host"
NETWORKS = (OBJECTS, DRANET, PLUGIN, HOST)
"""How a pod comes by RDMA NICs: GKE's Network objects and annotations; its managed DRANET, a ResourceClaim; a device
plugin's resource; or the node's own network, with /dev/infiniband."""


class Platform(Struct, frozen=True):
    """A kind of cluster. `machine` and `accelerator` are Google's names ("" elsewhere), `gpus` and `nics` those of a
    node, `archs` the compute capabilities of its GPUs, `profile` the file of env/profiles, `networks` how pods come by
    their NICs unless the settings say otherwise, `gib` whether NCCL goes through Google's gIB."""

    name: str
    machine: str = ""
    accelerator: str = ""
    gpus: int = 8
    nics: int = 8
    archs: tuple[str, ...] = ()
    profile: str = ""
    networks: str = PLUGIN
    gib: bool = False
    topology: str = ""

    @property
    def is_gke(self) -> bool:
        """Whether it is a cluster of Google's."""
        return bool(self.machine)


PLATFORMS: Mapping[str, Platform] = {
    each.name: each
    for each in (
        # Machine types, accelerators and the number of NICs: docs.cloud.google.com/compute/docs/gpus, "A4 machine
        # series" and "A3 machine series"; both have eight ConnectX-7 behind one RDMA network profile.
        Platform(
            "gke-a4",
            "a4-highgpu-8g",
            "nvidia-b200",
            archs=("10.0",),
            profile="gcp-b200",
            networks=OBJECTS,
            gib=True,
            topology=names.GCE_BLOCK,
        ),
        # A3 Ultra. A3 Mega and High have GPUDirect-TCPX, which is no RDMA: DeepEP does not run between them.
        Platform(
            "gke-a3",
            "a3-ultragpu-8g",
            "nvidia-h200-141gb",
            archs=("9.0",),
            profile="roce",
            networks=OBJECTS,
            gib=True,
            topology=names.GCE_BLOCK,
        ),
        Platform("generic"),
    )
}
