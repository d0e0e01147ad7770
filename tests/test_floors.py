"""The floor plan, held by reading the source: who imports whom, and which words are spelt where.

Each rule is a function from one parsed module to its violations. It runs over every module there is, and over a
planted violation that it has to catch.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
# Lowest floor first. A module imports from its own floor and those below.
FLOORS = [
    {"sharding_rules"},
    {"version", "processes", "strict_json", "hf_config", "config", "tables", "ops", "kernels"},
    {"layers"},
    {"model", "state", "placement"},
    {"checkpoints", "sampling", "tokenizer", "initialise"},
    {"steps", "compiled"},
    {"runtime", "loading", "convert"},
    {"generation", "planning"},
    {"comparing", "measuring", "drawing", "testing"},
    {"commands", "__main__", "__init__"},
]
MESH_WORDS = {"PartitionSpec", "NamedSharding", "Mesh", "AbstractMesh", "make_mesh"}
MESH_AXES = {"tp", "cp"}
HUB_WORDS = ("model.layers", "self_attn", "block_sparse_moe")
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}
FUNCTION_LINES, FILE_LINES = 75, 320


class Module(NamedTuple):
    """One source file: its dotted name, and its text."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    @property
    def part(self) -> str:
        """What FLOORS calls it: the package sharding_rules, or the first name inside kimi_jax."""
        return self.package if self.package == "sharding_rules" else [*self.name.split("."), "__init__"][1]


def modules() -> list[Module]:
    found = []
    for file in sorted([*ROOT.glob("sharding_rules/**/*.py"), *ROOT.glob("kimi_jax/**/*.py")]):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), file.read_text()))
    return found


MODULES = modules()
KNOWN = {module.name for module in MODULES}


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module imports, at its top or inside a function."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = any(name.startswith(module.name + ".") for name in KNOWN) or "." not in module.name
                up = module.name.split(".")[: None if is_package else -1]
                base = ".".join([*up[: len(up) - node.level + 1], *base.split(".")]).strip(".")
            for name in node.names:
                inside = f"{base}.{name.name}"
                yield node.lineno, inside if inside in KNOWN or base == "kimi_jax" else base


def words(module: Module) -> Iterator[tuple[int, str]]:
    """(line, identifier) of every name, attribute and imported name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name.name.split(".")[-1]) for name in node.names)


def strings(module: Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is not a docstring, the pieces of f-strings included."""
    tree = module.tree
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def floor(part: str) -> int | None:
    return next((i for i, parts in enumerate(FLOORS) if part in parts), None)


def part_of(imported: str) -> str | None:
    """The part of FLOORS that an imported name belongs to; None for other packages. What `kimi_jax` itself re-exports
    belongs to its __init__, on the top floor."""
    package, _, rest = imported.partition(".")
    if package != "kimi_jax":
        return package if package == "sharding_rules" else None
    part = rest.partition(".")[0]
    is_module = floor(part) is not None or any(name == f"kimi_jax.{part}" for name in KNOWN)
    return part if part and is_module else "__init__"


# --------------------------------------------------------------------------------------------------------------- rules
def imports_only_what_is_below(module: Module) -> list[str]:
    mine = floor(module.part)
    if mine is None:
        return [f"{module.part} has no floor: add it to FLOORS"]
    found = []
    for line, imported in imports(module):
        part = part_of(imported)
        if part is not None and (floor(part) is None or floor(part) > mine):
            found.append(f"line {line}: {module.part} imports {imported}, which is above it")
    return found


def sharding_rules_needs_jax_alone(module: Module) -> list[str]:
    if module.package != "sharding_rules":
        return []
    allowed = {"jax", "jaxtyping", "sharding_rules", *sys.stdlib_module_names}
    return [f"line {line}: imports {name}" for line, name in imports(module) if name.split(".")[0] not in allowed]


def ops_know_no_config(module: Module) -> list[str]:
    if module.part not in ("ops", "kernels"):
        return []
    return [f"line {n}: imports {name}" for n, name in imports(module) if part_of(name) in ("config", "hf_config")]


def kimi_jax_spells_no_mesh(module: Module) -> list[str]:
    if module.package != "kimi_jax":
        return []
    found = [f"line {line}: {word}" for line, word in words(module) if word in MESH_WORDS]
    if module.part not in ("commands", "__main__"):  # its options are called --tp and --cp
        found += [f"line {line}: {text!r}" for line, text in strings(module) if text in MESH_AXES]
    return found


def jit_lives_in_compiled(module: Module) -> list[str]:
    if module.name == "kimi_jax.compiled":
        return []
    return [f"line {line}: {word}" for line, word in words(module) if word in ("jit", "pjit", "pmap")]


def no_environment_variables(module: Module) -> list[str]:
    return [f"line {line}: {word}" for line, word in words(module) if word in ENVIRONMENT]


def hub_names_live_in_one_table(module: Module) -> list[str]:
    if module.name == "kimi_jax.checkpoints.names":
        return []
    return [f"line {n}: {text!r}" for n, text in strings(module) if any(word in text for word in HUB_WORDS)]


def public_functions_have_docstrings(module: Module) -> list[str]:
    """Functions of a module and methods of its public classes; not what is defined inside a function."""
    found = [] if ast.get_docstring(module.tree) or not module.text.strip() else ["the module itself"]
    scopes = [module.tree.body]
    for body in scopes:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                if not ast.get_docstring(node):
                    found.append(f"line {node.lineno}: {node.name}")
                if isinstance(node, ast.ClassDef):
                    scopes.append(node.body)
    return found


def files_and_functions_are_small(module: Module) -> list[str]:
    lines = len(module.text.splitlines())
    found = [f"{lines} lines"] if lines >= FILE_LINES else []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size >= FUNCTION_LINES:
                found.append(f"line {node.lineno}: {node.name}, {size} lines")
    return found


RULES = [
    imports_only_what_is_below,
    sharding_rules_needs_jax_alone,
    ops_know_no_config,
    kimi_jax_spells_no_mesh,
    jit_lives_in_compiled,
    no_environment_variables,
    hub_names_live_in_one_table,
    public_functions_have_docstrings,
    files_and_functions_are_small,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule):
    broken = [f"{module.name}: {said}" for module in MODULES for said in rule(module)]
    assert not broken, "\n" + "\n".join(broken)


LONG = "def f():\n    '''doc'''\n" + "    x = 1\n" * 74


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (imports_only_what_is_below, "kimi_jax.ops.norm", "from kimi_jax.layers import mla"),
        (imports_only_what_is_below, "kimi_jax.ops.norm", "def f():\n    import kimi_jax.state"),
        (imports_only_what_is_below, "kimi_jax.config", "from kimi_jax import load"),
        (imports_only_what_is_below, "kimi_jax.config", "import kimi_jax"),
        (imports_only_what_is_below, "kimi_jax.config", "from . import model"),
        (imports_only_what_is_below, "kimi_jax.layers.mla", "from ..runtime import Model"),
        (imports_only_what_is_below, "kimi_jax.sampling", "from .generation.generate import stream"),
        (imports_only_what_is_below, "kimi_jax.comparing.parity", "import kimi_jax.__main__"),
        (imports_only_what_is_below, "sharding_rules.layout", "from kimi_jax.ops import norm"),
        (imports_only_what_is_below, "kimi_jax.helpers", "x = 1"),
        (sharding_rules_needs_jax_alone, "sharding_rules.helix", "from flax import nnx"),
        (sharding_rules_needs_jax_alone, "sharding_rules.helix", "import numpy as np"),
        (sharding_rules_needs_jax_alone, "sharding_rules.helix", "import kimi_jax.config"),
        (ops_know_no_config, "kimi_jax.ops.norm", "from kimi_jax.config import Config"),
        (ops_know_no_config, "kimi_jax.kernels.mla", "from kimi_jax import config"),
        (kimi_jax_spells_no_mesh, "kimi_jax.model", "from jax.sharding import PartitionSpec as P"),
        (kimi_jax_spells_no_mesh, "kimi_jax.state", "import jax\njax.sharding.NamedSharding(mesh, spec)"),
        (kimi_jax_spells_no_mesh, "kimi_jax.runtime", "mesh = jax.make_mesh((1, 1), names)"),
        (kimi_jax_spells_no_mesh, "kimi_jax.__main__", "def f(mesh: jax.sharding.Mesh): ..."),
        (kimi_jax_spells_no_mesh, "kimi_jax.ops.helix", "jax.lax.psum(x, 'cp')"),
        (kimi_jax_spells_no_mesh, "kimi_jax.planning.plan", "size = mesh.shape['tp']"),
        (jit_lives_in_compiled, "kimi_jax.generation.generate", "import jax\nstep = jax.jit(f)"),
        (jit_lives_in_compiled, "kimi_jax.layers.kda", "from flax import nnx\n@nnx.jit\ndef f(): ..."),
        (jit_lives_in_compiled, "sharding_rules.layout", "from jax import jit"),
        (jit_lives_in_compiled, "kimi_jax.runtime", "import jax\nstep = jax.jit(f)"),
        (no_environment_variables, "kimi_jax.testing", "import os\nos.environ['XLA_FLAGS'] = ''"),
        (no_environment_variables, "sharding_rules.mesh", "from os import getenv"),
        (hub_names_live_in_one_table, "kimi_jax.runtime", "name = f'model.layers.{i}.norm'"),
        (hub_names_live_in_one_table, "kimi_jax.checkpoints.hub_read", "if 'self_attn' in name: ..."),
        (hub_names_live_in_one_table, "kimi_jax.layers.moe", "x = 'block_sparse_moe.gate'"),
        (public_functions_have_docstrings, "kimi_jax.runtime", "'''doc'''\ndef load(): ..."),
        (public_functions_have_docstrings, "kimi_jax.runtime", "'doc'\nclass Model:\n  'doc'\n  def f(self): ..."),
        (public_functions_have_docstrings, "kimi_jax.runtime", "x = 1"),
        (files_and_functions_are_small, "kimi_jax.runtime", "x = 1\n" * 320),
        (files_and_functions_are_small, "kimi_jax.runtime", LONG),
    ],
)  # fmt: skip
def test_a_planted_violation_is_caught(rule, name, text):
    assert rule(Module(name, text))


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (imports_only_what_is_below, "kimi_jax.layers.mla", "from kimi_jax.ops import norm\nfrom .named import f"),
        (imports_only_what_is_below, "kimi_jax.sampling", "from kimi_jax import config\nfrom . import state"),
        (imports_only_what_is_below, "kimi_jax", "from kimi_jax.runtime import load\nfrom .testing import *"),
        (imports_only_what_is_below, "kimi_jax.model", "from sharding_rules.axes import EMBED"),
        (sharding_rules_needs_jax_alone, "sharding_rules.helix", "import math, jax\nfrom jaxtyping import Int"),
        (kimi_jax_spells_no_mesh, "kimi_jax.model", "'''Not a PartitionSpec, nor a Mesh.'''\nx = 'tps'"),
        (kimi_jax_spells_no_mesh, "kimi_jax.__main__", "add_argument('--tp', dest='tp')"),
        (jit_lives_in_compiled, "kimi_jax.compiled", "import jax\nstep = jax.jit(f)"),
        (no_environment_variables, "kimi_jax.runtime", "import os\nos.path.join('a', 'b')"),
        (hub_names_live_in_one_table, "kimi_jax.runtime", "'''reads model.layers.0'''"),
        (public_functions_have_docstrings, "kimi_jax.runtime", "'doc'\ndef _f(): ...\nclass _A:\n  def f(self): ..."),
        (files_and_functions_are_small, "kimi_jax.runtime", LONG.replace("    x = 1\n", "", 2)),
    ],
)  # fmt: skip
def test_what_is_allowed_passes(rule, name, text):
    assert not rule(Module(name, text))


def test_the_packages_are_read():
    assert {"sharding_rules.axes", "kimi_jax.ops.norm", "kimi_jax.sampling"} <= KNOWN
