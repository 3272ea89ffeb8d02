"""Settings that protect less than by default, in sentences for results, status and reports.

Run by: each party on its own settings and folder. The screens before a run list the same as a
table (`secure_apfed.settings.protection`, `secure_apfed.organisations.coalitions`); these sentences
show it during the run and afterwards.
"""

from pathlib import Path

from secure_apfed.base.peer_text import quote_text
from secure_apfed.settings.protection import find_departures
from secure_apfed.settings.run import RunSettings

__all__ = ["describe_departures", "describe_shared_organisations"]


def describe_departures(config: RunSettings) -> tuple[str, ...]:
    """Return a sentence for every setting that protects less than by default; empty for none."""
    return tuple(
        f"{departure.setting} is {departure.value} ({departure.usual}), which protects "
        f"{departure.whom} less: {departure.means}"
        for departure in find_departures(config)
    )


def describe_shared_organisations(folder: Path) -> tuple[str, ...]:
    """Return a sentence for every organisation that runs several parties, and can therefore read
    or alter more than a single party.

    `folder`: a party's folder. Empty if it has no sealed project (the proposal that all parties
    signed), since only that declares who runs a party.

    Raises DataError, RemoteProtocolError: the sealed project cannot be read.
    """
    # Imported late: projects are read by party files, which run sessions, which write results.
    from secure_apfed.organisations.project import SEALED, SealedProject, SignedFile

    path = folder / SEALED
    if not path.is_file():
        return ()
    project = SignedFile.from_file(path).open_document(SealedProject, path)
    return tuple(
        f"one organisation, {quote_text(organisation)}, runs {' and '.join(conflict.parties)}: "
        f"together they {conflict.gets}"
        for organisation, conflict in project.proposal_document.conflicts
    )
