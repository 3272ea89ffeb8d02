"""The checks of `project check --meet` at an NVFlare site, where parties connect inside jobs.

Run by: NVFlare's job processes, in the job `job-check` that a sealed project writes for its
organiser. Part of the composition root, as `project check` is; like all commands it imports what it
needs when it runs. Each party's findings go to a file in its own folder; NVFlare learns only
whether a party is ready.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secure_apfed.organisations.nvflare_site import Site
    from secure_apfed.organisations.party import Connect

CHECKED = "check.txt"
"""Name of the file with the findings of the last check inside a job, in a party's folder."""
_MEETING_TIMEOUT_S = 120.0


def __getattr__(name: str) -> Any:
    """Return `CheckSite`, which NVFlare asks for by name."""
    if name == "CheckSite":
        return _make_site_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _make_site_class() -> "type[Site]":
    """Return the class `CheckSite`; NVFlare and the checks are imported only here."""
    from secure_apfed.base.files import write_atomically
    from secure_apfed.commands.check import Checks, format_findings
    from secure_apfed.errors import ConfigError
    from secure_apfed.organisations.nvflare_site import Site, find_party_file

    class CheckSite(Site):
        """A site that connects to all others as for a run, but only compares settings."""

        def run_party(self, site: str, connect: "Connect") -> None:
            """Check the party of a site and write the findings into its folder.

            `connect`: connects the party to all others. Raises ConfigError: the party is not ready.
            """
            checks = Checks(find_party_file(site), is_quiet=True, connect=connect)
            findings = list(checks.run_checks(_MEETING_TIMEOUT_S))
            text = format_findings(checks, findings)
            write_atomically(checks.file.folder / CHECKED, text.encode(), private=True)
            if checks.code:
                raise ConfigError(f"{site} is not ready: {CHECKED} of its folder says why")

    return CheckSite
