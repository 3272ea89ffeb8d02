"""The report of a run: pictures and one self-contained HTML page, made from its folder only."""

from dataclasses import replace
from pathlib import Path

from apfed_experiments.report.run import audit_of, load_run, measure_run
from apfed_experiments.solo import SoloRecord, measure_gain
from secure_apfed.base.files import make_private, to_json, write_atomically
from secure_apfed.runs.folder import RunFolder

__all__ = ["load_run", "write_report"]


def write_report(folder: Path, *, solo: SoloRecord | None = None) -> Path:
    """Make pictures/*.png, report.html and privacy.json of a finished run; return the page's path.
    Of the folder of a party that helped in one, its own report.html.

    The folder is shut for others, where it was not.

    Args:
        solo: what the active would do alone, as a study measured it; where the folder holds that
            itself, its own is shown.

    Raises:
        CheckpointError: no finished run, or a file in it is not as this version writes it.
    """
    # Late: who asks for the tables of who learns what draws no picture.
    from apfed_experiments.report.contents import privacy_document
    from apfed_experiments.report.own import load_party
    from apfed_experiments.report.page import render_party, render_run
    from apfed_experiments.report.pictures import write_pictures

    page = folder / "report.html"
    if (party := load_party(folder)) is not None:
        make_private(folder)
        write_atomically(page, render_party(party).encode(), private=True)
        return page
    run = load_run(folder)
    if run.solo is None and solo is not None:
        run = replace(run, solo=solo, gain=measure_gain(RunFolder(folder), run.config, solo))
    make_private(folder)
    pictures = write_pictures(run, folder / "pictures")
    audited = audit_of(run)
    content = render_run(run, pictures, audited, measure_run(run)).encode()
    write_atomically(page, content)
    document = to_json(privacy_document(run, audited), indent=2).encode() + b"\n"
    write_atomically(folder / "privacy.json", document)
    return page
