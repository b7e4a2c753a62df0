"""README, docs/ and CONTRIBUTING against the tree: every link, path, command and module that they name exists."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from malmen.config import Config, describe_settings
from malmen.platform.cli.main import app
from malmen.serve.settings import ServeConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)
ROOMS = ("malmen", "platform", "tune", "serve")
# Pages with ```bash ci blocks. .ci/run runs them in this order, because later ones use what earlier ones leave.
RUN_BY_CI = ("README.md", "docs/using.md", "docs/platform.md", "docs/serving.md", "docs/experiments.md")
BANNED = {  # phrase: what to write instead
    r"gone on with|goes on with|go on with|going on with": "resumed",
    r"\bsigns\b": "characters",
    r"there is no such": "not found",
    r"what is not there is made": "creates it if it does not exist",
    r"nobody waits": "it never blocks",
    r"takes? one at a time": "handles one request at a time",
    r"as fast as the machine is": "a time on a named machine",
    r"\bis told (?!to\b)|\bare told (?!to\b|apart\b)|what is told": "reports, receives",
    r"looks? that\b|sees that\b": "checks that",
    r"\bwho does what\b": "who waits for whom",
}


@cache
def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```[ \t]*$", "", text(page), flags=re.M | re.S)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page that are marked with this language."""
    return re.findall(rf"^```{re.escape(language)}[ \t]*\n(.*?)^```[ \t]*$", text(page), flags=re.M | re.S)


@cache
def anchors(page: str) -> frozenset[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), flags=re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain)


def links(page: str) -> Iterator[str]:
    """The targets of a page's links and pictures, but for addresses on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    yield from (target for target in targets if "://" not in target)


def listed_modules() -> list[str]:
    """The paths in the lists of docs/architecture.md."""
    return re.findall(r"^- `([\w/]+\.py)` — \S", text("docs/architecture.md"), flags=re.M)


@cache
def commands() -> dict[str, set[str]]:
    """Every command of `malmen`, with the subcommands of those that have some."""
    project = tomllib.loads(text("pyproject.toml"))["project"]
    groups: dict[str, Any] = dict(getattr(get_command(app), "commands", {}))
    for name, place in project["entry-points"]["malmen.commands"].items():
        module, _, attribute = place.partition(":")
        groups[name] = get_command(getattr(import_module(module), attribute))
    return {name: set(getattr(group, "commands", ())) for name, group in groups.items()}


def test_the_readme_is_one_page() -> None:
    assert len(text("README.md").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: str) -> None:
    broken = []
    for target in links(page):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists():
            broken.append(f"{target}: file not found")
        elif anchor and anchor not in anchors(path.resolve().relative_to(ROOT).as_posix()):
            broken.append(f"{target}: heading not found")
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = {(ROOT / "docs" / target).resolve() for target in links("docs/README.md")}
    missing = [page for page in PAGES if page.startswith("docs/") and (ROOT / page).resolve() not in index]
    assert missing == ["docs/README.md"]


def test_every_picture_is_on_a_page() -> None:
    used = {((ROOT / page).parent / target).resolve() for page in PAGES for target in links(page)}
    assert [path.name for path in sorted((ROOT / "docs").glob("*.png")) if path not in used] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    """`tests/x.py`, `malmen/lm/` or `docs/x.md`; NAME.py is a pattern and not a path."""
    tops = (*ROOMS, "tests", "benchmarks", "docs", r"\.ci")
    named = re.findall(rf"(?<![\w/.-])((?:{'|'.join(tops)})/[\w./-]*[\w/])(?![\w*…/])", text(page))
    missing = [name for name in named if "NAME" not in name and not (ROOT / name).exists()]
    assert set(missing) <= {"platform/__init__.py"}  # named because it must not exist


@cache
def is_defined(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name that a module defines at its top or loads on use."""
    parts = dotted.split(".")[1:]
    folder = ROOT if parts and parts[0] in ROOMS else ROOT / "malmen"
    if (folder / Path(*parts)).is_dir() or (folder / Path(*parts)).with_suffix(".py").exists():
        return True
    parent = folder / Path(*parts[:-1])
    file = parent.with_suffix(".py") if parent.with_suffix(".py").exists() else parent / "__init__.py"
    if not file.exists():
        return False
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {getattr(node, "name", None) for node in tree.body}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "__getattr__" in names:  # loaded on use, by a name in a string
        names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return parts[-1] in names


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_a_page_names_exists(page: str) -> None:
    """Dotted names such as malmen.platform.train or malmen.data.check.check_file."""
    named = set(re.findall(r"\bmalmen(?:\.[a-z]\w*)+(?:\.[A-Za-z]\w*)?\b", text(page)))
    placeholders = {"malmen.commands", "malmen.platform.x", "malmen.tune.x", "malmen.serve.x"}
    assert [name for name in sorted(named - placeholders) if not is_defined(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_is_python_and_imports_what_exists(page: str) -> None:
    missing = []
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "malmen":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                missing += [name for name in names if not is_defined(name)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_exists(page: str) -> None:
    unknown = []
    fenced = re.findall(r"^```\w*[^\n]*\n(.*?)^```", text(page), flags=re.M | re.S)
    code = "\n".join([*re.findall(r"`([^`]+)`", prose(page)), *fenced]).replace("from malmen import", "")
    for name, sub in re.findall(r"(?<![\w/.-])malmen ([a-z]+)(?: ([a-z]+)(?![\w=./-]))?", code):
        group = commands().get(name)
        # `malmen sweep builtin` and `malmen serve` run by default: their first word need not be a subcommand.
        if group is None or (sub and group and "run" not in group and sub not in group):
            unknown.append(f"malmen {name} {sub}".strip())
    assert unknown == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_that_a_page_names_exists(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), flags=re.M))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text(page), flags=re.M))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    """`section.key`, where the section is one of a run's config or of the endpoint's."""
    known = {row["key"] for model in (Config, ServeConfig) for row in describe_settings(model)}
    sections = "|".join(sorted({key.split(".")[0] for key in known if "." in key}))
    named = set(re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z_]+(?:\.[a-z_]+)?)\b(?![(/])", text(page)))
    files = {
        name for name in named if name.endswith((".py", ".json", ".jsonl", ".md", ".png", ".safetensors", ".yaml"))
    }
    resources = {name for name in named if re.match(r"cluster\.(lm|hypernet)_resources\.", name)}  # of any name
    assert sorted(named - known - files - resources) == []


def test_the_modules_of_the_architecture_page_are_those_of_the_tree() -> None:
    tree = sorted(path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    assert sorted(listed_modules()) == tree


@pytest.mark.parametrize("page", PAGES)
def test_every_function_that_a_page_names_by_its_file_exists(page: str) -> None:
    """`path.py::function` and `path.py::Class.method`."""
    missing = []
    for path, name in re.findall(r"`([\w/]+\.py)::([\w.]+)`", text(page)):
        body: list[ast.stmt] = ast.parse(text(path)).body
        for part in name.split("."):
            named = [node for node in body if getattr(node, "name", None) == part]
            if not named:
                missing.append(f"{path}::{name}")
                break
            body = getattr(named[0], "body", [])
    assert missing == []


def test_blocks_that_ci_runs_stand_on_the_pages_that_ci_reads() -> None:
    marked = {page for page in PAGES if blocks(page, "bash ci")}
    assert marked == set(RUN_BY_CI)
    pages = re.search(r"pages=\((.*?)\)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert pages and tuple(pages[1].split()) == RUN_BY_CI


@pytest.mark.parametrize("page", RUN_BY_CI)
def test_blocks_that_ci_runs_are_bash(page: str) -> None:
    for block in blocks(page, "bash ci"):
        checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=30)
        assert checked.returncode == 0, checked.stderr


def test_what_ci_looks_at_afterwards_is_written_by_those_blocks() -> None:
    run = "\n".join(block for page in RUN_BY_CI for block in blocks(page, "bash ci"))
    for name in ("runs/job", "runs/made.json", "runs/asked-edited.txt", "runs/asked-removed.txt"):
        assert name in run


@pytest.mark.parametrize("page", PAGES)
def test_the_words_are_those_of_the_reader(page: str) -> None:
    lines = prose(page).splitlines()
    said = [
        f"{line.strip()!r}: write {instead!r}"
        for line in lines
        for phrase, instead in BANNED.items()
        if re.search(phrase, line, flags=re.I)
    ]
    assert said == []
