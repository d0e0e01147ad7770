"""The notebooks: each runs from a fresh kernel without a warning, is kept without outputs, and uses public names alone.

Whether what a notebook says is true, its own last cell asserts.
"""

import ast
import importlib
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.test_floors import FLOORS

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Submodules that a notebook may show from the inside, besides what the packages export.
DOCUMENTED = ("kimi_jax.ops.", "kimi_jax.layers.chunk", "kimi_jax.planning.compile_check")
SECONDS = 300  # for one cell; far more than any takes

each_notebook = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def read(file: Path) -> nbformat.NotebookNode:
    return nbformat.read(file, as_version=4)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_seven():
    assert [file.name[0] for file in FILES] == list("1234567")


@each_notebook
def test_it_runs_from_a_fresh_kernel(file, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{ROOT}/.jax_cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    notebook = read(file)
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()

    said = [(i, output) for i, cell in enumerate(notebook.cells) for output in cell.get("outputs", [])]
    assert not [output.text for _, output in said if output.get("name") == "stderr"]
    figures = [i for i, output in said if "image/png" in output.get("data", {})]
    assert figures
    unsaid = [notebook.cells[i].source for i in figures if "**See:**" not in notebook.cells[i - 1].source]
    assert not unsaid, "a figure without a sentence that says what to see"


@each_notebook
def test_it_is_kept_without_outputs(file):
    assert all(not cell.outputs and cell.execution_count is None for cell in code(read(file)))


@each_notebook
def test_it_ends_with_an_assertion_about_its_claim(file):
    notebook = read(file)
    *_, claim, last = notebook.cells
    assert claim.source.startswith("## The claim")
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(last.source)))


def test_the_readme_shows_pictures_that_are_up_to_date(tmp_path):
    """By their words: the rest of an SVG differs from one version of matplotlib to the next."""
    runpy.run_path(str(ROOT / "notebooks" / "pictures.py"))["save_all"](FLOORS, tmp_path)
    for name in ("floors.svg", "helix-step.svg", "scaling.svg"):
        kept, made = ((folder / name).read_text() for folder in (ROOT / "notebooks" / "pictures", tmp_path))
        words = [re.findall(r">([^<>]*\w[^<>]*)</text>", svg) for svg in (kept, made)]
        assert len(words[0]) > 10 and words[0] == words[1], "run python notebooks/pictures.py"
        assert f"(notebooks/pictures/{name})" in (ROOT / "README.md").read_text()


def private(source: str) -> Iterator[str]:
    """What a notebook takes from the two packages that they do not offer."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("kimi_jax", "sharding_rules"):
            for name in node.names:
                inside = f"{node.module}.{name.name}"
                exported = getattr(importlib.import_module(node.module), "__all__", ())
                if name.name not in exported and not inside.startswith(DOCUMENTED):
                    yield inside
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith(("kimi_jax.", "sharding_rules.")))
        elif isinstance(node, ast.Attribute):
            package = node.value.id if isinstance(node.value, ast.Name) else ""
            if package in ("kimi_jax", "sharding_rules"):
                if node.attr not in importlib.import_module(package).__all__:
                    yield f"{package}.{node.attr}"
            elif node.attr.startswith("_"):
                yield node.attr


@each_notebook
def test_it_uses_public_names_alone(file):
    assert not [name for cell in code(read(file)) for name in private(cell.source)]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from kimi_jax.compiled import born", ["kimi_jax.compiled.born"]),
        ("from kimi_jax import steps", ["kimi_jax.steps"]),
        ("import kimi_jax.layers.mla", ["kimi_jax.layers.mla"]),
        ("kimi_jax.loading.load()", ["kimi_jax.loading"]),
        ("sharding_rules.mesh.TP", ["sharding_rules.mesh"]),
        ("model._extend(x)", ["_extend"]),
        (
            "import kimi_jax\nfrom kimi_jax.ops import helix\nkimi_jax.load().params\nfrom sharding_rules import axes",
            [],
        ),
    ],
)
def test_private_names_are_found(source, found):
    assert list(private(source)) == found
