"""Two pages as printed: their files are a party's, the code runs, the words are the source's."""

import re
from pathlib import Path

import pytest

from secure_apfed.config.file import load_settings_text
from secure_apfed.runs.party import PartyFile

ROOT = Path(__file__).parents[2]
FILES = {"between-organisations": "grpc", "nvflare": "nvflare"}
PAGE = (ROOT / "docs/between-organisations.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "link"), [("between-organisations", "grpc"), ("nvflare", "nvflare")]
)
def test_the_file_of_the_page_is_a_partys(page: str, link: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(party:.*?)```", text, re.DOTALL)
    for name, digit in (("9f...", "9"), ("3a...", "3"), ("77...", "7")):
        shown = shown.replace(name, f'"{digit * 64}"')
    told = load_settings_text(PartyFile, shown, source="page")
    assert told.link == link
    if link == "grpc":
        assert told.peers["aggregator"].behind_proxy
        assert told.peers["clinic"].address is None


def test_the_code_of_the_page_runs() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(shown, "page", "exec"), names)
    assert callable(names["link_to_bank"])


def test_what_the_page_says_people_read_is_what_the_source_says() -> None:
    folders = (
        "protocols/apfed_protocols",
        *(f"secure_apfed/{at}" for at in ("exchange", "between")),
    )
    files = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    for words in (
        "nobody listens there", "its certificate has expired", "it ended the connection; where",
        "that is not in tls.ca", "its certificate has another name",
        "does not fit the key by which it is known",
        "has not yet ended a session before this one",
        "began anew: its process ended and was started again", "was altered, lost or repeated on",
    ):  # fmt: skip
        assert words in PAGE
        assert words in source
