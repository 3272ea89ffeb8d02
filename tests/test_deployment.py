"""What docs/deploy says is what the commands take; nothing of it is run here."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from secure_apfed.cli import app

DEPLOY = Path(__file__).parents[1] / "docs" / "deploy"
SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def require_command(words: Sequence[str]) -> None:
    """Parse a command line as the program does, without running it."""
    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    command.make_context(words[0], list(words[1:]))


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_says_a_command_that_there_is(name: str) -> None:
    require_command(SERVICES[name]["command"])


def test_no_two_parties_share_a_network_or_a_folder() -> None:
    parties = {name: one for name, one in SERVICES.items() if name != "relay"}
    for what in ("networks", "volumes"):
        places = [place for one in parties.values() for place in one[what]]
        assert len(places) == len(set(places))
        assert all(len(one[what]) == 1 for one in parties.values())
    assert set(SERVICES["relay"]["networks"]) == {one["networks"][0] for one in parties.values()}


def test_the_unit_says_a_command_that_there_is() -> None:
    lines = (DEPLOY / "secure-apfed-party.service").read_text().splitlines()
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    program, *words = shlex.split(start.removeprefix("ExecStart="))
    assert program.endswith("/secure-apfed")
    require_command(words)


def test_the_image_copies_what_there_is_and_no_data() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied
    assert all((DEPLOY.parents[1] / name).exists() for name in copied)
    assert "USER apfed" in lines
