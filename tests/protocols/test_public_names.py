"""The everyday names of the light distribution load, each from the module that defines it."""

import pytest

import apfed_protocols


def test_an_everyday_name_loads() -> None:
    for name in apfed_protocols.__all__:
        loaded = getattr(apfed_protocols, name)
        home = getattr(loaded, "__module__", "apfed_protocols")  # a constant has none
        assert home.split(".")[0] in ("apfed_protocols", "builtins", "typing")


def test_another_name_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(AttributeError, match=r"has no 'MaskSum'; its names are .*MaskedSum"):
        apfed_protocols.MaskSum  # noqa: B018
