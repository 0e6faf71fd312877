"""What `invoke status` says of the hosts' MODULEPATH."""

from __future__ import annotations

import pytest

from deepep_bootstrap.cli.commands.status import MISSING, NOT_NEEDED, hook_words


@pytest.mark.parametrize(
    ("hook", "words", "style"),
    [
        ("/shared/deepep/modulefiles", "leads to /shared/deepep", ""),
        ("/shared/deepep2/modulefiles", "leads to /shared/deepep2, not to this prefix", "bold red"),
        (MISSING, "is not set up", "red"),
        (NOT_NEEDED, "not needed, no module system", ""),
    ],
)
def test_the_hook_of_another_prefix_is_red(hook: str, words: str, style: str) -> None:
    assert hook_words(hook, "/shared/deepep") == (words, style)
