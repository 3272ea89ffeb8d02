"""Coefficients of generalised linear models, by the names of their columns.

Run by: each party for its own columns, which nobody else has; the active also has the intercept.
An experimenter who runs all parties in one process sees every table.

Letters: D scores, F features of a row.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from secure_apfed.data import ColumnEncoding, FeatureEncoding, OwnData, VerticalData
from secure_apfed.data.encoding import NumericColumn
from secure_apfed.measures.tasks import TASKS
from secure_apfed.networks.models import Intercept, LinearPredictor
from secure_apfed.runs.outcome import Coefficient, PartyCoefficients
from secure_apfed.settings import RunSettings

# The quantity that the terms of a linear regression add up to. It is in the label's own unit, or in
# standard deviations of the label if the label's scale is unknown.
_LABEL = "label"
_LABEL_IN_DEVIATIONS = "label, in its standard deviations"


def list_party_coefficients(
    config: RunSettings, data: OwnData, networks: Mapping[str, nn.Module]
) -> PartyCoefficients | None:
    """Return one party's coefficients; None: it trained no generalised linear model.

    A passive does not know the scale of labels that are numbers to predict. Its coefficients are
    then in standard deviations of the label.

    Args:
        config: settings of the run.
        data: the party's data.
        networks: the party's "encoder" and, at the active, its "head".
    """
    encoder = networks.get("encoder")
    if not isinstance(encoder, LinearPredictor):
        return None
    weights_DF = encoder.coefficients.detach().double().cpu()
    head = networks.get("head")
    score_names = _name_scores(data.classes, len(weights_DF))
    label_scale = 1.0 if data.targets is None else data.targets.scale
    link = TASKS[config.task].link
    is_label_scaled = link == _LABEL
    if is_label_scaled and data.targets is None:
        link = _LABEL_IN_DEVIATIONS
    return PartyCoefficients(
        party=data.table.name,
        link=link,
        coefficients=_list_columns(
            weights_DF * (label_scale if is_label_scaled else 1.0), data.table.encoding, score_names
        ),
        intercepts=_list_intercepts(config, data, head, score_names),
    )


def list_all_coefficients(
    config: RunSettings,
    data: OwnData,
    networks: Mapping[str, nn.Module],
    *,
    all_data: VerticalData | None = None,
    encoders: Mapping[str, nn.Module],
) -> tuple[PartyCoefficients, ...]:
    """Return the active's coefficients and, if one process ran all parties, the passives', too.

    The result is empty if no generalised linear model was trained.

    Args:
        config: settings of the run.
        data, networks: the active's data and networks.
        all_data: the tables of all parties; None: passives ran in processes of their own.
        encoders: passive's name -> its network; empty if passives ran in processes of their own.
    """
    active_coefficients = list_party_coefficients(config, data, networks)
    if active_coefficients is None:
        return ()
    if all_data is None:
        return (active_coefficients,)
    coefficients = [active_coefficients]
    for table in all_data.passives:
        passive_data = OwnData(table=table, classes=data.classes, targets=data.targets)
        passive_networks = {"encoder": encoders[table.name]} if table.name in encoders else {}
        passive_coefficients = list_party_coefficients(config, passive_data, passive_networks)
        if passive_coefficients is not None:
            coefficients.append(passive_coefficients)
    return tuple(coefficients)


def _name_scores(classes: Sequence[str], score_count: int) -> tuple[str, ...]:
    """Return a name for each score: the class that it is for, or its number from 0.

    A single score belongs to the second of two classes. It is called "" if labels are numbers to
    predict.

    `classes`: names of the classes; empty: unknown, or labels are numbers. `score_count`: number of
    scores.
    """
    if score_count == 1:
        return (classes[1],) if len(classes) == 2 else ("",)
    return tuple(classes) if len(classes) == score_count else tuple(map(str, range(score_count)))


def _list_columns(
    weights_DF: Tensor, encoding: FeatureEncoding, score_names: Sequence[str]
) -> tuple[Coefficient, ...]:
    """Return the coefficient of each feature for each score.

    `weights_DF`: change of each of D scores if one of F features rises by one standard deviation.
    `score_names`: names of the scores.
    """
    units_F = _list_units(encoding, weights_DF.shape[1])
    return tuple(
        Coefficient(
            column=encoding.feature_name(feature),
            score=score,
            per_deviation=float(weights_DF[row, feature]),
            per_unit=None if unit is None else float(weights_DF[row, feature]) / unit,
        )
        for feature, unit in enumerate(units_F)
        for row, score in enumerate(score_names)
    )


def _list_units(encoding: FeatureEncoding, feature_count: int) -> list[float | None]:
    """Return the standard deviation that each feature was divided by; None: it is constant.

    A feature that is not standardised, such as a category's, has 1. `feature_count`: number of
    features.
    """
    if not isinstance(encoding, ColumnEncoding):
        return [1.0] * feature_count
    units: list[float | None] = []
    for column in encoding.columns:
        if isinstance(column, NumericColumn):
            units.append(None if column.constant else column.scale)
        else:
            units += [1.0] * len(column.features)
    return units


def _list_intercepts(
    config: RunSettings, data: OwnData, head: nn.Module | None, score_names: Sequence[str]
) -> dict[str, float]:
    """Return the intercept of each score: its value if every numeric column is at its mean.

    The result is empty without an intercept, as at a passive.

    `head`: the active's head; None: the party has no head. `score_names`: names of the scores.
    """
    if not isinstance(head, Intercept):
        return {}
    bias_D = head.bias.detach().double().cpu()
    if data.targets is not None:
        bias_D = TASKS[config.task].from_targets(data.targets).decode_outputs(bias_D[:, None])
        if TASKS[config.task].link != _LABEL:
            bias_D = torch.log(bias_D)
    return dict(zip(score_names, bias_D.tolist(), strict=True))
