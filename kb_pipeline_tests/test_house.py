"""The rules of the house that no linter knows. Each reads the code as it is; what is excused is named here."""

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kb_pipeline.store.migrations import migrations

ROOT = Path(__file__).resolve().parents[1]
CODE = ROOT / "kb_pipeline"
MODULES = {p.relative_to(CODE).as_posix(): p.read_text(encoding="utf-8") for p in sorted(CODE.rglob("*.py"))}
SQL_FILES = {p.relative_to(CODE).as_posix(): p.read_text(encoding="utf-8") for p in sorted(CODE.rglob("*.sql"))}
TREES = {name: ast.parse(text) for name, text in MODULES.items()}

READS_ENVIRONMENT = {"settings.py"}
# Runs before there is a database to connect to: single-user mode takes text, and the password in it is hexadecimal.
SQL_AS_TEXT = {"embedded_postgres/configuration.py"}
CATCHES_BROADLY = {"pipeline.py"}

_SQL = re.compile(  # at the beginning: a message may well name a statement
    r"\s*(SELECT\s|INSERT INTO\s|UPDATE\s+\S*\s*SET\s|DELETE FROM\s|WITH \w+ AS\s|TRUNCATE\s|COPY\s|GRANT\s"
    r"|(CREATE|ALTER|DROP)\s+(TABLE|INDEX|DATABASE|ROLE|EXTENSION|FUNCTION)\b)"
)
_BLOCK = re.compile(r"^-- name: (\w+)[ \t]*$", re.M)


def nodes(module: str) -> Iterator[ast.AST]:
    return ast.walk(TREES[module])


def at(module: str, node: ast.AST) -> str:
    return f"kb_pipeline/{module}:{getattr(node, 'lineno', 0)}"


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def constants(node: ast.AST) -> str:
    """The text of a string as far as it is written down."""
    return "".join(x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str))


def blocks(text: str) -> dict[str, str]:
    parts = _BLOCK.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# --- size and names -------------------------------------------------------------------------------------------------


def test_no_module_is_longer_than_400_lines() -> None:
    assert [(m, n) for m, text in MODULES.items() if (n := len(text.splitlines())) > 400] == []


def test_no_function_is_longer_than_60_lines() -> None:
    functions = [(m, f) for m in MODULES for f in nodes(m) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [f"{at(m, f)} {f.name}" for m, f in functions if (f.end_lineno or 0) - f.lineno >= 60] == []


def test_no_module_is_named_for_nothing() -> None:
    nothing = re.compile(r"(utils?|helpers?|common|misc)\.py|.*manager.*")
    assert [m for m in MODULES if nothing.fullmatch(m.rpartition("/")[2])] == []


def test_nothing_is_left_undone_in_words() -> None:
    undone = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError")
    assert [m for m, text in {**MODULES, **SQL_FILES}.items() if undone.search(text)] == []


# --- borders --------------------------------------------------------------------------------------------------------


def test_the_environment_is_read_in_settings_only() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    found = {m: [at(m, n) for n in nodes(m) if _reads_environment(n, names)] for m in MODULES}
    assert [where for m, places in found.items() if m not in READS_ENVIRONMENT for where in places] == []
    assert found["settings.py"]  # the test sees what it looks for


def _reads_environment(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and bool(names & {alias.name for alias in node.names})
    return isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os"


def test_dagster_is_imported_in_orchestration_only() -> None:
    found = [(m, n) for m in MODULES for n in nodes(m) if any(i.split(".")[0].startswith("dagster") for i in imported(n))]
    assert [at(m, n) for m, n in found if not m.startswith("orchestration/")] == []


def test_everything_but_orchestration_loads_without_dagster() -> None:
    outside = [m for m in MODULES if not m.startswith("orchestration/") and m != "embedded_postgres/launcher.py"]
    names = [f"kb_pipeline.{m.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__") for m in outside]
    run_python(
        "import importlib, sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0].startswith('dagster'): raise ImportError(f'{name} is not installed')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n",
        *names,
    )


def test_only_the_pipeline_catches_whatever_comes_and_goes_on() -> None:
    """``except Exception`` elsewhere must raise: clean up, or translate a vendor's errors."""
    found = [(m, n) for m in MODULES if m not in CATCHES_BROADLY for n in nodes(m) if isinstance(n, ast.ExceptHandler)]
    broad = [(m, n) for m, n in found if n.type is None or {"Exception", "BaseException"} & {ast.unparse(n.type)}]
    assert [at(m, n) for m, n in broad if not isinstance(n.body[-1], ast.Raise)] == []


# --- SQL ------------------------------------------------------------------------------------------------------------


def test_no_sql_is_built_from_text() -> None:
    found = [
        at(m, n) for m in MODULES if m not in SQL_AS_TEXT for n in nodes(m) if _builds_text(n) and _SQL.match(constants(n))
    ]
    assert found == []


def _builds_text(node: ast.AST) -> bool:
    """An f-string, ``"..." % x``, ``"..." + x`` or ``"...".format(x)``. psycopg's ``SQL("...").format`` quotes, and is none."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod | ast.Add) and any(
            isinstance(x, ast.Constant | ast.JoinedStr) for x in (node.left, node.right)
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "format" and isinstance(node.func.value, ast.Constant)
    return isinstance(node, ast.JoinedStr) and any(isinstance(x, ast.FormattedValue) for x in node.values)


@pytest.mark.parametrize(
    "code",
    [
        'f"SELECT {x}"',
        'f"""\n  DELETE FROM {table} WHERE a"""',
        '"UPDATE t SET a = %s" % x',
        '"INSERT INTO " + table',
        '"DROP TABLE {}".format(x)',
    ],
)
def test_sql_that_is_built_from_text_is_seen(code: str) -> None:
    assert any(_builds_text(n) and _SQL.match(constants(n)) for n in ast.walk(ast.parse(code)))


def test_every_sql_block_is_used_and_every_used_block_exists() -> None:
    for file, text in SQL_FILES.items():
        module = file.removesuffix(".sql") + ".py"
        used = {
            n.attr
            for n in nodes(module)
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "SQL"
        }
        assert used == set(blocks(text)), file
        assert len(_BLOCK.findall(text)) == len(blocks(text)), f"{file}: a block stands twice"


def test_every_module_with_statements_has_its_own_file() -> None:
    loads = re.compile(r'^SQL = load_statements\(__package__, "([a-z_]+\.sql)"\)$', re.M)
    found = {f"{m.rpartition('/')[0]}/{file}": m for m, text in MODULES.items() for file in loads.findall(text)}
    assert {file: file.removesuffix(".sql") + ".py" for file in SQL_FILES} == found


def test_no_statement_stands_twice_in_a_package() -> None:
    everywhere: dict[tuple[str, str], str] = {}
    for file, text in SQL_FILES.items():
        for name, body in blocks(text).items():
            where = everywhere.setdefault((file.rpartition("/")[0], " ".join(body.split())), f"{file}:{name}")
            assert where == f"{file}:{name}"


def test_a_status_is_written_in_the_store_only() -> None:
    outside = {
        f"{f}:{name}": body
        for f, text in SQL_FILES.items()
        if not f.startswith("store/")
        for name, body in blocks(text).items()
    }
    outside |= {m: "\n".join(_strings(m)) for m in MODULES if not m.startswith("store/")}
    assert [where for where, text in outside.items() if _writes_status(text)] == []
    assert any(_writes_status(text) for text in SQL_FILES.values())  # the test sees what it looks for


def _strings(module: str) -> list[str]:
    return [n.value for n in nodes(module) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _writes_status(text: str) -> bool:
    assigned = re.findall(r"\bSET\b(.*?)(?:\bWHERE\b|\bFROM\b|\bRETURNING\b|;|\Z)", text, re.S)
    return any(re.search(r"\b(vec_)?status\s*=", part) for part in assigned)


# --- what is installed ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, made by the build backend itself."""
    folder = tmp_path_factory.mktemp("wheel")
    built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(built, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as z:
        z.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_file_of_the_package_and_the_schema_and_no_tests(wheel: Path) -> None:
    left_out = {"__pycache__", "pictures"}  # README shows them
    ours = {p.relative_to(ROOT).as_posix() for p in CODE.rglob("*") if p.is_file() and not left_out & set(p.parts)}
    schema = {f"kb_pipeline/store/schema/{p.name}" for p in (ROOT / "sql").glob("*.sql")}
    held = {p.relative_to(wheel).as_posix() for p in wheel.rglob("*") if p.is_file()}
    assert len(schema) >= 5
    assert {name for name in ours | schema if name not in held} == set()
    assert {name for name in held if not name.startswith("kb_pipeline/") and ".dist-info/" not in name} == set()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)


def test_statements_and_migrations_of_an_installed_wheel_are_those_of_the_sources(wheel: Path) -> None:
    printed = run_python(
        "import importlib, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import kb_pipeline\n"
        "from kb_pipeline.store.migrations import migrations\n"
        "print(kb_pipeline.__file__)\n"
        "print([(m.version, m.name, m.sha256) for m in migrations()])\n"
        "for name in sys.argv[2:]: print(name, len(vars(importlib.import_module(name).SQL)))\n",
        str(wheel),
        *(f"kb_pipeline.{f.removesuffix('.sql').replace('/', '.')}" for f in SQL_FILES),
    ).splitlines()
    assert printed[0].startswith(str(wheel))
    assert printed[1] == str([(m.version, m.name, m.sha256) for m in migrations()])
    assert [int(line.split()[1]) for line in printed[2:]] == [len(blocks(text)) for text in SQL_FILES.values()]


def test_migrations_are_numbered_without_a_gap() -> None:
    assert [m.version for m in migrations()] == list(range(1, len(list((ROOT / "sql").glob("*.sql"))) + 1))


def run_python(code: str, *arguments: str) -> str:
    """In a process of its own that sees no folder but the installed packages'."""
    done = subprocess.run([sys.executable, "-I", "-c", code, *arguments], cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
