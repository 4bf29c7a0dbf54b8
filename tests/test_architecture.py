"""The house rules that no linter knows: sizes, names, directions of import, and what importing the library may not do.

These tests read the source tree; they know nothing of what the code computes.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = "spd_jax"
SCRIPTS = ("train", "infer")
SHIPPED = (LIBRARY, *SCRIPTS, "benchmarks")

MAX_FILE_LINES = 350
MAX_SCRIPT_LINES = 60
MAX_FUNCTION_LINES = 80


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def place(path: Path, line: int | None = None) -> str:
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line else "")


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names of everything a tree imports, with their lines; relative imports stay inside the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno


def module_level(tree: ast.Module) -> ast.Module:
    """The tree without the bodies of functions: what runs when the module is imported."""

    class DropFunctions(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

    return DropFunctions().visit(tree)


def library_modules() -> list[str]:
    names = [path.relative_to(ROOT).with_suffix("").parts for path in sources(LIBRARY)]
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]


def run_python(code: str) -> None:
    """Run code in an interpreter that knows nothing of this one's JAX."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_there_is_a_library_to_look_at():
    assert sources(LIBRARY), f"no source found under {ROOT / LIBRARY}: the tests below would pass on nothing"


def test_files_fit_in_a_head():
    too_long = [
        (place(path), len(lines_of(path))) for path in sources(*SHIPPED) if len(lines_of(path)) > MAX_FILE_LINES
    ]
    assert not too_long, f"over {MAX_FILE_LINES} lines: {too_long}"


def test_scripts_only_parse_and_call():
    too_long = [
        (place(path), len(lines_of(path))) for path in sources(*SCRIPTS) if len(lines_of(path)) > MAX_SCRIPT_LINES
    ]
    assert not too_long, f"scripts over {MAX_SCRIPT_LINES} lines (move the work into {LIBRARY}): {too_long}"


def test_functions_fit_on_a_screen():
    too_long = []
    for path in sources(*SHIPPED):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append((place(path, node.lineno), node.name, length))
    assert not too_long, f"functions over {MAX_FUNCTION_LINES} lines: {too_long}"


def test_no_module_is_called_after_nothing():
    vague = re.compile(r"(^|_)(utils?|helpers?|misc|common)$|_?v\d+$|_(old|new)$")
    found = [
        place(path)
        for path in sources(*SHIPPED, "tests")
        if any(vague.search(part) for part in path.relative_to(ROOT).with_suffix("").parts)
    ]
    assert not found, f"name these modules by what they hold: {found}"


def test_every_module_says_what_it_is():
    silent = [place(path) for path in sources(*SHIPPED, "tests") if not ast.get_docstring(parse(path))]
    assert not silent, f"no module docstring: {silent}"


def test_what_hangs_on_jaxs_settings_is_made_in_one_place():
    """Keys and draws of the process's generator, and programs of the process's precision and types."""
    drawn = re.compile(r"jax\.random\.(key|PRNGKey|bits|uniform|gumbel|categorical|choice|split|permutation)\b")
    found = []
    for path in sources(*SHIPPED):
        if path == ROOT / LIBRARY / "defaults.py":
            continue
        for number, line in enumerate(lines_of(path), start=1):
            named = "impl=" in line
            compiled = path.is_relative_to(ROOT / LIBRARY) and re.search(r"(?<![`\w])(jax|nnx)\.jit\b", line)
            if compiled or (drawn.search(line) and not named):
                found.append(place(path, number))
    assert not found, f"use key, uniform, gumbel and jit of {LIBRARY}/defaults.py: {found}"


def test_the_library_does_not_print():
    found = [
        place(path, node.lineno)
        for path in sources(LIBRARY)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found, f"return the value, or let a script print it: {found}"


def test_nothing_is_left_undone():
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
    found = [
        place(path, number)
        for path in sources(*SHIPPED)
        for number, line in enumerate(lines_of(path), start=1)
        if unfinished.search(line)
    ]
    assert not found, f"finish it or leave it out: {found}"


def test_layers_import_downwards_only():
    linter = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_library_knows_no_script_and_no_test():
    outside = {*SCRIPTS, "benchmarks", "tests", "docs"}
    found = [
        place(path, line)
        for path in sources(LIBRARY)
        for name, line in imported_modules(parse(path))
        if name.split(".")[0] in outside
    ]
    assert not found, f"{LIBRARY} must not import from {sorted(outside)}: {found}"


def test_torch_is_never_imported_on_import():
    found = [
        place(path, line)
        for path in sources(*SHIPPED)
        for name, line in imported_modules(module_level(parse(path)))
        if name.split(".")[0] == "torch"
    ]
    assert not found, f"import torch inside the one function that reads .pt files: {found}"


def test_no_program_waits_for_the_threads_that_run_its_devices():
    """jaxlib's LAPACK calls hand their batch to the pool of threads that runs simulated devices, and wait for it: with
    as many devices as ranks, whose others wait in a collective, nobody is left to do that work."""
    found = [
        place(path, node.lineno)
        for path in sources(LIBRARY)
        for node in ast.walk(parse(path))
        if (isinstance(node, ast.ImportFrom) and "linalg" in f"{node.module} {[name.name for name in node.names]}")
        or (isinstance(node, ast.Attribute) and node.attr == "linalg" and ast.unparse(node.value) != "np")
    ]
    assert not found, f"write it as products, or with np outside of programs: {found}"


def test_importing_the_library_makes_no_device_and_needs_no_torch():
    # sys.modules[name] = None makes `import name` fail, and makes libraries that look for torch believe it is absent.
    run_python(
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        f"for name in {library_modules()!r}: importlib.import_module(name)\n"
        "import jax._src.xla_bridge as bridge\n"
        "assert not bridge.backends_are_initialized(), 'importing the library touched a device'\n"
    )


def test_readme_opens_with_the_two_commands():
    opening = (ROOT / "README.md").read_text()[:1500]
    assert "make demo" in opening
    assert "make test" in opening


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=place)
def test_documents_name_only_what_exists(document: Path):
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    unknown_targets = set(re.findall(r"(?:^|`|\$ )make ([a-z][a-z-]*)", text, flags=re.MULTILINE)) - targets
    assert not unknown_targets, f"{place(document)} names make targets that the Makefile lacks: {unknown_targets}"
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    broken = [link for link in links if link and not (document.parent / link).exists()]
    assert not broken, f"{place(document)} links to missing files: {broken}"
