"""The report of a run: pictures and one self-contained HTML page, made from its folder only."""

from dataclasses import replace
from pathlib import Path

from apfed_experiments.baselines import BaselinesRecord, measure_gain
from apfed_experiments.report.run import audit_guard, load_run, measure_predictions
from secure_apfed.base.files import make_private, to_json, write_atomically
from secure_apfed.runs.folder import RunFolder

__all__ = ["load_run", "write_report"]


def write_report(folder: Path, *, local_models: BaselinesRecord | None = None) -> Path:
    """Write the report of a run into its folder and return the page's path.

    For a finished run these are pictures/*.png, report.html and privacy.json. For the folder of a
    passive, whose parties ran in processes of their own, it is report.html. Only the owner may
    enter the folder from then on.

    Args:
        folder: folder of the run, or of a passive's part of it.
        local_models: local models that a study measured; used if the folder holds none.

    Raises CheckpointError: the run has not finished, or a file is missing, changed or of another
    version.
    """
    # Imported here, since those who only need the tables of who learns what draw no picture.
    from apfed_experiments.report.contents import build_privacy_document
    from apfed_experiments.report.own import load_party
    from apfed_experiments.report.page import render_party, render_run
    from apfed_experiments.report.pictures import write_pictures

    page = folder / "report.html"
    if (party := load_party(folder)) is not None:
        make_private(folder)
        write_atomically(page, render_party(party).encode(), private=True)
        return page
    run = load_run(folder)
    if run.local_models is None and local_models is not None:
        run = replace(
            run,
            local_models=local_models,
            gain=measure_gain(RunFolder(folder), run.config, local_models),
        )
    make_private(folder)
    pictures = write_pictures(run, folder / "pictures")
    audited = audit_guard(run)
    content = render_run(run, pictures, audited, measure_predictions(run)).encode()
    write_atomically(page, content)
    document = to_json(build_privacy_document(run, audited), indent=2).encode() + b"\n"
    write_atomically(folder / "privacy.json", document)
    return page
