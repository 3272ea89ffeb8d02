"""JSON for programs of any language: it has no infinity and no NaN."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["to_json"]


def to_json(content: Any, *, indent: int | None = None) -> str:
    """Standard JSON, with infinity and NaN as "inf", "-inf" and "nan", and paths as text."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, Path):
        return str(content)
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
