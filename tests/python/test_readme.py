"""The Python lines of the pages run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [pytest.param(code, id=f"{page}:{text[:at].count(chr(10)) + 1}")
          for page in ("README.md", "src/python/README.md") for text in [(ROOT / page).read_text()]
          for at, code in ((m.start(), m[1]) for m in re.finditer(r"```python\n(.*?)```", text, re.S))]


def test_there_are_python_lines():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("code", BLOCKS)
def test_the_lines_run(code):
    for framework in ("torch", "jax"):
        if f"import {framework}" in code:
            pytest.importorskip(framework)
    exec(compile(code, "README", "exec"), {})
