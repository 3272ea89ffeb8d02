"""docs/between-organisations.md as printed: its file is a party's file, its code runs."""

import re
from pathlib import Path

from secure_apfed.config.file import load_settings_text
from secure_apfed.runs.party import PartyFile

PAGE = (Path(__file__).parents[2] / "docs/between-organisations.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_file_of_the_page_is_a_partys() -> None:
    (shown,) = blocks("yaml")
    for name, digit in (("9f...", "9"), ("3a...", "3"), ("77...", "7")):
        shown = shown.replace(name, digit * 64)
    shown = re.sub(r"identity: (\d{64})", r'identity: "\1"', shown)
    told = load_settings_text(PartyFile, shown, source="page")
    assert told.peers["aggregator"].behind_proxy
    assert told.peers["clinic"].address is None


def test_the_code_of_the_page_runs() -> None:
    (shown,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(shown, "page", "exec"), names)
    assert callable(names["link_to_bank"])


def test_what_the_page_says_people_read_is_what_the_source_says() -> None:
    root = Path(__file__).parents[2]
    source = "".join(
        path.read_text(encoding="utf-8")
        for folder in (
            "protocols/apfed_protocols",
            "secure_apfed/exchange",
            "secure_apfed/between",
            "secure_apfed/runs",
        )
        for path in sorted((root / folder).glob("*.py"))
    )
    for words in (
        "nobody listens there", "its certificate has expired", "it ended the connection; where",
        "that is not in tls.ca", "its certificate has another name",
        "does not fit the key by which it is known",
        "has not yet ended a session before this one",
        "began anew: its process ended and was started again", "was altered, lost or repeated on",
    ):  # fmt: skip
        assert words in PAGE
        assert words in source
