"""The self-contained HTML page of a run: style and pictures inside, no outside reference."""

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from apfed_experiments.report import contents, words
from apfed_experiments.report.audited import Audited
from apfed_experiments.report.folder import ReportedRun
from apfed_experiments.report.measured import MeasuredModel
from apfed_experiments.report.pictures import Picture
from apfed_experiments.solo import LEFT_OUT
from secure_apfed.config.file import dump_settings

__all__ = ["fill", "inside", "render"]


def render(
    run: ReportedRun,
    reference: ReportedRun | None,
    pictures: Sequence[Picture],
    audited: Audited | None,
    measured: MeasuredModel | None = None,
) -> str:
    """Return the page.

    Args:
        run: what it reports.
        reference: a run of the active alone on the same data, or None; the page then says so.
        pictures: to show, as `write_pictures` returned them.
        audited: what an audit of its guard found; None: there is no guard.
        measured: what its model is worth by all measures; None: no scores were kept.
    """
    return fill(
        "report.html.jinja",
        run=run,
        headline=contents.headline_of(run),
        reached=next(iter(run.outcome.scores.values())),
        measure=run.outcome.judged_by,
        measured=measured,
        warnings=contents.warnings_of(run),
        tiles=contents.tiles_of(run, reference),
        pictures=[inside(picture) for picture in pictures],
        lacks_reference=reference is None and run.helped and not run.config.labels_are_private,
        left_out="" if run.config.dp_sgd is None else f"{LEFT_OUT[0].upper()}{LEFT_OUT[1:]}.",
        learned=contents.learned_by(run),
        alignment_leaks=contents.alignment_leaks_of(run),
        agreement=contents.agreement_of(run),
        coalitions=[(each.who, each.learns) for each in contents.coalitions_of(run)],
        accounting=(*contents.accounting_of(run), *(audited.rows() if audited else ())),
        trace=contents.trace_of(run),
        limits=contents.limits_of(run),
        settings=contents.settings_of(run),
        config=dump_settings(run.config),
        repeat=[
            ("command", "secure-apfed run config.yaml"),
            ("SHA-256 of the contract", run.contract_sha256),
            ("seeds", _flat(run.seeds)),
            ("versions", _flat(run.versions)),
        ],
    )


def fill(template: str, **values: Any) -> str:
    """Return the page that a template of this package makes of `values`, with the style of all."""
    page: str = _environment().get_template(template).render(**values)
    return page


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("apfed_experiments.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "plain": words.plain, "in_words": words.in_words, "count": words.count,
        "signed": words.signed, "attack_title": words.attack_title,
        "unevenness": contents.unevenness,
    }  # fmt: skip
    return environment


def inside(picture: Picture) -> dict[str, str]:
    """Return what a template shows of a picture, its pixels as text."""
    encoded = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    return {
        "key": picture.path.stem, "title": picture.title, "caption": picture.caption,
        "base64": encoded,
    }  # fmt: skip


def _flat(values: Mapping[str, Any]) -> str:
    return "; ".join(
        _flat(value) if isinstance(value, Mapping) else f"{name} {value}"
        for name, value in values.items()
    )
