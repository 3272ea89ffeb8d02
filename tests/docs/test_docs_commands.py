"""Every call of our commands in the documents is one that the command line takes."""

import pytest
import typer
from typer import TyperException

from apfed_experiments.cli import app as experiments
from secure_apfed.cli import app as secure_apfed
from tests.docs.pages import DOCUMENTS, command_lines

PROGRAMS = {"secure-apfed": secure_apfed, "python -m apfed_experiments": experiments}

CALLS = [
    pytest.param(program, arguments, whole, id=f"{document}-{program}-{' '.join(arguments)}")
    for program in PROGRAMS
    for document in DOCUMENTS
    for arguments, whole in command_lines(document, program)
]


def parse(program: str, arguments: list[str], *, whole: bool) -> None:
    """Walk down the groups and read the last command's options; nothing is run.

    What is not `whole` may lack arguments, but may not name a command or option that is not there.
    """
    command = typer.main.get_command(PROGRAMS[program])
    rest = list(arguments)
    while isinstance(command, typer.core.TyperGroup) and rest:
        name = rest.pop(0)
        assert name in command.commands, f"{program} has no {name}"
        command = command.commands[name]
    if not whole and not rest:
        return
    try:
        command.make_context("call", rest)
    except TyperException as error:
        if whole or not error.format_message().startswith("Missing"):
            raise


def test_there_are_calls() -> None:
    assert len(CALLS) > 50


@pytest.mark.parametrize(("program", "arguments", "whole"), CALLS)
def test_the_command_line_takes_it(program: str, arguments: list[str], whole: bool) -> None:
    parse(program, arguments, whole=whole)


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        (["run", "run.yaml", "--outptu", "x"], True),
        (["run", "--outptu", "x"], False),
        (["run"], True),
        (["table", "--jobs", "many"], True),
    ],
)
def test_a_wrong_call_would_be_found(arguments: list[str], *, whole: bool) -> None:
    with pytest.raises(TyperException):
        parse("secure-apfed", arguments, whole=whole)


def test_a_wrong_name_would_be_found() -> None:
    with pytest.raises(AssertionError, match="has no trian"):
        parse("secure-apfed", ["trian", "run.yaml"], whole=False)
