"""The JSON schema of the lines that `--json-events` prints.

Read by: authors of programs that watch parties (`secure-apfed party --json-events-schema`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from secure_apfed.exchange import Status
from secure_apfed.runs.outcome import Progress


class Moment(Status):
    """A party's status at each change, and every half minute; at: seconds since 1970."""

    at: float


@dataclass(frozen=True, kw_only=True)
class Training(Progress):
    """The progress of training; seconds_left: for all its epochs at this pace, null: too early."""

    seconds_left: float | None = None


class LongWork(BaseModel):
    """A report on the progress or end of a long computation other than training steps.

    Attributes:
        party: name of the party that computes; empty: the process that writes.
        name: what is computed.
        part: what of it is being computed now, or empty.
        done, total: number of finished parts, and of all.
        seconds_left: forecast from the pace so far; null: too early to say.
    """

    model_config = ConfigDict(extra="forbid")

    party: str
    name: str
    done: int
    total: int
    part: str
    seconds_left: float | None


class Failure(BaseModel):
    """The last line of a party that stopped with an error."""

    kind: str
    exit_code: int
    message: str


class Result(BaseModel):
    """The last line at the active of a finished run: some of the fields of `run --json`."""

    model_config = ConfigDict(extra="allow")

    method: str
    accuracy: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float]]
    wire_bytes: int
    privacy: Mapping[str, Any]
    contributions: Mapping[str, Mapping[str, Any]]
    folder: str


class Helped(BaseModel):
    """The last line at another party of a run that ended; report: its page, where one is made."""

    model_config = ConfigDict(extra="forbid")

    folder: str
    report: str | None


class _Finite(GenerateJsonSchema):
    """A schema generator for JSON, which has no infinity: `secure_apfed.base.files.to_json` writes
    a text.
    """

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"enum": ["inf", "-inf", "nan"]}]}


def build_schema() -> dict[str, Any]:
    """Return the JSON schema of one line: an object with one of these keys, or the end of a run."""
    kinds = {
        "progress": Training,
        "work": LongWork,
        "status": Moment,
        "error": Failure,
    }
    models: list[type[BaseModel]] = [
        create_model(name, __config__=ConfigDict(extra="forbid"), **{name: (kind, ...)})  # type: ignore[call-overload]
        for name, kind in kinds.items()
    ]
    models += [Result, Helped]
    schemas, definitions = models_json_schema(
        [(model, "serialization") for model in models], schema_generator=_Finite
    )
    line_schema = {"title": "--json-events", "anyOf": list(schemas.values())}
    return {"$schema": _Finite.schema_dialect, **line_schema, **definitions}
