"""Writes requirements-hashes.lock: what `make setup` installs from an index, with SHA-256 of files.

Run by: whoever changed a requirement or `requirements.lock`, by `make lock`. The releases are those
of `requirements.lock`; files of all platforms are listed, and markers say where each is needed. The
two distributions of this project are in no index: they are left out, and never asked for.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("secure-apfed", "apfed-protocols")
# Of torch there are builds with and without CUDA under one version, so `make setup` takes it first,
# from the index that it is told.
WITHOUT = ("torch", "triton")
EXTRAS = ("experiments", "grpc", "docs", "dev", "browser")
HEADER = """\
# What `make setup` and docs/deploy/Dockerfile install beside torch: releases of requirements.lock
# with the SHA-256 of their files on every platform. Written by `make lock`. Install it by
#   python -m pip install --require-hashes --no-deps --requirement requirements-hashes.lock
# torch is no part of it: its builds with and without CUDA are other files under one version.
"""


def find_requirements() -> list[str]:
    """Return the requirements of both distributions, without the two themselves."""
    found = ["crypten==0.4.1", "omegaconf>=2.3,<3"]
    for file in (ROOT / "pyproject.toml", ROOT / "protocols" / "pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        extras = project.get("optional-dependencies", {})
        found += project["dependencies"]
        for name in (*EXTRAS, "svd"):
            found += extras.get(name, [])
    name = re.compile(r"[A-Za-z0-9-]+")
    return [line for line in found if name.match(line)[0] not in OURS]  # type: ignore[index]


def main() -> None:
    """Compile the lock with uv."""
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "-", "--universal", "--generate-hashes",
        "--python-version", "3.11", "--no-annotate", "--no-header", "--quiet",
        "--constraint", "requirements.lock",
    ]  # fmt: skip
    command += [f"--no-emit-package={name}" for name in WITHOUT]
    asked = "\n".join(find_requirements())
    compiled = subprocess.run(  # noqa: S603 - a fixed program
        command, cwd=ROOT, input=asked, check=True, text=True, capture_output=True
    ).stdout
    entries = re.split(r"\n(?=\S)", compiled.strip())
    kept = [one for one in entries if not re.match(r"(nvidia|cuda)-", one)]
    (ROOT / "requirements-hashes.lock").write_text(HEADER + "\n".join(kept) + "\n")


if __name__ == "__main__":
    main()
