"""Versions of transformers that are not the one we follow are refused, by name."""

from __future__ import annotations

import pytest
import transformers

from kvservice_client._hf_compat import SUPPORTED, check_version, require


@pytest.mark.parametrize("version", ["5.20.0", "5.24.0", "5.31.0.dev0", "5.99.1rc2"])
def test_supported_versions(version: str) -> None:
    """The fifth major version, from the first one with this cache contract."""
    check_version(version)


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.19.9", "6.0.0", "6.0.0.dev0", "main"])
def test_other_versions_are_refused(version: str) -> None:
    """The message says which was found, and which are supported."""
    with pytest.raises(ImportError, match=SUPPORTED) as refusal:
        check_version(version)
    assert version in str(refusal.value)


@pytest.mark.parametrize(
    ("module", "name", "members"),
    [
        ("transformers.cache_utils", "NoSuchCache", ()),
        ("transformers.no_such_module", "DynamicCache", ()),
        ("transformers.cache_utils", "DynamicCache", ("update", "no_such_member")),
    ],
)
def test_what_is_missing_is_named(module: str, name: str, members: tuple[str, ...]) -> None:
    """A version that lacks something is refused at import, with the name of what it lacks."""
    with pytest.raises(ImportError) as refusal:
        require(module, name, *members)
    assert f"{module}.{name}" in str(refusal.value)
    assert transformers.__version__ in str(refusal.value)
    assert SUPPORTED in str(refusal.value)
