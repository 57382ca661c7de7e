"""Who may import whom, and that the files which travel with the weights load anywhere."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_imports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "modeling_kda"
# floor of each file; a file imports from lower floors only. Kernels of any name start with triton_
FLOORS = {
    "stages": 0,
    "delta_rule": 0,
    "layers": 0,
    "tracing": 0,
    "config_checks": 1,
    "presets": 1,
    "ops": 1,
    "token_layout": 1,
    "configuration_kda": 2,
    "call_inputs": 2,
    "recurrent_cache": 2,
    "cache_kda": 3,
    "softmax_mixer": 3,
    "recurrent_mixer": 3,
    "moe": 3,
    "attention_residual": 3,
    "latent_mixer": 4,
    "decoder_layer": 5,
    "modeling_kda": 6,
    "__init__": 7,
}
FILES = sorted(PACKAGE.glob("*.py"))
HUB_FILES = [path for path in FILES if path.stem != "__init__"]
CONVERSION = sorted((ROOT / "conversion").glob("*.py"))


def floor(name):
    return 0 if name.startswith("triton_") else FLOORS[name]


def imports(path):
    """(dots, module, names, line, inside a try) of every import of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {id(child) for node in ast.walk(tree) if isinstance(node, ast.Try) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, [alias.name], node.lineno, id(node) in guarded
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [a.name for a in node.names], node.lineno, id(node) in guarded


def test_the_package_is_flat():
    folders = [path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert folders == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_point_down(path):
    assert path.stem.startswith("triton_") or path.stem in FLOORS, f"{path.name} needs a floor in this test"
    for dots, module, _, line, _ in imports(path):
        assert module.split(".")[0] not in ("modeling_kda", "conversion") or dots == 1, f"{path.name}:{line}: {module}"
        if dots:
            below, own = floor(module), floor(path.stem)
            # kernels build on one another; everything else stays above what it uses
            same = path.stem.startswith("triton_") and module.startswith("triton_")
            assert below < own or same, f"{path.name}:{line} imports {module}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_relative_imports_are_one_dot_one_file_a_name(path):
    for dots, module, names, line, _ in imports(path):
        if dots:
            assert dots == 1 and module and "." not in module and names != ["*"], f"{path.name}:{line}"
            assert (PACKAGE / f"{module}.py").is_file(), f"{path.name}:{line}: there is no {module}.py"


@pytest.mark.parametrize("path", HUB_FILES, ids=lambda path: path.stem)
def test_the_hub_scanner_finds_exactly_the_imports(path):
    # transformers scans text, not syntax: a docstring line that looks like an import would count as one
    written = {module for dots, module, *_ in imports(path) if dots}
    assert set(get_relative_imports(str(path))) == written


@pytest.mark.parametrize("path", HUB_FILES, ids=lambda path: path.stem)
def test_checkpoints_ask_for_nothing_but_torch_and_transformers(path):
    needed = {name for name in get_imports(str(path)) if name not in sys.stdlib_module_names}
    assert needed <= {"torch", "transformers", "huggingface_hub"}, needed
    for dots, module, _, line, guarded in imports(path):
        if not dots and module.split(".")[0] == "triton":
            assert guarded, f"{path.name}:{line}: triton only inside try"


@pytest.mark.parametrize("path", FILES + CONVERSION, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_no_einops(path):
    assert not any(module.split(".")[0] == "einops" for _, module, *_ in imports(path))


@pytest.mark.parametrize("path", CONVERSION, ids=lambda path: path.stem)
def test_conversion_depends_on_the_model_and_not_on_examples_or_tests(path):
    for dots, module, _, line, _ in imports(path):
        assert dots <= 1, f"{path.name}:{line}"
        assert module.split(".")[0] not in ("conversion", "examples", "tests"), f"{path.name}:{line}"


def test_conversion_imports_have_no_cycle():
    uses = {p.stem: {m for dots, m, *_ in imports(p) if dots == 1 and m} for p in CONVERSION}
    while uses:
        leaves = {name for name, used in uses.items() if not used & set(uses)}
        assert leaves, f"these import one another: {uses}"
        uses = {name: used for name, used in uses.items() if name not in leaves}


def test_setup_names_the_packages_and_their_files(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", tmp_path / "base"]
    command += ["--build-lib", tmp_path / "lib"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path / "lib").as_posix() for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    expected = {f"modeling_kda/{path.name}" for path in FILES}
    expected |= {
        f"modeling_kda/conversion/{path.name}" for path in (*CONVERSION, *(ROOT / "conversion").glob("*.txt"))
    }
    assert built == expected | {"modeling_kda/model_cards/TEMPLATE.md"}


def test_setup_does_not_search_for_packages():
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert "setup" in called and not any("packages" in name for name in called)
