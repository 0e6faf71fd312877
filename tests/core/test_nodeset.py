"""Names of hosts folded into sets: what we fold ourselves is what ClusterShell makes of it."""

from __future__ import annotations

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.core import nodeset

NUMBERS = st.sets(st.integers(0, 9999), min_size=2, max_size=40)


@given(
    st.sampled_from(["n", "b200-", "", "x.y-", "n_"]),
    st.sampled_from(["", "-ib", ".x", "a"]),
    st.integers(1, 5),
    NUMBERS,
)
def test_names_with_one_number_are_folded_as_clustershell_does(
    before: str, behind: str, width: int, numbers: set[int]
) -> None:
    names = [f"{before}{number:0{width}}{behind}" for number in numbers]
    wanted = str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))
    assert nodeset.fold(names) == f"{wanted} ({len(names)})"


def test_only_names_of_one_shape_are_folded_without_clustershell() -> None:
    assert nodeset._one_range(["n1", "n2"]) == "n[1-2]"
    for names in (["n9", "n10"], ["n1", "m1"], ["a1b1", "a1b2"], ["n1", "login"], []):
        assert nodeset._one_range(names) is None
