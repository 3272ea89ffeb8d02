"""What the tree of modules must hold, as functions from modules to offenders.

Each rule takes parsed modules and returns one line per offence, so that the same rule runs on
our packages and on planted bad code.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

__all__ = [
    "LAYERS",
    "Module",
    "all_is_true",
    "attacks_ask_no_method",
    "documented",
    "floors",
    "no_method_by_name",
    "one_way",
    "parse",
    "settings_are_names",
    "the_tree",
    "unsafe_calls",
    "without_cycles",
    "without_weak_randomness_or_io",
]

HOMES = {
    "apfed_protocols": "protocols/apfed_protocols",
    "secure_apfed": "secure_apfed",
    "apfed_attacks": "attacks/apfed_attacks",
    "apfed_experiments": "experiments/apfed_experiments",
    "apfed_bench": "experiments/apfed_bench",
}
LAYERS = tuple(HOMES)
# What may know attacks and experiments: the command line, the estimator, `run_frames`.
COMMANDS = frozenset({"secure_apfed.cli", "secure_apfed.commands"})
COMPOSITION_ROOT = COMMANDS | {"secure_apfed.estimator", "secure_apfed.frames"}
# The package itself gives `run_frames` to others, and loads it when it is asked for.
ENTRY_POINT = "secure_apfed"

UNPICKLING = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"})
UNSAFE_NAMES = frozenset(
    {
        "torch.load", "joblib.load", "pandas.read_pickle", "pd.read_pickle",
        "yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader", "yaml.unsafe_load", "yaml.full_load",
    }
)  # fmt: skip
TEXT_AS_CODE = frozenset({"eval", "exec"})
# What `protocols` must not touch: seeded generators, sockets, clocks, networks of neurons.
PROTOCOLS_WITHOUT = frozenset(
    {
        "random", "numpy.random", "np.random", "torch.manual_seed", "torch.Generator", "torch.nn",
        "torch.rand", "torch.randn", "torch.randint", "torch.randperm",
        "socket", "ssl", "http", "httpx", "urllib", "asyncio", "time",
        # Dates are a kind of ID; what the date is, nobody asks.
        "date.today", "datetime.now", "datetime.today", "datetime.utcnow",
        "datetime.date.today", "datetime.datetime.now", "datetime.datetime.today",
        "datetime.datetime.utcnow",
    }
)  # fmt: skip
# Keys and masks come from one module; what it is made of stays inside.
ENTROPY = frozenset({"secrets", "os.urandom"})
RANDOMNESS_MODULE = "apfed_protocols.randomness"

SETTINGS_PACKAGE = "secure_apfed.settings"
# What settings may import of ours; of others, pydantic alone.
OF_SETTINGS = frozenset({SETTINGS_PACKAGE, "secure_apfed.errors", "secure_apfed.names"})
METHODS_PACKAGE = "secure_apfed.methods"
# Methods that are called by a word of the field, which tables of other things have, too: such a
# name may stand where nothing is compared with it.
WORDS = frozenset({"votes"})
# Experiments that read runs of any method, and declare none.
NO_STUDY = frozenset({"apfed_experiments.report"})

# Whoever plays and records runs, and reads views out of them; all other attack code asks a view.
PLAY_METHODS = frozenset({"apfed_attacks.live", "apfed_attacks.recorded"})

_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, kw_only=True)
class Module:
    """One parsed file: dotted name, source, tree, and whether it is a package's `__init__`."""

    name: str
    source: str
    tree: ast.Module
    is_package: bool = False

    @property
    def layer(self) -> str:
        return self.name.partition(".")[0]


def parse(name: str, source: str, *, is_package: bool = False) -> Module:
    return Module(name=name, source=source, tree=ast.parse(source), is_package=is_package)


def the_tree(root: Path) -> dict[str, Module]:
    """Parse every module of the packages below `root`, by dotted name."""
    modules = {}
    for path in sorted(path for home in HOMES.values() for path in (root / home).rglob("*.py")):
        layer = next(layer for layer, home in HOMES.items() if path.is_relative_to(root / home))
        parts = (layer, *path.relative_to(root / HOMES[layer]).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = parse(name, path.read_text(encoding="utf-8"), is_package=is_package)
    return modules


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


def without_cycles(modules: Mapping[str, Module]) -> list[str]:
    """No cycle among the imports that run when modules load."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for module in modules.values():
        for target, _ in _imports(_statements_on_load(module.tree), modules):
            if target in modules and target != module.name:
                graph[module.name].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


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
    """The parts of a package on its longest way down, one line a floor, the highest first.

    A part is a module or folder right below the package. It stands on another where any of its
    modules imports one of the other's on load. Parts that stand on each other are one storey, and
    as many floors as there are of them, since none can be read without the others.
    """
    below: dict[str, set[str]] = {}
    for module in modules.values():
        part = _part(module.name, package)
        for target, _ in _imports(_statements_on_load(module.tree), modules):
            other = _part(target, package)
            if part and other and part != other:
                below.setdefault(part, set()).add(other)
    reached = {part: _reachable(part, below) for part in below}

    @cache
    def down(part: str) -> tuple[str, ...]:
        found = reached.get(part, frozenset())
        storey = sorted({part, *(one for one in found if part in reached.get(one, frozenset()))})
        return (*storey, *_longest(down(one) for one in found if one not in storey))

    return list(_longest(map(down, below)))


def _longest(ways: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return max(ways, key=len, default=())


def _part(name: str, package: str) -> str:
    """The module or folder right below a package that a module is of; empty where it is of none."""
    above, _, rest = name.partition(".")
    return rest.partition(".")[0] if above == package else ""


def _reachable(part: str, below: Mapping[str, set[str]]) -> frozenset[str]:
    found: set[str] = set()
    left = [part]
    while left:
        new = below.get(left.pop(), set()) - found
        found |= new
        left += new
    return frozenset(found)


def all_is_true(modules: Mapping[str, Module]) -> list[str]:
    """`__all__` names what exists, and every public function and class that is defined here.

    The commands of the composition root are the exception: they are reached through its `main`.
    """
    offences = []
    for module in modules.values():
        statements = list(_statements_on_load(module.tree))
        defined = {
            node.name
            for node in statements
            if isinstance(node, _Definition) and not node.name.startswith("_")
        }
        exported = _exported(statements)
        if exported is None:
            if defined:
                offences.append(f"{module.name} has no __all__, but defines {sorted(defined)}")
            continue
        # Names that a lazy package loads on demand are declared for type checkers.
        declared = [*statements, *_for_type_checkers(module.tree)]
        bound = {name for node in declared for name in _bound(node)}
        offences += [f"{module.name} exports {n}, unknown to it" for n in sorted(exported - bound)]
        if _within(module.name, COMMANDS):
            continue
        offences += [f"{module.name} hides {n} from __all__" for n in sorted(defined - exported)]
    return offences


def _for_type_checkers(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from node.body


def without_weak_randomness_or_io(modules: Mapping[str, Module]) -> list[str]:
    """`protocols` has no seeded generator, socket, clock or network of neurons."""
    offences = []
    for module in modules.values():
        if module.layer != "apfed_protocols":
            continue
        forbidden = PROTOCOLS_WITHOUT
        if module.name != RANDOMNESS_MODULE:
            forbidden = forbidden | ENTROPY
        offences += _uses(module, forbidden)
    return offences


def unsafe_calls(modules: Mapping[str, Module]) -> list[str]:
    """No module reads pickles or runs text as code."""
    offences = []
    for module in modules.values():
        offences += _uses(module, UNPICKLING | UNSAFE_NAMES)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in TEXT_AS_CODE:
                    offences.append(f"{module.name}:{node.lineno} calls {node.func.id}")
            elif isinstance(node, ast.keyword) and _allows_pickles(node):
                offences.append(f"{module.name}:{node.value.lineno} allows pickles")
    return offences


def documented(modules: Mapping[str, Module]) -> list[str]:
    """Every module says at its top what it is."""
    return [
        f"{module.name} has no docstring"
        for module in modules.values()
        if ast.get_docstring(module.tree) is None
    ]


def no_method_by_name(modules: Mapping[str, Module]) -> list[str]:
    """Outside of its package no method is asked for by its name, but for what it says of itself.

    No name stands anywhere, except that studies and benches declare by name what they run, and that
    a word of the field is a word; there a name is never compared with.
    """
    names = _keys_of_methods(modules)
    offences = []
    for module in modules.values():
        if _within(module.name, frozenset({METHODS_PACKAGE})):
            continue
        studies = module.layer in ("apfed_experiments", "apfed_bench")
        declares = studies and not _within(module.name, NO_STUDY)
        compared = _compared(module.tree)
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


def attacks_ask_no_method(modules: Mapping[str, Module]) -> list[str]:
    """What the parties exchanged, an attack asks its view."""
    return [
        f"{module.name}:{line} imports {target}, where a view would say what is exchanged"
        for module, target, line in _all_imports(modules)
        if module.layer == "apfed_attacks"
        and not _within(module.name, PLAY_METHODS)
        and _within(target, frozenset({METHODS_PACKAGE}))
    ]


def _keys_of_methods(modules: Mapping[str, Module]) -> frozenset[str]:
    """The keys of the table of methods, read from its source."""
    for node in modules[METHODS_PACKAGE].tree.body if METHODS_PACKAGE in modules else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == "METHODS":
                return frozenset(ast.literal_eval(key) for key in node.value.keys if key)
    return frozenset()


def _compared(tree: ast.Module) -> Iterator[ast.AST]:
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


def _exported(statements: list[ast.AST]) -> set[str] | None:
    """Return the names in `__all__`, or None where the module has none."""
    for node in statements:
        target: ast.expr | None = None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        if isinstance(target, ast.Name) and target.id == "__all__":
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            return set(ast.literal_eval(node.value)) if node.value is not None else None
    return None


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds."""
    if isinstance(node, _Definition):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id


def _uses(module: Module, forbidden: frozenset[str]) -> list[str]:
    """Return where a module imports one of the dotted names or reaches it by attribute."""
    uses: list[tuple[int, str]] = []
    for node in ast.walk(module.tree):
        imported: list[str] = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in forbidden:
            uses.append((node.lineno, ast.unparse(node)))
        if isinstance(node, ast.Import | ast.ImportFrom):
            uses += [(node.lineno, name) for name in imported if _within(name, forbidden)]
    return [f"{module.name}:{line} uses {name}" for line, name in uses]


def _within(name: str, forbidden: frozenset[str]) -> bool:
    return any(name == bad or name.startswith(f"{bad}.") for bad in forbidden)


def _allows_pickles(keyword: ast.keyword) -> bool:
    refused = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    return keyword.arg == "allow_pickle" and not refused
