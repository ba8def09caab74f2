"""Which tag a wheel may carry. tools/wheel builds it; here its binaries are those of the build tree."""

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from rlk import _C

if not sys.platform.startswith("linux") or not shutil.which("readelf"):
    pytest.skip("reads ELF files by readelf", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[2] / "tools/wheel"))

import manylinux  # noqa: E402

MODULE = Path(_C.__file__)
LIBRARY = next((p for p in (MODULE.parents[2] / "lib").glob("librlk_registry.so.?.?")), None)


def wheel_of(folder, *files):
    path = folder / "rlk-0.0-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.write(file, f"rlk/{file.name}")
        archive.writestr("rlk/__init__.py", "")
    return path


@pytest.mark.skipif(not LIBRARY, reason="the package does not lie in a build tree")
def test_a_wheel_is_named_by_the_oldest_glibc_that_runs_it(tmp_path, monkeypatch):
    newest = max(manylinux.needs(file)[1]["GLIBC"] for file in (MODULE, LIBRARY))
    tag, why = manylinux.platform(wheel_of(tmp_path, MODULE, LIBRARY))
    assert why is None and tag.startswith("manylinux_2_") and tag.endswith("_x86_64")
    assert int(tag.split("_")[2]) >= newest[1]
    monkeypatch.setattr(manylinux, "needs", lambda binary: ({"libc.so.6"}, {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 30)}))
    assert manylinux.platform(wheel_of(tmp_path, MODULE))[0] == "manylinux_2_35_x86_64"
    monkeypatch.setattr(manylinux, "needs", lambda binary: ({"libc.so.6"}, {"GLIBC": (2, 38), "GLIBCXX": (3, 4)}))
    assert manylinux.platform(wheel_of(tmp_path, MODULE))[0] == "manylinux_2_38_x86_64"


def test_a_wheel_that_needs_what_it_does_not_hold_is_none(tmp_path, monkeypatch):
    tag, why = manylinux.platform(wheel_of(tmp_path, MODULE))
    assert tag is None and "_C.abi3.so needs librlk_registry.so" in why
    monkeypatch.setattr(manylinux, "needs", lambda binary: (set(), {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 99)}))
    tag, why = manylinux.platform(wheel_of(tmp_path, MODULE))
    assert tag is None and "GLIBCXX_3.4.99" in why
