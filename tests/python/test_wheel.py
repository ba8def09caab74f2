"""Which tag a wheel may carry. tools/wheel builds it; here its binaries are those of the build tree."""

import importlib
import shutil
import sys
import types
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


def test_a_wheel_without_the_cuda_plugin_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "scikit_build_core", types.ModuleType("scikit_build_core"))
    build = types.ModuleType("scikit_build_core.build")
    for name in ("build_editable", "build_sdist", "get_requires_for_build_editable", "get_requires_for_build_sdist",
                 "get_requires_for_build_wheel"):
        setattr(build, name, None)
    sys.modules["scikit_build_core"].build = build
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", build)
    left_out = importlib.import_module("rlk_wheel").left_out
    features = "oneDNN backend: left out (RLK_WITH_ONEDNN=OFF)\nCUDA backend: left out: nvcc was not found. Add it with: ./tools/install cuda\n"
    line = left_out(["rlk/__init__.py", "rlk/lib/rlk/rlk-probe"], features)
    assert line.endswith("runs on CPUs alone: nvcc was not found. Add it with: ./tools/install cuda") and "\n" not in line
    assert left_out(["rlk/lib/rlk/librlk_backend_cuda.so"], "CUDA backend: built\n") is None


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
