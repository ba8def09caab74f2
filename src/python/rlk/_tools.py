"""Questions about calls and the library: explain, resolve, verify, evidence."""

import os

from rlk import _C, _errors


def _json(text):
    import json  # what most programs never ask should not slow their start
    return json.loads(text)



def explain(op, *args, **kwargs):
    """What would run for a call and why, as text; arguments as in the call, or rlk.Spec for tensors without data."""
    return Explanation(_C.explain(op, *args, **kwargs))


class Explanation(str):
    """Text that a notebook shows as it is."""

    def __repr__(self):
        return str(self)

    def _repr_html_(self):
        import html
        return f"<pre>{html.escape(str(self))}</pre>"


class Resolution:
    """How a call would be resolved: ``id``, ``arithmetic``, ``decided_by``, ``fingerprint``, ``capture_safe``, ``error`` and
    ``candidates``."""

    def __init__(self, document):
        self._document = document
        self.op = document["op"]
        self.id = document["chosen"]
        self.arithmetic = document["arithmetic"]
        self.decided_by = document["decided_by"]
        self.fingerprint = document["fingerprint"]
        self.capture_safe = document["capture_safe"]
        self.error = document["error"]
        self.candidates = document["candidates"]

    def __bool__(self):
        return not self.error

    def __repr__(self):
        return f"<rlk.Resolution {self.op}: {self.id or self.error}>"

    def _repr_html_(self):
        import html
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(str(c[k]))}</td>"
                                        for k in ("standing", "id", "arithmetic", "reason", "nearest")) + "</tr>"
                       for c in self.candidates)
        return (f"<table><caption>{html.escape(repr(self))}</caption><tr><th>standing</th><th>implementation</th>"
                f"<th>arithmetic</th><th>reason</th><th>nearest</th></tr>{rows}</table>")


def resolve(op, *args, **kwargs):
    """The resolution of a call, without running it."""
    return Resolution(_json(_C.resolve(op, *args, **kwargs)))


def implementations():
    """All implementations, in the order in which they are tried."""
    return _json(_C.list_json("impls"))["impls"]


def saved():
    """The ranges that are saved for a backward and not released."""
    return _json(_C.list_json("saved"))["saved"]


def load_evidence(path):
    """Reads a certificate; with ``evidence=True`` a call takes only what one covers."""
    _C.load_evidence(os.fspath(path))


clear_evidence = _C.clear_evidence
reload_environment = _C.reload_environment


def load_plugin(path):
    """Loads a backend plugin."""
    _C.load_plugin(os.fspath(path))


def dispatch_program():
    """The path of rlk-dispatch: in the wheel beside the library, else on PATH or in the build tree."""
    import shutil
    from pathlib import Path
    here = Path(__file__).resolve().parent
    for candidate in (Path(_C.__file__).resolve().parent / "bin/rlk-dispatch", here / "bin/rlk-dispatch",
                      Path(_C.__file__).resolve().parents[2] / "bin/rlk-dispatch"):
        if candidate.exists():
            return str(candidate)
    found = shutil.which("rlk-dispatch")
    if not found:
        raise _errors.ConfigurationError("rlk-dispatch was not found: it is part of the wheel, or PATH must lead to it")
    return found


def verify(op, *arguments, certificate=None):
    """Proves an op on this machine, as ``rlk-dispatch --verify OP`` does, whose words ``arguments`` takes. Returns the
    certificate; raises when a promise is broken."""
    import json
    import subprocess
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        path = os.fspath(certificate) if certificate else os.path.join(folder, "certificate.json")
        done = subprocess.run([dispatch_program(), "--verify", op, "--certificate", path, *arguments],
                              capture_output=True, text=True)
        if done.returncode != 0:
            raise _errors.Error(f"verify {op}: {(done.stdout + done.stderr).strip()[-2000:]}")
        with open(path) as file:
            return json.load(file)


def main():
    """The command rlk-dispatch of the wheel."""
    import sys
    program = dispatch_program()
    os.execv(program, [program, *sys.argv[1:]])
