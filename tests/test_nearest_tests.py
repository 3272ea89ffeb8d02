"""`make quick`: the tests nearest to a changed file are found, and an unknown file is no error."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.nearest_tests import find_changed_files, name_module, select_tests

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "secure_apfed/__init__.py": "from secure_apfed.a import give",
    "secure_apfed/a.py": "from apfed_protocols.p import add\ndef give(): ...",
    "secure_apfed/lonely.py": "",
    "protocols/apfed_protocols/__init__.py": "",
    "protocols/apfed_protocols/p.py": "def add(): ...",
    "tests/helpers.py": "import apfed_protocols.p",
    "tests/secure_apfed/test_a.py": "from secure_apfed import give",
    "tests/secure_apfed/test_far.py": "from tests.helpers import add",
    "README.md": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, source in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        ("secure_apfed/a.py", ["tests/secure_apfed/test_a.py"]),
        # Two imports away: by a helper of tests, and by the module that uses it.
        (
            "protocols/apfed_protocols/p.py",
            ["tests/secure_apfed/test_a.py", "tests/secure_apfed/test_far.py"],
        ),
        ("tests/helpers.py", ["tests/secure_apfed/test_far.py"]),
        ("tests/secure_apfed/test_a.py", ["tests/secure_apfed/test_a.py"]),
        ("secure_apfed/lonely.py", []),
        ("README.md", ["tests/docs/test_docs.py"]),
    ],
)
def test_the_nearest_tests_of_a_file_are_found(
    changed: str, selected: list[str], tree: Path
) -> None:
    assert select_tests([tree / changed], tree) == selected


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("protocols/apfed_protocols/sums/masked.py", "apfed_protocols.sums.masked"),
        ("secure_apfed/data/__init__.py", "secure_apfed.data"),
        ("tests/conftest.py", "tests.conftest"),
    ],
)
def test_a_module_is_named_as_it_is_imported(file: str, name: str) -> None:
    assert name_module(ROOT / file, ROOT) == name


def test_git_says_which_files_changed_or_are_new(tree: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "--all"], ["commit", "-q", "-m", "All"]):
        subprocess.run([*git, *command], cwd=tree, check=True)
    assert find_changed_files(tree) == []
    (tree / "secure_apfed/a.py").write_text("")
    (tree / "tests/test new.py").write_text("")
    (tree / "README.md").unlink()
    assert find_changed_files(tree) == [tree / "secure_apfed/a.py", tree / "tests/test new.py"]


@pytest.mark.slow
def test_the_program_prints_tests_or_says_that_none_is_near() -> None:
    command = [sys.executable, str(ROOT / "tests/nearest_tests.py")]
    near = subprocess.run(
        [*command, str(ROOT / "secure_apfed/console/terminal.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert near.returncode == 0
    assert "tests/secure_apfed/test_cli.py" in near.stdout.splitlines()
    none = subprocess.run([*command, "absent.py"], capture_output=True, text=True, check=False)
    assert (none.returncode, none.stdout) == (1, "")
    assert "`make test` runs all" in none.stderr
