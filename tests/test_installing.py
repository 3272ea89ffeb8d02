"""How to install: no line asks an index for this project's own names, and every line resolves."""

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from apfed_protocols.installing import (
    INSTALL_CRYPTEN,
    OWN_DISTRIBUTIONS,
    install_checkout,
    install_extra,
    install_requirement,
)

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = {
    "secure-apfed": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"],
    "apfed-protocols": tomllib.loads((ROOT / "protocols/pyproject.toml").read_text())["project"],
}
EXTRAS = [(name, extra) for name, of in PROJECTS.items() for extra in of["optional-dependencies"]]
WRITTEN = (".py", ".md", ".toml", ".lock", ".txt", ".yml", ".yaml", ".ipynb", ".sh", ".html", ".j2")
NAMED = ("Makefile", "Dockerfile", "run")
INSTALLS = re.compile(
    r"(?:pip3?|\$\(PIP\)|\$\(INSTALL\))[\w\s./'\"-]*?\b(?:install|download|wheel)\b"
)
# Where lines are made or read, and no line of its own stands.
MAKES_LINES = ("protocols/apfed_protocols/installing.py", "tests/test_installing.py")
NAME = re.compile(r"(?<![\w./-])(secure[-_.]apfed|apfed[-_.]protocols)(?![\w./]|-\d)")


def iterate_files() -> Iterator[Path]:
    """Yield every file of the project that may tell somebody what to type."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in listed:
        path = ROOT / name
        tells = path.suffix in WRITTEN or path.name.startswith(NAMED)
        if tells and name not in MAKES_LINES and path.is_file():
            yield path


def lines_of(path: Path) -> Iterator[str]:
    """Yield its lines that install something, continued ones as one."""
    text = path.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    for line in text.splitlines():
        if INSTALLS.search(line) and not line.lstrip().startswith("#"):
            yield line.strip()


def commands_of(line: str) -> Iterator[list[str]]:
    """Yield the words behind each `pip install` of a line, up to what ends the command."""
    for found in INSTALLS.finditer(line):
        rest = re.split(r"&&|\|\||;|`|  #", line[found.end() :])[0]
        try:
            yield shlex.split(rest)
        except ValueError:
            yield rest.split()


LINES = [
    (path.relative_to(ROOT).as_posix(), line) for path in iterate_files() for line in lines_of(path)
]


def test_lines_that_install_are_found() -> None:
    places = {place for place, _ in LINES}
    assert {"docs/deploy/Dockerfile", "docs/start.md", "docs/examples.md"} <= places


@pytest.mark.parametrize(
    ("place", "line"), LINES, ids=[f"{place}-{n}" for n, (place, _) in enumerate(LINES)]
)
def test_no_line_asks_an_index_for_our_names(place: str, line: str) -> None:
    if place == "CHANGELOG.md":  # says what was
        return
    for words in commands_of(line):
        assert not [word for word in words if NAME.search(word)], line
        paths = [word for word in words if word == "." or word.startswith(".[")]
        assert not paths or "./protocols" in words, (
            f"{line}: ./protocols is not named beside {paths}"
        )


PLANTED = [
    "pip install secure-apfed",
    "python -m pip install 'secure-apfed[grpc]'",
    'run pip install "secure_apfed[experiments]", or',
    "pip install --upgrade apfed-protocols==0.1.0",
    "RUN pip install --no-cache-dir --constraint requirements.lock '.[grpc,experiments]'",
    "python -m pip install .",
    "pip3 install Secure-APFed",
]


@pytest.mark.parametrize("line", PLANTED)
def test_the_walk_finds_what_is_planted(line: str) -> None:
    with pytest.raises(AssertionError):
        test_no_line_asks_an_index_for_our_names("docs/page.md", line.lower())


def test_no_message_or_page_writes_a_line_of_its_own() -> None:
    """Messages take theirs from `apfed_protocols.installing`; pages have those of a checkout."""
    code = ("secure_apfed/", "protocols/", "attacks/", "experiments/")
    in_code = [
        f"{place}: {line}"
        for place, line in LINES
        if place.endswith(".py") and place.startswith(code)
    ]
    assert in_code == []


@pytest.mark.parametrize(("distribution", "extra"), EXTRAS)
def test_an_extra_is_installed_by_the_packages_that_it_stands_for(
    distribution: str, extra: str
) -> None:
    line = install_extra(extra, distribution)
    words = shlex.split(line)
    assert words[:4] == ["python", "-m", "pip", "install"]
    packages = {canonicalize_name(Requirement(word).name) for word in words[4:]}
    assert packages
    assert not packages & set(OWN_DISTRIBUTIONS)
    declared = PROJECTS[distribution]["optional-dependencies"][extra]
    named = {canonicalize_name(Requirement(one).name) for one in declared} - set(OWN_DISTRIBUTIONS)
    assert named <= packages


def test_a_line_for_a_required_package_names_its_range() -> None:
    assert install_requirement("torch") == "python -m pip install 'torch<3,>=2.6'"
    assert install_requirement("PyNaCl").startswith("python -m pip install ")
    assert (
        install_requirement("pynacl")
        == install_requirement("PyNaCl")
        != install_requirement("none")
    )


def test_without_metadata_a_line_says_what_works_in_a_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", lost)
    assert install_extra("grpc").startswith("make setup")
    assert install_requirement("torch").startswith("make setup")


def load_versions(lock: str) -> dict[str, str]:
    """Return the version of each package of a lock."""
    lines = re.findall(r"^([\w.-]+)==([^\s;\\]+)", (ROOT / lock).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def test_every_pin_has_hashes_and_is_the_one_of_the_lock() -> None:
    """Torch and torchvision apart, whose builds are other files under one version."""
    hashed = load_versions("requirements-hashes.lock")
    locked = load_versions("requirements.lock")
    entries = re.split(r"\n(?=[\w])", (ROOT / "requirements-hashes.lock").read_text())
    for entry in entries[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:60]
    elsewhere = {name for name in hashed if name not in locked}
    assert {name: hashed[name] for name in hashed if name in locked} == {
        name: locked[name] for name in hashed if name in locked
    }
    # What other systems than the tested one need alone.
    assert elsewhere <= {"appnope", "pywin32-ctypes"}
    # Torch, what fits one of its builds, and what a release of opacus asked for.
    assert {"torch"} <= locked.keys() - hashed.keys() <= {"torch", "torchvision", "tqdm"}
    assert not set(OWN_DISTRIBUTIONS) & (hashed.keys() | locked.keys())


def docker_commands() -> list[str]:
    """Return the commands of the Docker file, in order, without their `RUN`."""
    text = (ROOT / "docs/deploy/Dockerfile").read_text().replace("\\\n", " ")
    return [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ")]


def list_docker_copies() -> list[str]:
    text = (ROOT / "docs/deploy/Dockerfile").read_text()
    words = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    return [name for line in words for name in line]


def test_the_docker_file_copies_what_its_commands_read() -> None:
    """The fast half of following it line by line."""
    copied = list_docker_copies()
    assert all((ROOT / name).exists() for name in copied)
    *_, hashed, torch, ours, user = docker_commands()
    assert "--require-hashes" in hashed
    assert "--no-deps" in hashed
    assert torch.split()[-1] == "torch"
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(ours.split())
    assert ours.split()[-2:] == ["./protocols", "."]
    assert user.startswith("useradd")
    for words in (hashed.split(), torch.split()):
        files = {
            words[at + 1]
            for at, word in enumerate(words)
            if word in ("--requirement", "--constraint")
        }
        assert files <= set(copied)
    assert {"hatchling", "torch"} <= load_versions("requirements.lock").keys()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with nothing but pip."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_docker_file_is_followed_line_by_line(clean: Path, tmp_path: Path) -> None:
    for name in list_docker_copies():
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path / name)], check=True)
    for command in docker_commands():
        if command.startswith("useradd"):
            continue
        words = shlex.split(command)
        assert words[0] == "python"
        if "--extra-index-url" in words:  # the machine's own configuration knows a build of torch
            at = words.index("--extra-index-url")
            words = words[:at] + words[at + 2 :]
        done = subprocess.run(
            [str(clean / "bin/python"), *words[1:], "--quiet"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    said = subprocess.run(
        [str(clean / "bin/secure-apfed"), "doctor", "--load"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "secure-apfed" not in re.findall(r"pip install (.*)", said.stdout)
    listed = subprocess.run(
        [str(clean / "bin/python"), "-m", "pip", "check"],
        check=False,
        capture_output=True,
        text=True,
    )
    problems = [line for line in listed.stdout.splitlines() if "crypten" not in line]
    assert [line for line in problems if "No broken" not in line] == []


def stand_in(distribution: metadata.Distribution, folder: Path) -> None:
    """Write a wheel without code that requires what the installed distribution requires."""
    name = canonicalize_name(distribution.metadata["Name"]).replace("-", "_")
    version = distribution.version.partition("+")[0]
    text = (distribution.read_text("METADATA") or "").replace(distribution.version, version, 1)
    inside = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{inside}/METADATA", text.encode())
        wheel.writestr(
            f"{inside}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{inside}/RECORD", "")


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins of all that is installed here, without our two."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    for distribution in metadata.distributions():
        if canonicalize_name(distribution.metadata["Name"]) not in OWN_DISTRIBUTIONS:
            stand_in(distribution, folder)
    return folder


RESOLVED = {
    "checkout": install_checkout(),
    "checkout with extras": install_checkout("experiments", "grpc", "sql", "onnx", "tensorboard"),
    "editable checkout": install_checkout("experiments", editable=True),
    "crypten": INSTALL_CRYPTEN,
    **{extra: install_extra(extra) for extra in ("experiments", "grpc", "sql", "onnx")},
    "tensorboard": install_extra("tensorboard"),
    "svd": install_extra("svd", "apfed-protocols"),
    "torch": install_requirement("torch"),
}


@pytest.mark.slow
@pytest.mark.parametrize("subject", RESOLVED)
def test_a_line_resolves_where_no_index_is(subject: str, wheelhouse: Path, clean: Path) -> None:
    words = shlex.split(RESOLVED[subject])
    options = [
        "--dry-run",
        "--no-index",
        "--find-links",
        str(wheelhouse),
        "--ignore-installed",
        "--no-build-isolation",
        "--quiet",
    ]
    done = subprocess.run(
        [sys.executable, *words[1:4], *options, *words[4:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
