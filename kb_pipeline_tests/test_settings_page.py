"""README against the code: what it lists must be what there is."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from kb_pipeline.registry import KINDS
from kb_pipeline.settings import Settings, variable

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", outside_fences(), re.MULTILINE | re.DOTALL)
    assert found, f"README has no section {title!r}"
    return found[1]


def outside_fences() -> str:
    """README with the comments in its fences indented, so that they are no headings."""
    return re.sub(r"```.*?```", lambda fence: fence[0].replace("\n#", "\n #"), README, flags=re.DOTALL)


def table(title: str) -> list[str]:
    return [line for line in section(title).splitlines() if line.startswith("|")]


def settings_table() -> Iterator[str]:
    yield "| Variable | Default | Meaning |"
    yield "| --- | --- | --- |"
    for field in fields(Settings):
        assert field.default is not MISSING
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        yield f"| `{variable(field.name)}` | {f'`{default}`' if default else '(empty)'} | {field.metadata['about']} |"


def test_the_settings_table_equals_the_settings() -> None:
    assert table("Settings") == list(settings_table())


def test_every_adapter_is_named_and_no_other() -> None:
    listed = {
        row.split("|")[1].strip().strip("`"): set(re.findall(r"`(\w+)`", row.split("|")[2])) for row in table("Adapters")[2:]
    }
    assert listed == {kind: set(names) for kind, names in KINDS.items()}


def test_every_code_of_bad_input_exists_in_the_code() -> None:
    source = "\n".join(
        p.read_text(encoding="utf-8") for p in (ROOT / "kb_pipeline").rglob("*.*") if p.suffix in (".py", ".sql")
    )
    codes = {code for row in table("Bad input")[2:] for code in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert len(codes) >= 12
    assert {code for code in codes if not re.search(rf"""["']{code}["']""", source)} == set()


def test_the_import_rows_are_those_of_the_linter() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")["layers"]
    fence = re.search(r"```text\n(.*?)```", section("Code"), re.DOTALL)
    assert fence and fence[1].splitlines() == layers


def test_each_marked_command_is_one_line_and_the_same_in_both_languages() -> None:
    marked = re.findall(r"<!-- command: (\w+) -->\n```sh\n(.*?)```", README, re.DOTALL)
    assert [name for name, _ in marked] == ["demo", "test"]
    for _, command in marked:
        assert command.count("\n") == 1
        assert command in section("快速开始")
