"""The self-contained HTML page of a run: style and pictures inside, no outside reference."""

import base64
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from experiments.report import contents
from experiments.report.attack_rows import attacks_of
from experiments.report.audited import Audited
from experiments.report.folder import RunFolder
from experiments.report.names import method_name
from experiments.report.pictures import Picture
from secure_apfed.config.file import dump_config

__all__ = ["fill", "inside", "render"]


def render(
    run: RunFolder,
    reference: RunFolder | None,
    pictures: Sequence[Picture],
    audited: Audited | None,
) -> str:
    """Return the page.

    Args:
        run: what it reports.
        reference: a SingleVL run on the same data, or None; the page then says so.
        pictures: to show, as `write_pictures` returned them.
        audited: what an audit of its guard found; None: there is no guard.
    """
    return fill(
        "report.html.jinja",
        name=run.config.name,
        headline=_headline(run),
        warnings=contents.warnings_of(run),
        tiles=contents.tiles_of(run, reference),
        pictures=[inside(picture) for picture in pictures],
        no_reference=_no_reference(run, reference),
        learned=contents.learned_by(run),
        alignment=run.config.alignment.protocol,
        alignment_leaks=contents.alignment_leaks_of(run),
        coalitions=[(one.who, one.learns) for one in contents.coalitions_of(run)],
        guarantee=run.outcome.guarantee,
        accounting=(*contents.accounting_of(run), *(audited.rows() if audited else ())),
        trace=(*run.outcome.privacy.trace, *contents.cross_checks_of(run)),
        attacks=attacks_of(run),
        left_out=_left_out(run),
        limits=contents.limits_of(run),
        settings=contents.settings_of(run),
        config=dump_config(run.config),
        repeat=_repeat(run),
    )


def fill(template: str, **values: Any) -> str:
    """Return the page that a template of this package makes of `values`, with the one style."""
    files = resources.files("experiments.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    page: str = environment.from_string(files.joinpath(template).read_text("utf-8")).render(
        style=Markup(files.joinpath("style.css").read_text("utf-8")),  # noqa: S704  # our own file
        **values,
    )
    return page


def _headline(run: RunFolder) -> str:
    passives = run.situation.passives
    if run.situation.method == "single_view":
        return "SingleVL: the active trained alone; nothing was sent."
    others = "one passive party" if passives == 1 else f"{passives} passive parties"
    method = method_name(run.config.method)
    alone = (
        "the active predicts alone" if run.situation.method == "apfed"
        else "prediction needs the passives, or a stand-in for what they would send"
    )  # fmt: skip
    return f"{method}: one active party trained with {others}; {alone}."


def inside(picture: Picture) -> dict[str, str]:
    """Return what a template shows of a picture, its pixels as text."""
    encoded = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    return {
        "key": picture.path.stem, "title": picture.title, "caption": picture.caption,
        "base64": encoded,
    }  # fmt: skip


def _no_reference(run: RunFolder, reference: RunFolder | None) -> str:
    if reference is not None or run.config.method == "single_view":
        return ""
    return (
        "There is no SingleVL run on the same data and seed beside this one, so its accuracy is "
        "not compared. Run the same file with --set method=single_view into a folder beside this "
        "one, then make the report again."
    )


def _left_out(run: RunFolder) -> str:
    if not run.rebuilt or run.examples is not None:
        return ""
    return (
        "Attacks rebuilt images of people. They are left out of this page, as are the originals: "
        "both are these people's data. To see them, in a page for whoever may see the data "
        "themselves: secure-apfed report RUN --show-originals"
    )


def _repeat(run: RunFolder) -> list[tuple[str, str]]:
    return [
        ("command", "secure-apfed run config.yaml"),
        ("SHA-256 of the contract", run.contract_sha256),
        ("seeds", _flat(run.seeds)),
        ("versions", _flat(run.versions)),
    ]


def _flat(values: Mapping[str, Any]) -> str:
    return "; ".join(
        _flat(value) if isinstance(value, Mapping) else f"{name} {value}"
        for name, value in values.items()
    )
