"""The report of a run: pictures and one self-contained HTML page, made from its folder only."""

from pathlib import Path

from apfed_experiments.report.contents import privacy_document
from apfed_experiments.report.page import render
from apfed_experiments.report.pictures import write_pictures
from apfed_experiments.report.run import ReportedRun, audit_of, measured_of, read_run
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.files import make_private, to_json, write_atomically

__all__ = ["find_reference", "read_run", "write_report"]


def write_report(folder: Path, *, show_originals: bool = False) -> Path:
    """Make pictures/*.png, report.html and privacy.json of a finished run; return the page's path.

    The folder is shut for others, where it was not. With `show_originals` images that attacks
    rebuilt stand beside the people's own. Both are people's data: a page that shows them is for
    whoever may see the data themselves.

    Raises:
        CheckpointError: no finished run, or a file in it is not as this version writes it.
    """
    run, page = read_run(folder, examples=show_originals), folder / "report.html"
    make_private(folder)
    reference = find_reference(run)
    pictures, audited = write_pictures(run, reference, folder / "pictures"), audit_of(run)
    content = render(run, reference, pictures, audited, measured_of(run)).encode()
    write_atomically(page, content, private=show_originals)
    document = to_json(privacy_document(run, audited), indent=2).encode() + b"\n"
    write_atomically(folder / "privacy.json", document)
    return page


def find_reference(run: ReportedRun) -> ReportedRun | None:
    """A run of the active alone beside this one, on the same data and seed, if there is.

    None where training labels are private: another run learnt from them as they are, or from other
    answers, and no epsilon of this one counts that.
    """
    if run.config.labels_are_private:
        return None
    for result in sorted(run.path.absolute().parent.glob("*/result.json")):
        try:
            other = read_run(result.parent)
        except (CheckpointError, ConfigError):
            continue  # a sibling that cannot be read is not a reference
        same = (other.config.data, other.config.seed) == (run.config.data, run.config.seed)
        if same and not other.helped:
            return other
    return None
