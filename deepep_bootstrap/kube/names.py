"""Names that Kubernetes, its extensions and Google's clusters define, and the forms of names that people choose."""

from __future__ import annotations

import re

from deepep_bootstrap.core.toml import ValueForm

DNS_LABEL = ValueForm(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lower-case letters, digits and dashes, 63 at most")
"""RFC 1123's label: names of namespaces, Services, Jobs and containers."""

_QUALIFIED = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL_KEY = ValueForm(_QUALIFIED, "a label's key, such as cloud.google.com/gce-topology-block")
LABEL_VALUE = ValueForm(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", "a label's value of at most 63 characters")
RESOURCE = ValueForm(_QUALIFIED, "the name of a resource of nodes, such as rdma/hca_shared_devices_a")
QUANTITY = ValueForm(r"[1-9][0-9]{0,11}(Ki|Mi|Gi|Ti)?", "a quantity such as 64Gi")

DIGEST = ValueForm(r"sha256:[0-9a-f]{64}", "sha256: and 64 hexadecimal digits")
_NAME = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?"
REPOSITORY = ValueForm(rf"({_HOST}/)?{_NAME}(/{_NAME})*", "the name of an image, such as registry.example/team/deepep")
IMAGE = ValueForm(
    rf"{REPOSITORY.pattern}(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?@{DIGEST.pattern}",
    "an image by its digest: registry/name@sha256:…",
)
TAGGED = ValueForm(
    rf"{REPOSITORY.pattern}(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?", "the name of an image, perhaps with a tag"
)

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""The annotation and label of a pod of an Indexed Job with its number from 0. JOB_COMPLETION_INDEX has it too, but
stands behind the variables of the manifest, which therefore cannot refer to it."""

RUN = "app.kubernetes.io/instance"
"""The label with a run's name: all objects of one test have it, and nobody else's."""

STATE = "deepep-bootstrap/state"
"""The label of a node with how the pods of node.yaml found it, one of STATES."""
STATE_BOOT = "deepep-bootstrap/state-boot"
"""The annotation of a node with the boot that its state was written in: one of an earlier boot says nothing."""
CONDITION = "DeepEPReady"
"""The type of a node's condition that says the same with the reason."""
READY, PREPARING, PENDING, FAILED = STATES = ("ready", "preparing", "pending-reboot", "failed")

HOSTNAME = "kubernetes.io/hostname"
QUEUE = "kueue.x-k8s.io/queue-name"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
GKE_ACCELERATOR = "cloud.google.com/gke-accelerator"
GKE_SPOT = "cloud.google.com/gke-spot"
GCE_BLOCK = "cloud.google.com/gce-topology-block"
"""The label of GKE nodes with the block of machines next to each other that they are in."""

NVIDIA_GPU = "nvidia.com/gpu"
RDMA_DEVICE_CLASS = "mrdma.google.com"
"""The DeviceClass of GKE's managed DRANET for the RDMA NICs of a node."""


def image_fault(reference: str) -> str:
    """Return what is wrong with the reference of an image, "" for one by digest: a tag may mean another image
    tomorrow."""
    if not reference:
        return "no image is named"
    if IMAGE.fits(reference):
        return ""
    return "the image is named without its digest" if TAGGED.fits(reference) else "this names no image"


def with_digest(reference: str, digest: str) -> str:
    """Return the reference of an image by digest, in place of the tag that it may have."""
    return f"{re.sub(r':[^/:@]+$', '', reference.partition('@')[0])}@{digest}"
