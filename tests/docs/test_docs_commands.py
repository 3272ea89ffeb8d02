"""Every call of our commands in the documents is one that the command line takes."""

from typing import Any

import pytest
import typer

from secure_apfed.cli import app
from tests.docs.pages import DOCUMENTS, command_lines

CALLS = [
    pytest.param(arguments, whole, id=f"{document}-{' '.join(arguments)}")
    for document in DOCUMENTS
    for arguments, whole in command_lines(document, "secure-apfed")
]
# What a wrong call raises: typer names its child alone.
UsageError: Any = typer.BadParameter.__base__


def parse(arguments: list[str], *, whole: bool) -> None:
    """Walk down the groups and read the last command's options; nothing is run.

    What is not `whole` may lack arguments, but may not name a command or option that is not there.
    """
    command = typer.main.get_command(app)
    rest = list(arguments)
    while isinstance(command, typer.core.TyperGroup) and rest:
        name = rest.pop(0)
        assert name in command.commands, f"secure-apfed has no {name}"
        command = command.commands[name]
    if not whole and not rest:
        return
    try:
        command.make_context("call", rest)
    except UsageError as error:
        if whole or not error.format_message().startswith("Missing"):
            raise


def test_there_are_calls() -> None:
    assert len(CALLS) > 50


@pytest.mark.parametrize(("arguments", "whole"), CALLS)
def test_the_command_line_takes_it(arguments: list[str], whole: bool) -> None:
    parse(arguments, whole=whole)


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        (["run", "run.yaml", "--outptu", "x"], True),
        (["run", "--outptu", "x"], False),
        (["run"], True),
        (["study", "main", "--jobs", "many"], True),
    ],
)
def test_a_wrong_call_would_be_found(arguments: list[str], *, whole: bool) -> None:
    with pytest.raises(UsageError):
        parse(arguments, whole=whole)


@pytest.mark.parametrize("arguments", [["trian", "run.yaml"], ["study", "trian"]])
def test_a_wrong_name_would_be_found(arguments: list[str]) -> None:
    with pytest.raises(AssertionError, match="has no trian"):
        parse(arguments, whole=False)
