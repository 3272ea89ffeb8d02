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
    """A party's status, printed at each change and every half minute.

    Attributes:
        at: time in seconds since 1970.
    """

    at: float


@dataclass(frozen=True, kw_only=True)
class Training(Progress):
    """The progress of training.

    Attributes:
        seconds_left: forecast for the remaining epochs, from the pace so far; null: too early to
            say.
    """

    seconds_left: float | None = None


class LongWork(BaseModel):
    """A report on the progress or end of a long computation other than training steps.

    Attributes:
        party: name of the party that computes; empty: the process that writes.
        name: name of the computation.
        part: the part of it that is being computed now; may be empty.
        done, total: number of finished parts, and of all parts.
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
    """The last line of a party that stopped with an error.

    Attributes:
        kind: name of the error's class.
        exit_code: exit code of the process.
        message: the error in words.
    """

    kind: str
    exit_code: int
    message: str


class Result(BaseModel):
    """The last line of the active when a run has finished: some of the fields of `run --json`.

    They have the same meaning as in `secure_apfed.runs.outcome.Outcome`.
    """

    model_config = ConfigDict(extra="allow")

    method: str
    accuracy: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float]]
    wire_bytes: int
    privacy: Mapping[str, Any]
    contributions: Mapping[str, Mapping[str, Any]]
    folder: str


class Helped(BaseModel):
    """The last line of a party other than the active when a run has ended.

    Attributes:
        folder: the party's folder.
        report: path of its report; null: none is made.
    """

    model_config = ConfigDict(extra="forbid")

    folder: str
    report: str | None


class _Finite(GenerateJsonSchema):
    """A schema generator in which a number may also be a text for infinity or NaN.

    JSON has neither, so `secure_apfed.base.files.to_json` writes texts.
    """

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        """Return the schema of a number, with these texts as alternatives."""
        return {"anyOf": [super().float_schema(schema), {"enum": ["inf", "-inf", "nan"]}]}


def build_schema() -> dict[str, Any]:
    """Return the JSON schema of one line.

    A line during the run is an object with a single key, which says what the line is about. The
    last line of a finished run is a `Result` or a `Helped`.
    """
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
