"""Which tag a wheel for Linux may carry, read from its binaries.

pip takes `linux_x86_64` wheels only where they were built. A wheel may call itself manylinux_2_N (PEP 600) when its binaries need
no libraries but the wheel's own and those that every distribution with glibc 2.N has, and no newer symbol of these.
"""

import re
import subprocess
import tempfile
import zipfile
from pathlib import Path

_EVERYWHERE = re.compile(r"lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s)\.so\.\d+|ld-linux.*")
#: The newest GLIBCXX beside a glibc 2.N, for each N that brought one.
_GLIBCXX = {17: (3, 4, 19), 24: (3, 4, 22), 27: (3, 4, 24), 31: (3, 4, 28), 34: (3, 4, 29), 35: (3, 4, 30), 39: (3, 4, 33)}


def needs(binary):
    """The libraries of a binary, and the newest version of each set of symbols: {'GLIBC': (2, 34), ...}."""
    text = subprocess.run(["readelf", "--dynamic", "--version-info", "--wide", binary], check=True, capture_output=True,
                          text=True).stdout
    versions = {"GLIBC": (2, 0), "GLIBCXX": (3, 4)}
    for name, number in re.findall(r"Name: (GLIBC|GLIBCXX)_([\d.]+)", text):
        versions[name] = max(versions[name], tuple(map(int, number.split("."))))
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", text)), versions


def platform(wheel):
    """('manylinux_2_34_x86_64', None) for a wheel that is one, else None and why it is not."""
    wheel = Path(wheel)
    oldest = 0
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        own = {name.rpartition("/")[2] for name in archive.namelist()}
        for name in archive.namelist():
            with archive.open(name) as file:
                if file.read(4) != b"\x7fELF":
                    continue
            libraries, versions = needs(archive.extract(name, folder))
            strange = sorted(n for n in libraries - own if not _EVERYWHERE.fullmatch(n))
            if strange:
                return None, f"{name} needs {', '.join(strange)}"
            beside = [n for n, version in _GLIBCXX.items() if version >= versions["GLIBCXX"]]
            if not beside:
                return None, f"{name} needs GLIBCXX_{'.'.join(map(str, versions['GLIBCXX']))}"
            oldest = max(oldest, min(beside), versions["GLIBC"][1])
    return f"manylinux_2_{oldest}_{wheel.stem.rpartition('-')[2].removeprefix('linux_')}", None
