"""Imports point down only, importing is cheap, and changes nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import oqc

SOURCE = Path(oqc.__file__).parent
# What each part may import of ours; a part may always import itself.
ALLOWED = {
    "config": set(),
    "files": set(),
    "seeding": set(),
    "ops": {"config"},
    "nn": {"config", "ops"},
    "models": {"config", "seeding", "nn", "ops"},
    "data": {"config", "files", "seeding"},
    "train": {"config", "files", "seeding", "data", "ops"},
    "integrations": {"config", "files", "seeding", "models", "nn", "ops"},
    "analysis": {"config", "data", "nn", "train"},
    "report": {"config", "files"},
    "experiments": {"config", "files", "analysis", "data", "models", "nn", "report", "train"},
    "cli": None,  # anything
    "__main__": {"cli"},
    "__init__": {"config", "models", "nn", "integrations"},
}
OPTIONAL = {
    "triton", "timm", "transformers", "huggingface_hub", "torchvision", "matplotlib", "scipy", "sklearn", "jinja2",
    "onnx", "onnxscript", "onnxruntime", "tensorboard",
}  # fmt: skip


def files():
    return sorted(SOURCE.rglob("*.py"))


def part_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(tree, package):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {package}"
            yield node.module
            if node.module == "oqc":
                yield from (f"oqc.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path):
    part = part_of(path)
    assert part in ALLOWED, f"say in this test what {part} may import"
    allowed = ALLOWED[part]
    if allowed is None:
        return
    for name in imports(ast.parse(path.read_text()), part):
        if name.startswith("oqc."):
            target = name.split(".")[1]
            if (SOURCE / target).is_dir() or (SOURCE / f"{target}.py").exists():
                assert target == part or target in allowed, f"{path.relative_to(SOURCE)} imports {name}"


def test_no_file_but_kernels_is_over_400_lines():
    long = {p.name: n for p in files() if (n := len(p.read_text().splitlines())) > 400 and "triton" not in p.name}
    assert not long


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_pulls_in_nothing_optional():
    loaded = run("import sys; import torch; before = set(sys.modules); import oqc; print(*(set(sys.modules) - before))")
    assert OPTIONAL.isdisjoint({name.split(".")[0] for name in loaded})


def test_importing_changes_no_global_state():
    assert run(
        "import torch, random, warnings, logging\n"
        "def state():\n"
        "    return [torch.get_rng_state().sum().item(), random.getstate(), torch.get_default_dtype(),"
        " torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(),"
        " torch.backends.cuda.cudnn_sdp_enabled(), len(warnings.filters), logging.root.level,"
        " torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()]\n"
        "before = state(); import oqc; print(before == state())"
    ) == ["True"]


def test_importing_takes_about_torchs_own_time():
    """Both in one process, so that a busy machine slows both; the quietest of three counts."""
    clock = (
        "from time import perf_counter as now; a = now(); import torch; b = now(); import oqc; print(b - a, now() - b)"
    )
    torch_s, more_s = min((tuple(map(float, run(clock))) for _ in range(3)), key=lambda pair: pair[1])
    assert more_s < 0.25 * torch_s + 0.3
