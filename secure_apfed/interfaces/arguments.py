"""Settings in errors and warnings, for programs that call `train` or `run_frames`.

Errors and warnings of the library name a setting by its path in a run's YAML file, such as
data.test_fraction. A program has no such file: it passes an argument, such as test_fraction=. Here
paths in texts are replaced by arguments.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from secure_apfed.base.translation import translate_warnings
from secure_apfed.config import Config
from secure_apfed.config.plain_yaml import KeyPath, parse_yaml_value
from secure_apfed.errors import ApfedError
from secure_apfed.settings import Settings

TRAIN_ARGUMENT_BY_PATH: Mapping[KeyPath, str] = {
    ("train", "epochs"): "epochs",
    ("train", "batch_size"): "batch_size",
    ("train", "optimizer"): "optimizer",
    ("data", "labelled"): "labelled",
    ("data", "test_fraction"): "test_fraction",
    ("method", "name"): "method",
    ("alignment", "protocol"): "alignment",
}
"""Path of a setting -> the argument of `train` that gives it."""

# Words that are values of settings in texts.
_VALUE_WORDS = "mean|drop|error|none|auto|after|joint|balanced|float64|true|false|null"
_VALUE_PATTERN = rf'\[[^\]]*\]|\{{[^}}]*\}}|"[^"]*"|-?\d+(?:\.\d+)?(?:e-?\d+)?|(?:{_VALUE_WORDS})\b'
_SECTION_NAMES = (
    "train|model|data|secure_sum|guard|alignment|transcript|rules|dp_sgd|passives|method"
)
_SETTING_PATTERN = re.compile(
    rf"(?<![\w.'\"/={{-])({_SECTION_NAMES})((?:\.[A-Za-z_][\w-]*)+)"
    rf"(?:: (?P<value>{_VALUE_PATTERN})(?! \w+ (?:rows|is|are)\b))?"
)
_SECTION_PATTERN = re.compile(rf"(?<![\w.'\"/-])({_SECTION_NAMES}): (\{{[^}}]*\}})")
_IGNORE_PATTERN = re.compile(r"(?:say )?data\.parties\.[\w.-]+\.ignore: (\[[^\]]*\])")
# Advice on settings of a table, which do not exist for rows that a program passes.
_TABLE_ADVICE_PATTERN = re.compile(
    r"data\.parties\.[\w.-]+\.(?:rare_categories|numeric): \S+ ?\S*?, or "
)
_MISSING_PATTERN = re.compile(r"data\.parties\.([\w.-]+)\.missing: (\w+)")
# Other phrases about files or the command line -> phrases about a program.
_REPLACEMENT_BY_PHRASE: Mapping[str, str] = {
    " (data.limit)": "",
    "--resume": "resume=True",
    "leave their cells empty": "give None in their place",
    "contrastive at every passive": "loss=Contrastive() at every passive",
    "reconstruction at every passive": "loss=Reconstruction() at every passive",
}
# Settings of a passive that are arguments of `Passive`.
_PASSIVE_ARGUMENTS = frozenset({"weight", "row_wise", "encoder", "gradient", "loss"})


def describe_argument(path: KeyPath, value: Any) -> str:
    """Return a setting as the argument that gives it, such as train={'epochs': 0}.

    `path`: path of the setting; the first key is the section, and the name of the argument.
    `value`: value of the whole section, as it was passed.
    """
    section, *keys = path
    return f"{section}={_narrow_value(value, keys)}"


def _narrow_value(value: Any, keys: list[str | int]) -> str:
    """Return a value as text, in which only the part that the keys lead to is written out.

    An example is {'epochs': 0} for a mapping with further keys. Parts that are left out, missing or
    long are written "...".
    """
    if not keys:
        is_long = isinstance(value, Mapping | list)
        return "..." if is_long or value is None else repr(value)
    key, *remaining_keys = keys
    if isinstance(value, Mapping):
        return f"{{{key!r}: {_narrow_value(value.get(str(key)), remaining_keys)}}}"
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        left_out_before = "..., " if key else ""
        return f"[{left_out_before}{_narrow_value(value[key], remaining_keys)}]"
    return "..."


@contextmanager
def name_arguments(argument_by_path: Mapping[KeyPath, str]) -> Iterator[None]:
    """Name settings as arguments in the library's errors and warnings in the `with` block.

    `argument_by_path`: path of a setting -> the argument that gives it. Settings without an
    argument are named as parts of a section, such as train={'learning_rate': ...}.
    """

    def translate(text: str) -> str:
        """Return a text in which settings are named as arguments."""
        return translate_settings(text, argument_by_path)

    try:
        with translate_warnings(translate):
            yield
    except (ApfedError, UserWarning) as error:  # filters may turn warnings into errors
        error.args = tuple(translate(arg) if isinstance(arg, str) else arg for arg in error.args)
        raise


def translate_settings(text: str, argument_by_path: Mapping[KeyPath, str]) -> str:
    """Return a text of the library in which arguments replace the settings of a YAML file.

    `argument_by_path`: path of a setting -> the argument that gives it.

    Examples:
        >>> translate_settings("raise data.test_fraction", TRAIN_ARGUMENT_BY_PATH)
        'raise test_fraction='
        >>> translate_settings("lower train.learning_rate", TRAIN_ARGUMENT_BY_PATH)
        "lower train={'learning_rate': ...}"
        >>> translate_settings("say model.projection: 6, or another", TRAIN_ARGUMENT_BY_PATH)
        "say model={'projection': 6}, or another"
    """
    text = _TABLE_ADVICE_PATTERN.sub("", text)
    text = _IGNORE_PATTERN.sub(_describe_column_drop, text)
    text = _MISSING_PATTERN.sub(r"missing='\2' at \1", text)
    for phrase, replacement in _REPLACEMENT_BY_PHRASE.items():
        text = text.replace(phrase, replacement)
    text = re.sub(r" in the run's file\b", "", text)
    text = _SECTION_PATTERN.sub(_describe_section, text)
    return _SETTING_PATTERN.sub(_make_setting_replacer(argument_by_path), text)


def _describe_column_drop(match: re.Match[str]) -> str:
    """Return the advice that replaces a setting `ignore`, which lists columns (group 1)."""
    names = parse_yaml_value(match[1], source="names of columns")
    return f"leave it out, as rows.drop(columns={names!r})"


def _describe_section(match: re.Match[str]) -> str:
    """Return a section (group 1) with its settings (group 2, YAML) as an argument."""
    return f"{match[1]}={parse_yaml_value(match[2], source=match[1])!r}"


def _make_setting_replacer(
    argument_by_path: Mapping[KeyPath, str],
) -> Callable[[re.Match[str]], str]:
    """Return the function that replaces a match of `_KEY`: a setting's path, perhaps with a value.

    It returns the argument that gives the setting, or the path itself if that is no setting.

    `argument_by_path`: path of a setting -> the argument that gives it.
    """

    def replace(match: re.Match[str]) -> str:
        """Return the argument in place of a setting's path."""
        keys = match[2].lstrip(".").split(".")
        path: KeyPath = (match[1], *keys)
        has_value = match["value"] is not None
        value = repr(parse_yaml_value(match["value"], source="it")) if has_value else "..."
        if (argument := argument_by_path.get(path)) is not None:
            return f"{argument}={value if has_value else ''}"
        if match[1] == "passives" and len(keys) == 2:
            passive, key = keys
            if key == "objective":
                return f"Passive({passive!r}, loss={value})"
            if key in _PASSIVE_ARGUMENTS:
                return f"Passive({passive!r}, {key}={value})"
        if not _is_setting(path):
            return match[0]
        for section_key in reversed(keys):  # a dictionary within a dictionary for each key
            value = f"{{{section_key!r}: {value}}}"
        return f"{match[1]}={value}"

    return replace


def _is_setting(path: KeyPath) -> bool:
    """Return whether a path is a setting; texts such as method.py look like one, too."""
    section, key, *_ = map(str, path)
    section_class = Config.model_fields[section].annotation
    if section == "dp_sgd":  # its type is no class of settings, as the section may be missing
        return True
    if section in ("passives", "method"):
        return len(path) > 2 or (section == "method" and key not in ("py", "json", "yaml"))
    return (
        isinstance(section_class, type)
        and issubclass(section_class, Settings)
        and key in section_class.model_fields
    )
