"""The laws of the house that no single module can keep: who may know whom, how large a room is, what must not exist."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
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


@pytest.mark.slow  # a fresh interpreter imports torch and ray
def test_a_hypernet_actor_loads_no_transformers_so_it_starts_in_a_third_of_the_time() -> None:
    code = "import sys, malmen.platform.hypernet_actor; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run_python(code, cwd=ROOT).strip() == "True False"


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


# --- rooms of a size that a reader can take in --------------------------------------------------------

SMALL = {  # modules under 40 lines, each with the reason why it stands alone
    "malmen/config/section.py": "what the settings of a run and those of rivals, which are part of them, are made of",
    "malmen/lm/losses.py": "the two losses of the paper, for tracing and for the meta loss",
    "malmen/methods/mend.py": "MEND is MALMEN's editor with other settings: these, and its residual",
    "platform/wire.py": "how tensors travel, for both sides of the wire",
    "serve/main.py": "`python -m malmen.serve.main`, where the command is not installed",
}
TESTED_ELSEWHERE = {  # modules without a mirrored test file, each with where its tests are
    "malmen/adam.py": "tests/malmen/test_editor.py",  # its state and schedule belong to the editor's step
    "malmen/config/rivals.py": "tests/malmen/config/test_reading.py",
    "malmen/config/section.py": "tests/malmen/config/test_reading.py",
    "malmen/config/settings.py": "tests/malmen/config/test_reading.py",  # settings as they are read
    "malmen/data/formats.py": "tests/malmen/data/test_readers.py",
    "malmen/data/rows.py": "tests/malmen/data/test_check.py",
    "malmen/edit_method.py": "tests/malmen/methods/test_registry.py",  # every method through one interface
    "malmen/runs/checkpoint_lookup.py": "tests/malmen/runs/test_checkpoint.py",
    "platform/cli/data.py": "tests/platform/cli/test_main.py",  # commands are tested as commands
    "platform/cli/settings.py": "tests/platform/cli/test_main.py",
    "platform/cli/train.py": "tests/platform/cli/test_main.py",
    "platform/hypernet_actor.py": "tests/platform/test_hypernet_group.py",  # an actor works in a group only
    "platform/lm_worker.py": "tests/platform/test_train.py",  # ranks of a real Ray Train run
    "platform/meta_step.py": "tests/platform/test_train.py",
    "platform/plan/advice.py": "tests/platform/plan/test_planner.py",
    "platform/plan/data.py": "tests/platform/plan/test_planner.py",
    "platform/plan/hypernet.py": "tests/platform/plan/test_memory.py",  # predicted against measured
    "platform/plan/lm.py": "tests/platform/plan/test_memory.py",
    "platform/plan/output.py": "tests/platform/plan/test_planner.py",
    "platform/plan/shapes.py": "tests/platform/plan/test_planner.py",
    "platform/tracking/watcher.py": "tests/platform/tracking/test_tracker.py",
    "platform/train_loop.py": "tests/platform/test_train.py",
    "serve/main.py": "tests/serve/test_app.py",  # which starts it
    "tune/follow.py": "tests/tune/test_sweep.py",
    "tune/output.py": "tests/tune/test_cli.py",
}


def product_modules() -> list[Path]:
    return [path for path in modules(*ROOMS) if path.name != "__init__.py"]


def mirrored_test(path: Path) -> Path:
    """tests/platform/plan/test_meter.py for platform/plan/meter.py."""
    relative = path.relative_to(ROOT)
    return ROOT / "tests" / relative.parent / f"test_{relative.name}"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_folder_holds_more_than_15_modules() -> None:
    counts = Counter(name_of(path.parent) for path in product_modules())
    assert {folder: count for folder, count in counts.items() if count > 15} == {}


def test_every_folder_of_modules_says_what_lives_there() -> None:
    folders = {path.parent for path in product_modules()} - {ROOT / "platform"}
    trees = {name_of(folder): ast.parse((folder / "__init__.py").read_text(encoding="utf-8")) for folder in folders}
    docstrings = {folder: ast.get_docstring(tree) for folder, tree in trees.items()}
    assert [folder for folder, text in docstrings.items() if not text or len(text) < 80] == []


def test_no_file_is_over_400_lines_and_no_function_over_60() -> None:
    long = []
    for path in modules(*ROOMS):
        text = path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > 400:
            long.append(f"{name_of(path)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (length := node.end_lineno - node.lineno + 1) > 60:
                    long.append(f"{name_of(path)}: {node.name} has {length} lines")
    assert long == []


def test_a_module_under_40_lines_has_a_reason() -> None:
    small = {name_of(path) for path in product_modules() if len(path.read_text(encoding="utf-8").splitlines()) < 40}
    assert small == set(SMALL)


def test_every_module_has_its_mirrored_test_file_or_names_where_its_tests_are() -> None:
    missing = {name_of(path) for path in product_modules() if not mirrored_test(path).exists()}
    assert missing == set(TESTED_ELSEWHERE)
    assert [file for file in TESTED_ELSEWHERE.values() if not (ROOT / file).exists()] == []


def test_the_architecture_page_lists_exactly_the_modules_of_the_tree() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Every module")[2]
    listed = re.findall(r"^- `([^`]+\.py)` — \S", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(map(name_of, modules(*ROOMS)))


def test_no_file_in_git_is_over_ten_megabytes() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("an unpacked archive has no list of what is in git; a checkout, as CI has, does")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert [path.name for path in paths if path.is_file() and path.stat().st_size > 10_000_000] == []
