"""Sentences about settings that protect less than by default, for results, status and reports.

Run by: each party on its own settings and folder. Before a run, screens list the same facts as a
table (`secure_apfed.settings.protection`, `secure_apfed.organisations.coalitions`). These sentences
show them during the run and afterwards.
"""

from pathlib import Path

from secure_apfed.base.peer_text import quote_text
from secure_apfed.runs.folder import SEALED_PROJECT
from secure_apfed.settings import RunSettings
from secure_apfed.settings.protection import find_weakened_settings

__all__ = ["describe_shared_organisations", "describe_weakened_settings"]


def describe_weakened_settings(config: RunSettings) -> tuple[str, ...]:
    """Return a sentence for every setting that protects less than by default; empty for none."""
    return tuple(
        f"{departure.setting} is {departure.value} ({departure.default_phrase}), which protects "
        f"{departure.whom} less: {departure.means}"
        for departure in find_weakened_settings(config)
    )


def describe_shared_organisations(folder: Path) -> tuple[str, ...]:
    """Return a sentence for every organisation that runs several parties.

    Such an organisation can read or alter more than a single party. The result is empty if the
    folder has no sealed project (the proposal that all parties signed): only that file declares
    which organisation runs which party.

    `folder`: a party's folder.

    Raises DataError, RemoteProtocolError: the sealed project cannot be read.
    """
    path = folder / SEALED_PROJECT
    if not path.is_file():
        return ()
    # Imported here, since this module would otherwise be in a cycle of imports.
    from secure_apfed.organisations.project import SealedProject, SignedFile

    project = SignedFile.from_file(path).open_document(SealedProject, path)
    return tuple(
        f"one organisation, {quote_text(organisation)}, runs {' and '.join(conflict.party_names)}: "
        f"together they {conflict.gained_ability}"
        for organisation, conflict in project.proposal_document.conflicts
    )
