"""The settings of DeepEP V2: what the hardware says, in the variables that V2 and its NCCL read instead of V1's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deepep_bootstrap.inventory.network_env import MAP, SINGLE, Derived

NIC = "EP_NIC_NAME"
LEVELS = ("NCCL_IB_SL", "EP_OVERRIDE_RDMA_SL")
GIN_OFF = "EP_DISABLE_GIN"
CHECK_OFF = "EP_SUPPRESS_NCCL_CHECK"
INTRANODE = "intranode"


def adapt(derived: Derived) -> Derived:
    """Return `derived` for DeepEP V2.

    V2 reads no map from GPU to NIC; it asks one NIC for its speed, mlx5_0 unless told. Its test chooses service level 1 where none is
    set, so that the level of the profile (0 without one) is said to the test and to everybody else alike. Without a NIC it stops
    unless NCCL's device side is switched off; a test on one node needs none. Its look at the NCCL of the process stays on.
    """
    environment = {**_named(derived.environment), CHECK_OFF: ""}
    if derived.profile == SINGLE:
        environment[GIN_OFF] = "1"
    else:
        level = derived.environment.get("NVSHMEM_IB_SL", "0")
        environment = {**dict.fromkeys(LEVELS, level), **environment}
    by_host = {node: _named(values) for node, values in derived.by_host.items()}
    by_kind = {**derived.by_kind, INTRANODE: {**derived.by_kind.get(INTRANODE, {}), GIN_OFF: "1"}}
    return replace(derived, environment=environment, by_host=by_host, by_kind=by_kind)


def _named(values: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the first NIC of the map in place of the map."""
    kept = {key: value for key, value in values.items() if key != MAP}
    if values.get(MAP):
        kept.setdefault(NIC, values[MAP].split(",")[0].split(":")[1])
    return kept
