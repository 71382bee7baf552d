"""The command as a whole: help, versions, what it needs, what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import ejkernel
from ejkernel._device import backend_of, default_device

COMMANDS = [
    ("doctor",),
    ("verify",),
    ("bench",),
    ("tune",),
    *(("cache", name) for name in ("list", "show", "export", "import", "clear")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples_and_json_and_fits(run, command):
    shown = run(*command, "--help", code=0)
    assert f"ejkernel {' '.join(command)}" in shown.out.partition("Examples:")[2]
    assert "--json" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


def test_the_commands_are_listed_whole(run):
    shown = run("--help", code=0)
    assert all(f"  {command[0]} " in shown.out for command in COMMANDS)
    assert "..." not in shown.out.partition("Commands:")[2]


@pytest.mark.parametrize("arguments", [("--nothing",), ("doctor", "--nothing"), ("nothing",), ("cache", "nothing")])
def test_wrong_usage_exits_with_2(run, arguments):
    assert run(*arguments).code == 2


EMPTY = [
    *(("bench", option) for option in ("--op", "--shapes", "--lengths", "--gates", "--dtype", "--platform", "--compare")),
    *(("tune", option) for option in ("--op", "--shapes", "--gates", "--dtype", "--platform")),
    *(("verify", option) for option in ("--op", "--platform", "--dtype", "--load")),
]


@pytest.mark.parametrize("command", EMPTY, ids=" ".join)
def test_an_option_with_nothing_in_it_does_not_mean_everything(run, command):
    assert f"{command[1]} was given with nothing in it" in run(*command, "", code=2).words


def test_as_a_process():
    made = subprocess.run([sys.executable, "-m", "ejkernel", "doctor", "--json"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["versions"]["ejkernel"] == ejkernel.__version__
    assert found["device"]["backend"] == backend_of(default_device())


@pytest.mark.parametrize("command", [("doctor",), ("verify", "--op", "attention")], ids=" ".join)
def test_a_device_that_jax_does_not_have_is_said(command):
    environment = {**os.environ, "JAX_PLATFORMS": "junk"}
    made = subprocess.run([sys.executable, "-m", "ejkernel", *command], capture_output=True, text=True, env=environment)
    assert made.returncode == 1
    assert "Traceback" not in made.stderr
    assert "JAX cannot use its device: Unable to initialize backend 'junk'" in " ".join((made.stdout + made.stderr).split())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["tables", "json"])
def test_output_that_cannot_be_written_is_said(options):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ejkernel", "cache", "list", "--all", *options]
        made = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (made.returncode, made.stderr) == (1, "error: the output cannot be written: No space left on device.\n")


def test_without_the_extra_it_says_what_to_install():
    script = "import sys; sys.modules['typer'] = None; import ejkernel.cli as cli; cli.main()"
    hidden = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'typer' else f(n, *a); "
    made = subprocess.run([sys.executable, "-c", hidden + script], capture_output=True, text=True)
    assert made.returncode == 2
    assert 'pip install ".[cli]"' in made.stderr
    assert "typer" in made.stderr
    assert "Traceback" not in made.stderr


def test_the_library_imports_nothing_of_it():
    script = (
        "import sys, ejkernel, ejkernel.modules, ejkernel.ops\n"
        "absent = {'typer', 'rich', 'matplotlib', 'ejkernel.cli', 'ejkernel.testing', 'ejkernel.ops.recording'}\n"
        "assert not absent & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_command_draws_nothing_before_it_is_asked():
    script = "import sys, ejkernel.cli._app; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_version(run):
    assert run("--version", code=0).out == f"ejkernel {ejkernel.__version__}\n"


def test_doctor_shows_which_platform_a_call_gets_and_only_those_that_exist(run):
    shown = run("doctor", code=0)
    for word in ("recurrent_attention", "gla_attention", "lightning_attention", "attention", "xla", "triton", "a call runs on"):
        assert word in shown.words
    assert shown.words.count("this call computes on a cpu, not on an NVIDIA GPU") == 1  # each reason once
    found = run("doctor", "--json", code=0).json
    assert found["operations"]["attention"]["xla"] is None
    assert "cuda" not in found["operations"]["gla_attention"]  # it is not written for it
    assert found["order"]["gla_attention"] == ["xla"]
    assert found["problems"] == []
    assert found["cache"]["writable"] is True


def test_doctor_has_a_remedy_where_a_gpu_lies_idle(run, monkeypatch):
    monkeypatch.setattr("ejkernel.cli._doctor._has_nvidia_gpu", lambda: True)
    assert 'NVIDIA GPU that JAX does not use: pip install ".[cuda13]"' in run("doctor", code=0).words
    monkeypatch.setattr("ejkernel.cli._doctor._has_nvidia_gpu", lambda: False)
    assert run("doctor", "--json", code=0).json["remedies"] == []


def test_doctor_on_a_tpu_says_that_its_kernels_have_not_been_run(run, monkeypatch):
    from ejkernel.cli import _doctor

    assert run("doctor", "--json", code=0).json["notes"] == []
    device = {"kind": "TPU v5 lite", "backend": "tpu", "count": 1, "memory_bytes": None}
    monkeypatch.setattr(_doctor, "_device", lambda: device)
    shown = run("doctor", code=0).words
    assert "not yet been run on a TPU" in shown
    assert "ejkernel verify --platform pallas" in shown


def test_doctor_says_on_which_gpu_the_kernels_have_been_run(run, monkeypatch):
    from ejkernel.cli import _doctor

    for kind, said in {"NVIDIA H200": False, "NVIDIA GeForce RTX 4090": True, "NVIDIA H100 80GB HBM3": True}.items():
        monkeypatch.setattr(
            _doctor, "_device", lambda kind=kind: {"kind": kind, "backend": "gpu", "count": 1, "memory_bytes": None}
        )
        notes = run("doctor", "--json", code=0).json["notes"]
        assert ["on an H200 alone" in note and "ejkernel verify --platform triton" in note for note in notes] == [True] * said


def test_doctor_counts_what_is_tuned(run, entry):
    entry()
    cache = run("doctor", "--json").json["cache"]
    assert (cache["entries"], cache["entries_for_this_device"]) == (1, 0)


def test_doctor_finds_a_policy_that_no_call_would_accept(run, monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "sometimes")
    assert "must be one of 'autotune', 'heuristics', 'error'" in run("doctor", code=1).words


def test_doctor_finds_a_word_for_checks_that_no_call_would_accept(run, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CHECK", "maybe")
    assert "EJKERNEL_CHECK must be 0 or 1; got 'maybe'." in run("doctor", code=1).words


def test_doctor_says_when_nothing_can_be_stored(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    assert "CANNOT BE WRITTEN" in run("doctor", code=0).words
