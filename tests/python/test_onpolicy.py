"""rlk.onpolicy: KL is 0 at every step, over any ranks; a run that is cut off goes on with the same bits; the control is beside it."""

import json
import os
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import rlk  # noqa: E402
import rlk.model  # noqa: E402
from rlk import onpolicy  # noqa: E402

SMALL = ["--prompts", "2", "--group", "4", "--length", "2"]


def digest(text):
    return text.rsplit("digest of the weights ", 1)[1].split()[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_loop_has_no_kl_and_goes_on_with_the_same_bits(dtype, tmp_path, capsys):
    small, figures = [*SMALL, "--dtype", dtype], [tmp_path / f for f in ("whole.json", "parts.json")]
    assert onpolicy.main([*small, "--steps", "3", "--json", str(figures[0])]) == 0
    whole = digest(capsys.readouterr().out)
    parts = [*small, "--checkpoint", str(tmp_path / "parts.pt"), "--json", str(figures[1])]
    assert onpolicy.main([*parts, "--steps", "1"]) == 0
    assert digest(capsys.readouterr().out) != whole
    assert onpolicy.main([*parts, "--steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "going on from step 1" in said and digest(said) == whole
    a, b = ([{k: h[k] for k in ("step", "reward", "kl", "ratio")} for h in json.loads(f.read_text())] for f in figures)
    assert a == b and len(a) == 3 and all(h["kl"] == 0 and h["ratio"] == 0 for h in a)


def test_the_loop_has_no_kl_by_hoppers_exponential_either():
    def differs(sampler):
        with rlk.backend(f"linear_logp*=native.replay_sm90_ex2;sample={sampler}"):
            return onpolicy.main([*SMALL, "--dtype", "bf16", "--steps", "2"])

    assert differs("native.replay_sm90_ex2") == 0
    assert differs("native.rows") == 1


def test_a_run_that_is_killed_goes_on_with_the_same_bits(tmp_path, capsys):
    steps = ["--steps", "12"]
    assert onpolicy.main([*SMALL, *steps]) == 0
    whole = digest(capsys.readouterr().out)
    file = tmp_path / "run.pt"
    words = [sys.executable, "-m", "rlk.onpolicy", *SMALL, *steps, "--checkpoint", str(file)]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    for line in run.stdout:
        if line.split()[0] == "3":  # the step's line comes before its checkpoint is written
            break
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0 and "going on from step" in done.stdout, done.stderr
    assert digest(done.stdout) == whole


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_trainer_and_sampler_of_any_degrees_learn_the_same_weights(dtype, capsys):
    found = set()
    for ranks in (["1"], ["4", "2"], ["2", "8"]):
        assert onpolicy.main([*SMALL, "--dtype", dtype, "--steps", "2", "--ranks", *ranks]) == 0
        said = capsys.readouterr().out
        assert "largest difference between sampler and trainer: 0\n" in said
        found.add(digest(said))
    assert len(found) == 1


def test_ranks_over_which_the_model_cannot_be_spread_are_refused(capsys):
    assert onpolicy.main(["--model", "tiny-qwen3", "--ranks", "2", "--steps", "1"]) == 2
    assert "4 heads of 16 over 2 ranks" in capsys.readouterr().err
    for ranks in (["3"], ["2", "2", "2"]):
        with pytest.raises(SystemExit):
            onpolicy.main(["--ranks", *ranks])


def test_the_control_is_beside_and_both_are_drawn(tmp_path, capsys):
    figures, drawing = tmp_path / "run.json", tmp_path / "run.svg"
    words = [*SMALL, "--steps", "2", "--peer", "torch", "--json", str(figures), "--plot", str(drawing)]
    assert onpolicy.main(words) == 0
    said = capsys.readouterr().out
    assert "PyTorch: reward" in said and drawing.read_text().count("<polyline") == 4
    history = json.loads(figures.read_text())
    assert all(h["kl"] == 0 and h["peer"]["step"] == h["step"] for h in history)
    again = tmp_path / "again.svg"
    assert onpolicy.main(["--plot", str(again), str(figures)]) == 0 and again.read_text().count("<polyline") == 4


def test_a_sampler_with_stale_weights_is_seen(monkeypatch, capsys):
    """What the loop says is measured: weights that are not handed over are a KL above 0, and its exit code says so."""
    monkeypatch.setattr(onpolicy.Policy, "hand_over", lambda self: None)
    assert onpolicy.main([*SMALL, "--steps", "3", "--ranks", "2"]) == 1
    assert "largest difference between sampler and trainer: 0\n" not in capsys.readouterr().out


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file = tmp_path / "run.pt"
    assert onpolicy.main([*SMALL, "--steps", "1", "--checkpoint", str(file)]) == 0
    with pytest.raises(SystemExit, match="was written with {'seed': 1}"):
        onpolicy.main([*SMALL, "--steps", "2", "--seed", "2", "--checkpoint", str(file)])
    file.write_text("nothing")
    with pytest.raises(SystemExit, match="is no checkpoint of this program"):
        onpolicy.main([*SMALL, "--steps", "2", "--checkpoint", str(file)])
