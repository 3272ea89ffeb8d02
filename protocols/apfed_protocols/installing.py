"""Shell commands that install what is missing, for the messages of this project.

Run by: code that lacks a package. Protects from: an index that is asked for `secure-apfed` or
`apfed-protocols`, names that this project does not own there, so that anybody may offer a package
under them. A missing extra is therefore installed by naming the packages that it stands for, and
the two distributions by their paths in a checkout.
"""

import re
import shlex
from importlib import metadata

__all__ = [
    "INSTALL_CRYPTEN",
    "OWN_DISTRIBUTIONS",
    "install_checkout",
    "install_extra",
    "install_requirement",
]

OWN_DISTRIBUTIONS = ("apfed-protocols", "secure-apfed")
"""The distributions of this project, which no command asks a package index for."""
_PIP = "python -m pip install"
_PACKAGE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA_MARKER_PATTERN = re.compile(r"extra\s*==\s*[\"']([\w-]+)[\"']")
_SET_UP_CHECKOUT = "make setup (in a checkout of the project)"

INSTALL_CRYPTEN = f"{_PIP} --no-deps crypten==0.4.1"
"""CrypTen names a dead package among its requirements, so pip takes it without them."""


def install_checkout(*extras: str, editable: bool = False) -> str:
    """Return the shell command that installs both distributions of this project, with these extras
    of `secure-apfed`. It is to be run in the root of a checkout. With `editable`, later changes of
    the sources take effect without another installation.
    """
    checkout = f".[{','.join(extras)}]" if extras else "."
    editable_flag = "--editable " if editable else ""
    return f"{_PIP} {editable_flag}./protocols {editable_flag}{shlex.quote(checkout)}"


def install_extra(extra: str, distribution: str = "secure-apfed") -> str:
    """Return the shell command that installs the packages of one extra of an installed
    distribution. If the distribution runs from its sources, return the command that sets up a
    checkout.

    Examples:
        >>> install_extra("svd", "apfed-protocols")
        "python -m pip install 'scipy<2,>=1.14'"
    """
    requirements = _list_packages(extra, distribution)
    return f"{_PIP} {shlex.join(requirements)}" if requirements else _SET_UP_CHECKOUT


def install_requirement(package: str, distribution: str = "secure-apfed") -> str:
    """Return the shell command that installs one required package of an installed distribution, in
    the version that the distribution requires. If the distribution runs from its sources, return
    the command that sets up a checkout.
    """
    for line in (*_list_requirements(distribution), *_list_requirements(OWN_DISTRIBUTIONS[0])):
        requirement = line.split(";")[0].strip()
        if _normalise_name(requirement) == _normalise_name(package):
            return f"{_PIP} {shlex.quote(requirement)}"
    return _SET_UP_CHECKOUT


def _list_packages(extra: str, distribution: str) -> list[str]:
    """Return the packages, with versions, that one extra of a distribution requires. If it requires
    an extra of this project's own distributions, that extra's packages are listed in its place.
    """
    requirements: list[str] = []
    for line in _list_requirements(distribution):
        requirement, _, marker = line.partition(";")
        if extra not in _EXTRA_MARKER_PATTERN.findall(marker):
            continue
        if _normalise_name(requirement) in OWN_DISTRIBUTIONS:
            # The extras in brackets, as in "secure-apfed[svd,plots]".
            inner_extras = requirement.partition("[")[2].partition("]")[0].split(",")
            for inner_extra in inner_extras:
                requirements += _list_packages(inner_extra.strip(), distribution)
        else:
            requirements.append(requirement.strip())
    return list(dict.fromkeys(requirements))  # each once, in order


def _list_requirements(distribution: str) -> list[str]:
    """Return the requirements of an installed distribution; none if it runs from its sources."""
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:  # it runs from its sources
        return []


def _normalise_name(requirement: str) -> str:
    """Return the package name of a requirement, normalised as package indexes compare names."""
    name = _PACKAGE_NAME_PATTERN.match(requirement.strip())
    return re.sub(r"[-_.]+", "-", name.group()).lower() if name else ""
