"""The build backend of pyproject.toml: scikit-build-core's, whose wheel gets the tag that its binaries allow."""

import subprocess
import sys
from pathlib import Path

from manylinux import platform
from scikit_build_core import build as core
from scikit_build_core.build import (build_editable, build_sdist, get_requires_for_build_editable,  # noqa: F401
                                     get_requires_for_build_sdist, get_requires_for_build_wheel)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = core.build_wheel(wheel_directory, config_settings, metadata_directory)
    if "-linux_" not in name:
        return name
    tag, why = platform(Path(wheel_directory) / name)
    if not tag:
        print(f"rlk: the wheel serves this machine only: {why}", file=sys.stderr)
        return name
    done = subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, name], check=True,
                          capture_output=True, text=True, cwd=wheel_directory)
    return done.stdout.split()[-1]
