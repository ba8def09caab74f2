"""The build backend of pyproject.toml: scikit-build-core's, whose wheel gets the tag that its binaries allow."""

import subprocess
import sys
import zipfile
from pathlib import Path

from manylinux import platform
from scikit_build_core import build as core
from scikit_build_core.build import (build_editable, build_sdist, get_requires_for_build_editable,  # noqa: F401
                                     get_requires_for_build_sdist, get_requires_for_build_wheel)


FEATURES = Path("build/wheel/features.txt")  # what CMake says of every part: built, or left out and why


def left_out(names, features):
    """A line when the files of a wheel have no CUDA plugin; None when they have."""
    if any(name.endswith("/librlk_backend_cuda.so") for name in names):
        return None
    why = next((line.partition("left out")[2].strip(" :") for line in features.splitlines() if line.startswith("CUDA backend:")), "")
    return f"rlk: the wheel has no CUDA plugin and runs on CPUs alone: {why or 'it was not built'}"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = core.build_wheel(wheel_directory, config_settings, metadata_directory)
    with zipfile.ZipFile(Path(wheel_directory) / name) as wheel:
        line = left_out(wheel.namelist(), FEATURES.read_text() if FEATURES.exists() else "")
    if line:
        print(line, file=sys.stderr)
    if "-linux_" not in name:
        return name
    tag, why = platform(Path(wheel_directory) / name)
    if not tag:
        print(f"rlk: the wheel serves this machine only: {why}", file=sys.stderr)
        return name
    done = subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, name], check=True,
                          capture_output=True, text=True, cwd=wheel_directory)
    return done.stdout.split()[-1]
