"""What `--json-events` prints, a line each, as models, and the JSON schema made of them.

Read by: whoever writes a program that watches parties (`secure-apfed party --json-events-schema`).
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from secure_apfed.exchange import Status
from secure_apfed.runs.outcome import Progress

__all__ = ["ErrorEvent", "Event", "ProgressEvent", "ResultEvent", "StatusEvent", "schema"]


class _Event(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProgressEvent(_Event):
    """At the active: how far the training is, where that changed."""

    progress: Progress


class _Moment(Status):
    """Where a party stands; at: seconds since 1970."""

    at: float


class StatusEvent(_Event):
    """Where a party stands, where that changed, and every half minute."""

    status: _Moment


class _Fault(_Event):
    kind: str
    exit_code: int
    message: str


class ErrorEvent(_Event):
    """The last line of a party that could not go on."""

    error: _Fault


class ResultEvent(BaseModel):
    """The last line at the active of a run that ended, as of `run --json`, which tells more."""

    model_config = ConfigDict(extra="allow")

    method: str
    accuracy: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float]]
    wire_bytes: int
    privacy: Mapping[str, Any]
    contributions: Mapping[str, Mapping[str, Any]]
    folder: str


Event: TypeAlias = ProgressEvent | StatusEvent | ErrorEvent | ResultEvent


class _Infinite(GenerateJsonSchema):
    """JSON has no infinity: `secure_apfed.files.to_json` writes a text."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"enum": ["inf", "-inf", "nan"]}]}


def schema() -> dict[str, Any]:
    """JSON schema of one line."""
    every: TypeAdapter[Event] = TypeAdapter(Event)
    found = every.json_schema(mode="serialization", schema_generator=_Infinite)
    return {"$schema": _Infinite.schema_dialect, "title": "--json-events", **found}
