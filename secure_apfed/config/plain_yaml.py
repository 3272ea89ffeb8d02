"""YAML for settings: plain values under keys that are texts, in files of limited size.

Run by: parties that read settings, which another party may have written. A small file must not
become a large value: aliases, with which a few lines stand for billions of values, are refused, and
so are numbers of very many digits, keys that are not texts, and tags.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from secure_apfed.errors import ConfigError

MAX_BYTES = 2**18
_MAX_DIGITS = 100

KeyPath = tuple[str | int, ...]

_FLOAT_WITH_EXPONENT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$|^[-+]?\.[0-9]+[eE][-+]?[0-9]+$"
)
_TAG_PREFIX = "tag:yaml.org,2002:"
_ALLOWED_TAGS = frozenset(
    f"{_TAG_PREFIX}{kind}"
    for kind in ("null", "bool", "int", "float", "str", "timestamp", "seq", "map", "merge")
)
_NUMBER_TAGS = frozenset({f"{_TAG_PREFIX}int", f"{_TAG_PREFIX}float"})


class _Loader(yaml.SafeLoader):
    """A reader of YAML's safe subset without aliases, in which 1e-3 is a number (YAML 1.2), not a
    text.
    """

    source = ""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node as PyYAML does, but refuse aliases.

        `parent`, `index`: where the node stands, as PyYAML passes them.

        Raises ConfigError: the node is an alias; a few of them could expand to billions of values.
        """
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it out
            raise ConfigError(
                f"{self.source}:{event.start_mark.line + 1}: aliases, as *{event.anchor}, are not "
                "read; write the value out"
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


class _Dumper(yaml.SafeDumper):
    """A writer of YAML that `_Loader` reads back unchanged."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: equal objects are written out, since `_Loader` refuses aliases."""
        return True


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", _FLOAT_WITH_EXPONENT, list("-+.0123456789")
)
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", _FLOAT_WITH_EXPONENT, list("-+.0123456789")
)


def load_text(path: Path) -> str:
    """Return a settings file's text, with Unix line ends.

    Raises ConfigError: the file is missing, unreadable, larger than `MAX_BYTES`, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)  # one more byte shows that the file is too large
        if len(content) > MAX_BYTES:
            raise _too_large_error(str(path))
        return content.decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; expected a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not text in UTF-8 (byte {error.start}); expected a YAML file"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def parse_yaml(text: str, source: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return the value of a YAML text, and the line of each key path, from 1.

    An empty text has the value None. `source`: name of the text in errors.

    Raises ConfigError: not YAML, or with aliases, repeated keys, tags, or very long numbers.
    """
    if len(text) > MAX_BYTES:
        raise _too_large_error(source)
    try:
        loader = _Loader(text)
        loader.source = source
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            # Nodes are checked before values are made of them.
            line_by_path = dict(_list_key_lines(node, source))
            return loader.construct_document(node), line_by_path
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(f"{line}: is not YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise ConfigError(f"{source}: is not YAML: {str(error).splitlines()[0]}") from None


def parse_yaml_value(text: str, *, source: str) -> Any:
    """Return the value of a short YAML text, such as an option's.

    `source`: where it was written, for errors. Raises ConfigError: not YAML.
    """
    try:
        return parse_yaml(text, source)[0]
    except ConfigError as error:
        raise ConfigError(f"{source}: the value {text[:80]!r} is not YAML ({error})") from None


def format_yaml(content: Any) -> str:
    """Return plain values as YAML, which `parse_yaml` reads back equal."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def _too_large_error(source: str) -> ConfigError:
    """Return the error for a text of more than `MAX_BYTES`. `source`: its name."""
    return ConfigError(f"{source}: is larger than {MAX_BYTES} bytes; expected YAML with settings")


def _list_key_lines(
    node: yaml.Node, source: str, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, int]]:
    """Check all nodes below a node; yield the path and line of every key and list item.

    `node`: the parsed YAML. `source`: name of the text in errors. `path`: key path of the node.

    Raises ConfigError: a repeated key, a key that is no text, a tag, or a number of very many
    digits.
    """
    _check_node(node, source)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _list_key_lines(item, source, (*path, index))
    if not isinstance(node, yaml.MappingNode):
        return
    lines_by_name: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag != f"{_TAG_PREFIX}str":
            raise ConfigError(
                f"{source}:{line}: keys are texts, got {_format_key(key)}; write it in quotes"
            )
        name = key.value
        if name in lines_by_name:
            raise ConfigError(
                f"{source}:{line}: {'.'.join(map(str, (*path, name)))}: is given twice, "
                f"first in line {lines_by_name[name]}; keep one"
            )
        lines_by_name[name] = line
        yield (*path, name), line
        yield from _list_key_lines(value, source, (*path, name))


def _check_node(node: yaml.Node, source: str) -> None:
    """Raise ConfigError if a node has a tag that is not allowed, or is a number of very many
    digits.
    """
    line = node.start_mark.line + 1
    if node.tag not in _ALLOWED_TAGS:
        raise ConfigError(f"{source}:{line}: the tag {node.tag[:80]} is not read; leave it out")
    if node.tag in _NUMBER_TAGS and len(node.value) > _MAX_DIGITS:
        raise ConfigError(
            f"{source}:{line}: a number of {len(node.value)} characters; expected "
            f"{_MAX_DIGITS} at most"
        )


def _format_key(key: yaml.Node) -> str:
    """Return a key that is no text, for an error."""
    return repr(key.value[:80]) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
