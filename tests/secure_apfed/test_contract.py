"""The contract: every field moves its digest, and unfit fields are refused."""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.contract import Contract
from secure_apfed.data import load_data
from secure_apfed.methods import METHODS, open_session
from secure_apfed.settings import MethodSettings, Settings
from tests.secure_apfed import seats
from tests.secure_apfed.small_runs import small_config

KEY = "0123456789abcdef" * 4
USUAL = seats.contract().model_dump()


def contract(**changes: Any) -> Contract:
    return Contract.model_validate(USUAL | changes)


def participant(name: str, role: str) -> dict[str, Any]:
    return {"name": name, "role": role, "identity": KEY, "public_key": KEY}


def passive(**changes: Any) -> dict[str, Any]:
    usual = USUAL["passives"]["p1"]
    of_rows = {**usual["representation"], **changes.pop("representation", {})}
    return {**usual, **changes, "representation": of_rows}


def parties(**changes: Any) -> list[dict[str, Any]]:
    people = [dict(one) for one in USUAL["participants"]]
    people[1].update(changes)
    return people


SPREAD = passive(representation={"minimum_spread": 0.1, "rows": 70, "features": KEY})
WHOLE: dict[str, Any] = {
    "passives": {"p1": SPREAD, "p2": SPREAD},
    "resumes": {
        "run": KEY,
        "step": 3,
        "answered": ({"first": 3, "last": 4, "passives": ("p1", "p2")},),
    },
    "spare_answers": 1,
    "silent_passive": "wait",
    "patience_s": 30.0,
    "restarts": 3,
    "predicts": KEY,
}


@pytest.mark.parametrize("changes", [WHOLE, {}], ids=["whole", "usual"])
def test_the_digest_is_of_a_canonical_document(changes: dict[str, Any]) -> None:
    made = contract(**changes)
    assert Contract.model_validate_json(made.document) == made
    assert made.digest == sha256(b"secure-apfed contract v1" + made.document).digest()
    plain = json.dumps(json.loads(made.document), sort_keys=True, separators=(",", ":"))
    assert made.document == plain.encode()


def test_the_digest_is_of_a_document_that_holds_every_field() -> None:
    """Compare a contract without defaults: what is read back equal was in the document."""
    whole = contract(**WHOLE)
    terms = whole.passives["p1"]
    assert whole.resumes is not None
    parts = [whole, whole.resumes, *whole.participants, terms, terms.representation]
    usual = {
        (type(part).__name__, key)
        for part in parts
        for key, field in type(part).model_fields.items()
        if getattr(part, key) == field.default
    }
    assert {key for _, key in usual} <= {"schema_version"}, "it has one value"


def test_other_contracts_have_other_digests() -> None:
    people = parties(public_key=KEY[::-1]), parties()[::-1]
    finer = {"p1": passive(), "p2": passive(representation={"maximum_norm": 100 + 1e-9})}
    others = [{}, WHOLE, {"passives": finer}, *({"participants": some} for some in people)]
    assert len({contract(**changes).digest for changes in others}) == len(others)
    swapped = {"p2": passive(), "p1": passive()}
    assert contract(passives=swapped).digest == contract().digest
    guards = {"mechanism": "gaussian", "sigma": 2.0}, {"sigma": 2.0, "mechanism": "gaussian"}
    assert len({contract(settings={"guard": guard}).digest for guard in guards}) == 1


def test_names_come_by_role_in_the_contracts_order() -> None:
    assert contract().list_names("passive") == ("p1", "p2")
    assert contract().list_names("dealer") == ()
    assert contract(participants=parties()[::-1]).list_names("passive") == ("p2", "p1")
    assert contract().active == "active"


@pytest.mark.parametrize("actives", [(), ("a", "b")], ids=str)
def test_a_contract_without_one_active_names_none(actives: tuple[str, ...]) -> None:
    people = [participant(name, "active") for name in actives]
    made = contract(
        participants=[*people, participant("p1", "passive")], passives={"p1": passive()}
    )
    named = re.escape(f"names one active party, got {list(actives)}")
    with pytest.raises(RemoteProtocolError, match=named):
        _ = made.active


def make_terms(**changes: Any) -> dict[str, Any]:
    return {"passives": {"p1": passive(representation=changes), "p2": passive()}}


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"passives": {"p1": passive()}}, "terms are for the passives p1, p2, got p1"),
    ({"passives": {"p1": passive(), "p3": passive()}}, "got p1, p3"),
    ({"participants": [*parties(), participant("p1", "dealer")]}, "are all different"),
    (make_terms(minimum_norm=300), r"minimum_norm 300 is above maximum_norm 100"),
    (make_terms(shape=()), "at least 1 item"),
    (make_terms(shape=(4, 0)), "greater than 0"),
    (make_terms(dtype="float16"), r"representation\.dtype"),
    (make_terms(minimum_norm=-1), r"representation\.minimum_norm"),
    (make_terms(maximum_norm=0), r"representation\.maximum_norm"),
    (make_terms(maximum_norm=float("inf")), r"representation\.maximum_norm"),
    *(
        ({"participants": parties(public_key=key)}, r"participants\.1\.public_key")
        for key in (
            "",
            KEY[:-1],
            KEY + "0",
            KEY[:-1] + "g",
            KEY.upper(),
            KEY + "\n",
            " " + KEY[1:],
            "0x" + KEY[2:],
        )
    ),
    *(
        ({"passives": {"p1": passive(weight=weight)}}, r"passives\.p1\.weight")
        for weight in (-0.1, float("nan"), float("inf"))
    ),
    ({"passives": {"p1": passive(objective={"name": "steal"})}}, r"passives\.p1\.objective"),
    ({"participants": parties(name="")}, r"participants\.1\.name"),
    ({"participants": parties(name="x" * 65)}, r"participants\.1\.name"),
    ({"participants": parties(role="boss")}, r"participants\.1\.role"),
    ({"session": ""}, "session"),
    ({"session": "s" * 257}, "session"),
    ({"schema_version": 1}, "schema_version"),
    ({"minimum_batch": 0}, "minimum_batch"),
    ({"epochs": 0}, "epochs"),
    ({"batch_size": 0}, "batch_size"),
    ({"silent_passive": "continue"}, "silent_passive"),
    ({"surprise": 1}, "surprise"),
)


@pytest.mark.parametrize(("changes", "expected"), REFUSED)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        contract(**changes)


def test_a_contract_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        contract().epochs = 9  # type: ignore[misc]  # that it is refused is the point


NETWORK = (
    "network hidden representation projection sequences random_features dropout head head_network"
)
# What a party decides alone; every other setting concerns all, those of a method under its name.
THE_ACTIVE = {
    "": "task measure calibration checkpoint_every",
    "threshold": "cost rate",
    "dp_sgd": "clip noise_multiplier epsilon",
    "labels": "mechanism epsilon",
    "train": "use_unaligned labels local_models combine spread_labels evaluate_every patience "
    "keep_best class_weights loss",
    **dict.fromkeys(
        ("votes", "votes_randomised", "votes_encrypted", "votes_rehearsal"), "prior help"
    ),
    "apc_vfl": "joint loss weight classifier",
    "apc_vfl.own": NETWORK,
    "vfedtrans": "loss weight classifier",
    "rules": "refused_sums",
}
EACH_FOR_ITSELF = {
    "": "name tradeoff",
    "data": "dataset clients views active_view rows rows_per_class overlap aligned "
    "test_fraction split limit labelled memory_map folder columns active missing "
    "date_formats id_column label_column",
    "data.parties": "file rows id_column numeric categorical ignore missing encoding date_formats",
    "data.parties.database": "url query credentials",
    "data.parties.rare_categories": "most",
    "data.view_columns": "columns sequence",
    "train": "device",
    "alignment": "dealer pairwise_overlaps threads history runs_with_a_peer",
    "transcript": "keep",
    "attacks": "name options",
}


def list_keys(concern: dict[str, str]) -> set[str]:
    return {f"{at}.{key}".lstrip(".") for at, keys in concern.items() for key in keys.split()}


def kinds(annotation: Any) -> list[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [kind for one in get_args(annotation) for kind in kinds(one)]


def below(annotation: Any) -> type[Settings] | None:
    """The one kind of settings that a field holds: itself, or None, or many of them."""
    held = kinds(annotation)
    return held[0] if len(held) == 1 else None


def every(kind: type[Settings], at: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        section = below(field.annotation)
        yield from [f"{at}{name}"] if section is None else every(section, f"{at}{name}.")


# What has to be said for all the rest to be signed; every other setting's value is its own key.
SAID = {"data.partition": "horizontal", **{f"{name}.name": name for name in METHODS}}


def fill_settings(kind: type[Settings], method: str, at: str = "") -> Any:
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        section = below(field.annotation)
        key = f"{at}{name}"
        if section is None:
            values[name] = SAID.get(key, key)
        elif section is MethodSettings:
            values[name] = fill_settings(METHODS[method].settings, method, f"{method}.")
        else:
            one = fill_settings(section, method, f"{key}.")
            values[name] = {"default": one} if name == "passives" else one
    return kind.model_construct(**values)


def leaves(told: Any) -> Iterator[str]:
    for part in told.values() if isinstance(told, dict) else [told]:
        yield from leaves(part) if isinstance(part, dict) else [part]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_the_contract_holds_every_setting_that_concerns_all() -> None:
    alone = list_keys(THE_ACTIVE) | list_keys(EACH_FOR_ITSELF)
    of_methods = (every(method.settings, f"{name}.") for name, method in METHODS.items())
    keys = {*every(Config), *chain.from_iterable(of_methods)} - {"method.name"}
    assert alone < keys
    signed = {
        leaf for method in METHODS for leaf in leaves(fill_settings(Config, method).collect_terms())
    }
    assert signed == {SAID.get(key, key) for key in keys - alone}


def test_classes_concern_all_where_several_number_them() -> None:
    """The active alone may keep their names to itself."""

    def collect_data_terms(**data: Any) -> Any:
        tables = {"dataset": "tables", "parties": {"a": {"file": "a.csv"}, "b": {"file": "b.csv"}}}
        config = small_config(
            "mmvfl", data=tables | {"active": "a", "classes": ["no", "yes"]} | data
        )
        return config.collect_terms()["data"]

    assert "classes" not in collect_data_terms()
    assert collect_data_terms(labels_at=["b"]) != collect_data_terms(
        labels_at=["b"], classes=["yes", "no"]
    )


@pytest.mark.parametrize("method", ["apfed_c", "apc_vfl"])
def test_a_session_signs_them(method: str) -> None:
    config = small_config(method)
    session = open_session(config, load_data(config.data, seed=0))
    assert session.contract.settings == config.collect_terms()
