"""The laws of the house that no single module can keep: who may know whom, and what must never exist."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("malmen", "platform", "tune", "serve")
HEAVY = ("ray", "deepspeed", "mlflow", "fastapi")

MAY_NOT_KNOW = {  # room: what its modules may not import.  tune, serve → platform → malmen → torch
    "malmen": (*HEAVY, "malmen.platform", "malmen.tune", "malmen.serve"),
    "platform": ("malmen.tune", "malmen.serve"),
    "tune": ("malmen.serve",),
    "serve": ("malmen.tune",),
}


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def package_of(path: Path) -> str:
    """The dotted package that a file of one of the rooms is in: platform/cli/main.py is in malmen.platform."""
    folder = path.relative_to(ROOT).parent.parts
    return ".".join(folder if folder[0] == "malmen" else ("malmen", *folder))


def imports(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, anywhere in it; `from a import b` gives a.b, for b may be a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                parents = package_of(path).split(".")
                base = parents[: len(parents) - node.level + 1] + base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def run_python(code: str, cwd: Path) -> str:
    """The output of `code` in a fresh interpreter; `-c` puts `cwd` first on its path."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_platform_has_no_init_file_because_it_would_shadow_the_standard_library() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_no_folder_of_tests_has_an_init_file() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_the_standard_librarys_platform_is_found_from_the_root() -> None:
    assert run_python("import platform; print(platform.system())", cwd=ROOT)


@pytest.mark.slow  # a fresh interpreter imports torch and transformers
def test_importing_every_module_of_malmen_loads_no_ray_deepspeed_mlflow_or_fastapi(tmp_path: Path) -> None:
    """`import malmen` alone loads next to nothing, so every module is named; each heavy one found says by whom."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules("malmen")]
    names = [name.removesuffix(".__init__") for name in names]
    assert {"malmen", "malmen.data.tokens", "malmen.training"} <= set(names)
    code = f"""
import importlib, sys
seen = set()
for name in {names!r}:
    importlib.import_module(name)
    heavy = {{other.split(".")[0] for other in sys.modules}} & set({HEAVY!r}) - seen
    seen |= heavy
    if heavy:
        print(name, "loads", *sorted(heavy))
print("imported", sum(name == "malmen" or name.startswith("malmen.") for name in sys.modules))
"""
    *heavy, last = run_python(code, cwd=tmp_path).splitlines()
    assert heavy == []
    assert last == f"imported {len(names)}"


def test_what_the_ingress_imports_loads_no_torch_so_it_is_small_and_soon_back() -> None:
    code = "import sys, malmen.serve.app as app; app.make_app(None); print('torch' in sys.modules)"
    assert run_python(code, cwd=ROOT).strip() == "False"


def test_malmen_and_its_rooms_are_found_from_anywhere(tmp_path: Path) -> None:
    code = "import malmen.platform, malmen.tune, malmen.serve; print(malmen.__version__)"
    assert run_python(code, cwd=tmp_path) == run_python(code, cwd=ROOT) != ""


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_what_it_may_not_know(room: str) -> None:
    broken = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(room)
        for name in imports(path)
        if any(is_within(name, banned) for banned in MAY_NOT_KNOW[room])
    ]
    assert not broken, "\n".join(broken)


def test_no_room_is_imported_by_its_short_name() -> None:
    """`import tune` works at the root, and is a second copy of the module: its classes are not malmen.tune's."""
    stems = {path.stem for path in modules("platform")} | {path.name for path in (ROOT / "platform").iterdir()}
    ours = {f"platform.{stem}" for stem in stems}  # `from platform import system` is the standard library's
    broken = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(*ROOMS, "tests", "benchmarks")
        for name in imports(path)
        if any(is_within(name, short) for short in ("tune", "serve", *ours))
    ]
    assert not broken, "\n".join(broken)


def test_every_folder_of_modules_is_in_the_package_map() -> None:
    """A folder that is forgotten works in the checkout and is missing from the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {package_of(path): path.parent.relative_to(ROOT).as_posix() for path in modules(*ROOMS)}
    assert folders.items() <= project["package-dir"].items()
    assert sorted(project["packages"]) == sorted(project["package-dir"])


def test_no_file_in_git_is_over_ten_megabytes() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("an unpacked archive has no list of what is in git; a checkout, as CI has, does")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert [path.name for path in paths if path.is_file() and path.stat().st_size > 10_000_000] == []
