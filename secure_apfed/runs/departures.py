"""What of a run protects less than it could, in sentences that results, status and reports share.

Run by: each party on its own settings and folder. The screens before a run list the same as a
table (`secure_apfed.settings.protection`, `secure_apfed.coalitions`); here it stays visible after
the run began and when it is over.
"""

from pathlib import Path

from secure_apfed.peer_text import quote_text
from secure_apfed.settings.protection import find_departures
from secure_apfed.settings.run import RunSettings

__all__ = ["describe_departures", "describe_shared_organisations"]


def describe_departures(config: RunSettings) -> tuple[str, ...]:
    """Return a sentence for every setting that protects less than by default; none: no text."""
    return tuple(
        f"{each.setting} is {each.value} ({each.usual}), which protects {each.whom} "
        f"less: {each.means}"
        for each in find_departures(config)
    )


def describe_shared_organisations(folder: Path) -> tuple[str, ...]:
    """Return a sentence for every organisation that reads or alters more by several parties.

    `folder`: of a party. Without a sealed project nobody said who runs a party, and there is none.

    Raises:
        DataError, RemoteProtocolError: the sealed project there cannot be read.
    """
    # Projects are read by party files, which play sessions, which write results.
    from secure_apfed.runs.project import SEALED, SealedProject, SignedFile

    path = folder / SEALED
    if not path.is_file():
        return ()
    return tuple(
        f"one organisation, {quote_text(organisation)}, runs {' and '.join(conflict.parties)}: "
        f"together they {conflict.gets}"
        for organisation, conflict in SignedFile.from_file(path)
        .open_document(SealedProject, path)
        .proposal_document.conflicts
    )
