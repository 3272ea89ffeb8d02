"""The names that other code imports from the package itself."""

import subprocess
import sys

import pytest

import secure_apfed


@pytest.mark.parametrize("name", secure_apfed.__all__)
def test_every_name_has_a_home(name: str) -> None:
    assert getattr(secure_apfed, name) is not None
    assert name in dir(secure_apfed)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no 'Nothing'"):
        secure_apfed.Nothing  # noqa: B018  # the access is what is tested


def test_one_part_does_not_load_the_rest() -> None:
    script = (
        "import sys, secure_apfed; secure_apfed.align; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'tenseal')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
