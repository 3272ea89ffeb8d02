"""Rules for our modules: functions from parsed modules, or planted ones, to a line an offence."""

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import networkx

HOMES = {
    "apfed_protocols": "protocols/apfed_protocols",
    "secure_apfed": "secure_apfed",
    "apfed_attacks": "attacks/apfed_attacks",
    "apfed_experiments": "experiments/apfed_experiments",
    "apfed_bench": "experiments/apfed_bench",
}
LAYERS = tuple(HOMES)
# What may know attacks and experiments: the command line, the estimator, `run_frames`, what authors
# of attacks test them with, and the module that gives the attacks' names.
COMMANDS = frozenset({"secure_apfed.cli", "secure_apfed.commands"})
COMPOSITION_ROOT = COMMANDS | {
    "secure_apfed.attacks",
    "secure_apfed.interfaces",
    "secure_apfed.testing",
}
# The package itself gives `run_frames` to others, and loads it when it is asked for.
ENTRY_POINT = "secure_apfed"
SETTINGS_PACKAGE = "secure_apfed.settings"
# What settings may import of ours; of others, pydantic alone.
OF_SETTINGS = frozenset(
    {
        SETTINGS_PACKAGE,
        "apfed_protocols.lazy_names",
        "secure_apfed.errors",
        "secure_apfed.base",
        "secure_apfed.base.names",
    }
)
METHODS_PACKAGE = "secure_apfed.methods"
# Methods that are called by a word of the field, which tables of other things have, too: such a
# name may stand where nothing is compared with it.
WORDS = frozenset({"apfed", "votes"})
# Experiments that read runs of any method, and declare none.
NO_STUDY = frozenset({"apfed_experiments.report"})
# Whoever plays and records runs, and reads views out of them; all other attack code asks a view.
PLAY_METHODS = frozenset({"apfed_attacks.live", "apfed_attacks.recorded"})
# What the reference's pages document.
REFERENCE = frozenset(
    line.removeprefix("::: ").strip()
    for page in (Path(__file__).parents[1] / "docs/api").glob("*.md")
    for line in page.read_text("utf-8").splitlines()
    if line.startswith("::: ")
)
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Of ours nothing is loaded when an import begins; what others wrote is loaded once, for speed.
_SCRIPT = """
import json, sys
ours, statements = json.loads(sys.argv[1])
def own():
    return [name for name in sys.modules if name.partition(".")[0] in ours]
found = {}
for statement in statements:
    for loaded in own():
        del sys.modules[loaded]
    exec(statement, {})
    found[statement] = own()
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Module:
    """One parsed file: dotted name, tree, and whether it is a package's `__init__`."""

    name: str
    tree: ast.Module
    is_package: bool = False

    @property
    def layer(self) -> str:
        return self.name.partition(".")[0]


def parse(name: str, source: str, *, is_package: bool = False) -> Module:
    return Module(name=name, tree=ast.parse(source), is_package=is_package)


def name_of_module(path: Path, root: Path) -> str:
    """Return the dotted name under which this file of a package below `root` is imported."""
    layer = next(layer for layer, home in HOMES.items() if path.is_relative_to(root / home))
    parts = (layer, *path.relative_to(root / HOMES[layer]).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_modules(root: Path) -> list[Path]:
    """Return every file in Python of the packages below `root`, sorted."""
    return sorted(path for home in HOMES.values() for path in (root / home).rglob("*.py"))


def read_sources(root: Path) -> dict[str, str]:
    """Return the text of every module of the packages below `root`, by dotted name."""
    return {
        name_of_module(path, root): path.read_text(encoding="utf-8") for path in find_modules(root)
    }


@functools.cache  # parsing all takes seconds, and is of no use to whoever only collects tests
def the_tree(root: Path) -> dict[str, Module]:
    """Parse every module of the packages below `root`, by dotted name."""
    modules = {}
    for path in find_modules(root):
        name = name_of_module(path, root)
        source = path.read_text(encoding="utf-8")
        modules[name] = parse(name, source, is_package=path.name == "__init__.py")
    return modules


def own_imports(module: Module) -> tuple[int, int]:
    """Return how many names of ours a module imports, and from how many modules."""
    names = {
        (statement.module, alias.name)
        for statement in ast.walk(module.tree)
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
        if statement.module.partition(".")[0] in LAYERS
    }
    return len(names), len({home for home, _ in names})


def one_way(modules: Mapping[str, Module]) -> list[str]:
    """No module imports a later layer, and nothing imports the composition root."""
    offences = []
    for module, target, line in _all_imports(modules):
        in_the_root = _within(module.name, COMPOSITION_ROOT) or module.name == ENTRY_POINT
        if _within(target, COMPOSITION_ROOT) and not in_the_root:
            offences.append(f"{module.name}:{line} imports the composition root")
        layer = target.partition(".")[0]
        if layer not in LAYERS or _within(module.name, COMPOSITION_ROOT):
            continue
        if LAYERS.index(layer) > LAYERS.index(module.layer):
            offences.append(f"{module.name}:{line} imports {target}, against the direction")
    return offences


def find_import_cycles(modules: Mapping[str, Module]) -> list[str]:
    """List cycles among the imports that run when modules load."""
    graph = networkx.DiGraph(
        (module.name, target)
        for module in modules.values()
        for target, _ in _imports(_statements_on_load(module.tree), modules)
        if target in modules and target != module.name
    )
    return [" imports ".join([*cycle, cycle[0]]) for cycle in networkx.simple_cycles(graph)]


def settings_are_names(modules: Mapping[str, Module]) -> list[str]:
    """`settings` imports the standard library, pydantic, errors and names: nothing that works."""
    return [
        f"{module.name}:{line} imports {target}"
        for module, target, line in _all_imports(modules)
        if _within(module.name, frozenset({SETTINGS_PACKAGE}))
        and target.partition(".")[0] not in {*sys.stdlib_module_names, "pydantic"}
        and not _within(target, OF_SETTINGS)
    ]


def floors(modules: Mapping[str, Module], package: str = "secure_apfed") -> list[str]:
    """The parts of a package on its longest way down, a line a floor, the highest first.

    Parts, right below the package, that import each other on load are one storey of as many floors.
    """
    below = networkx.DiGraph()
    for module in modules.values():
        part = _part(module.name, package)
        for target, _ in _imports(_statements_on_load(module.tree), modules):
            other = _part(target, package)
            if part and other and part != other:
                below.add_edge(part, other)
    storeys = networkx.condensation(below)
    members = storeys.nodes(data="members")
    for top in list(storeys):
        storeys.add_edge("roof", top)
    for _, storey, edge in storeys.edges(data=True):
        edge["weight"] = len(members[storey])
    return [part for of in networkx.dag_longest_path(storeys)[1:] for part in sorted(members[of])]


def _part(name: str, package: str) -> str:
    """The module or folder right below a package that a module is of; empty where it is of none."""
    above, _, rest = name.partition(".")
    return rest.partition(".")[0] if above == package else ""


def all_is_true(modules: Mapping[str, Module]) -> list[str]:
    """`__all__` names every public thing defined here, but for commands, reached through `main`.

    It stands where it promises something: in packages, and in modules of the reference. Elsewhere
    a name without an underscore is all that is said.
    """
    offences = []
    for module in modules.values():
        statements = list(_statements_on_load(module.tree))
        defined = {
            node.name
            for node in statements
            if isinstance(node, _Definition) and not node.name.startswith("_")
        }
        given = list_exported_names(statements)
        if given is None and defined and (module.is_package or module.name in REFERENCE):
            offences.append(f"{module.name} has no __all__, but defines {sorted(defined)}")
        elif given is not None and not _within(module.name, COMMANDS):
            hidden = sorted(defined - given)
            offences += [f"{module.name} hides {name} from __all__" for name in hidden]
    return offences


def no_pickled_arrays(modules: Mapping[str, Module]) -> list[str]:
    """No array is read that may hold a pickle; other pickles ruff forbids."""
    return [
        f"{module.name}:{node.value.lineno} allows pickles"
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle"
        if not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]


def no_method_by_name(modules: Mapping[str, Module]) -> list[str]:
    """No method is asked for by its name, but for what it says of itself.

    No name stands anywhere, except that methods, studies and benches declare by name what they are
    or run, and that a word of the field is a word; there a name is never compared with.
    """
    from secure_apfed.methods import METHODS  # who reads the tree alone loads none of it

    names = frozenset(METHODS)
    offences = []
    for module in modules.values():
        own = _within(module.name, frozenset({METHODS_PACKAGE}))
        studies = module.layer in ("apfed_experiments", "apfed_bench")
        declares = own or (studies and not _within(module.name, NO_STUDY))
        compared = iterate_compared(module.tree)
        nodes = [(compared, names)]
        if not declares:
            nodes.append((ast.walk(module.tree), names - WORDS))
        lines = {
            node.lineno: node.value
            for of_nodes, forbidden in nodes
            for node in of_nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in forbidden
        }
        offences += [f"{module.name}:{line} names {name}" for line, name in lines.items()]
    return offences


def find_attacks_that_ask_methods(modules: Mapping[str, Module]) -> list[str]:
    """List attacks that ask a method what the parties exchanged, and not their view."""
    return [
        f"{module.name}:{line} imports {target}, where a view would say what is exchanged"
        for module, target, line in _all_imports(modules)
        if module.layer == "apfed_attacks"
        and not _within(module.name, PLAY_METHODS)
        and _within(target, frozenset({METHODS_PACKAGE}))
    ]


def iterate_compared(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what is below a comparison, a pattern of `match`, or a test of a text's beginning."""
    for node in ast.walk(tree):
        begins = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".startswith")
        if begins or isinstance(node, ast.Compare | ast.pattern):
            yield from ast.walk(node)


def _all_imports(modules: Mapping[str, Module]) -> Iterator[tuple[Module, str, int]]:
    for module in modules.values():
        for target, line in _imports(ast.walk(module.tree), modules):
            yield module, target, line


def _imports(nodes: Iterator[ast.AST], modules: Mapping[str, Module]) -> Iterator[tuple[str, int]]:
    """Yield what is imported, by dotted name: a submodule where `from` names one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in modules else node.module), node.lineno


def _statements_on_load(body: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run on import: within if, try and with, not within functions."""
    for node in ast.iter_child_nodes(body):
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements_on_load(node)


def list_exported_names(statements: Iterable[ast.AST]) -> set[str] | None:
    """Return the names in `__all__`, or None where the module has none."""
    for node in statements:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == "__all__":
                return set(ast.literal_eval(node.value))
    return None


def list_public_names(module: Module) -> set[str]:
    """Return what others may import: `__all__`, or names without an underscore."""
    statements = list(_statements_on_load(module.tree))
    given = list_exported_names(statements)
    if given is not None:
        return given
    defined = {node.name for node in statements if isinstance(node, _Definition)}
    for node in statements:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in defined if not name.startswith("_")}


def _within(name: str, forbidden: frozenset[str]) -> bool:
    return any(name == bad or name.startswith(f"{bad}.") for bad in forbidden)


# Which of our modules an import loads: the budget of what a reader of one part must know.


def list_loaded_modules(
    statements: Sequence[str], *, path: Path | None = None
) -> dict[str, set[str]]:
    """Return our modules that each import statement alone loads, of `path` as well."""
    searched = [*([str(path)] if path else []), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps([LAYERS, list(statements)])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return {statement: set(own) for statement, own in loaded.items()}
