"""The checks of `project check --meet` at a site of NVFlare's, where parties meet inside jobs.

Run by: NVFlare's job processes, in the job `job-check` that a sealed project writes for its
organiser. Part of the composition root, as `project check` is; like all commands it loads what it
needs when it runs. Each party's findings go to a file in its own folder; NVFlare learns whether a
party is ready, and no finding.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secure_apfed.organisations.nvflare_site import Site
    from secure_apfed.organisations.party import Connect

CHECKED = "check.txt"
"""Name of the file with the findings of the last check inside a job, in a party's folder."""
_MEET_S = 120.0


def __getattr__(name: str) -> Any:
    """Return `CheckSite`, which NVFlare asks for by name."""
    if name == "CheckSite":
        return _make_site_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _make_site_class() -> "type[Site]":
    from secure_apfed.base.files import write_atomically
    from secure_apfed.commands.check import Checks, format_findings
    from secure_apfed.errors import ConfigError
    from secure_apfed.organisations.nvflare_site import Site, find_party_file

    class CheckSite(Site):
        """A site that meets all others as for a run, compares what they have, and trains not."""

        def run_party(self, site: str, connect: "Connect") -> None:
            """Check the site's party, and write what was found; ConfigError: it is not ready."""
            checks = Checks(find_party_file(site), is_quiet=True, connect=connect)
            findings = list(checks.run_checks(_MEET_S))
            text = format_findings(checks, findings)
            write_atomically(checks.file.folder / CHECKED, text.encode(), private=True)
            if checks.code:
                raise ConfigError(f"{site} is not ready: {CHECKED} of its folder says why")

    return CheckSite
