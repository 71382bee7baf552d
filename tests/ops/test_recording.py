"""A report saved to a file gives back the same calls, and refuses what it cannot give back."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.ops import ConfigSelectorChain, Executor, Invocation, Kernel, PersistentCache, Tuner, report
from ejkernel.ops.recording import NotRecordable, invocation, load, save
from ejkernel.ops.worker import Worker, left_behind
from tests.ops.toy import Cube, Problem, Toy, ToyConfig, problem


def recorded(tmp_path):
    return load(report().save(tmp_path / "run.json"))


def test_calls_come_back_with_their_keys(tmp_path):
    executor = Executor(ConfigSelectorChain())
    executor(Toy(), problem())
    executor(Toy(), problem(reverse=True, scale=float("inf")), platform="xla")
    executor(Cube(), jnp.ones(3), jnp.ones((), jnp.bfloat16))
    jax.vmap(lambda x: executor(Cube(), x, jnp.ones(3)))(jnp.ones((5, 3)))
    executor(Toy(), problem(), _cfg=ToyConfig(4))
    choices = recorded(tmp_path)
    assert [choice["level"] for choice in choices] == ["heuristics"] * 4 + ["explicit"]
    assert choices[-1]["config"] == {"block": 4, "kind": "plain"}
    for choice, chosen in zip(choices, report(), strict=True):
        assert invocation(choice).key == choice["key"] == chosen.key


def test_everything_that_arguments_may_hold_comes_back(tmp_path):
    from ejkernel.modules import attention
    from ejkernel.types.mask import MaskInfo

    q = jnp.ones((2, 6, 2, 4))
    ids = np.array([[0, 0, 1, 1, 1, -1]] * 2, np.int32)  # known ids: packed rows, a named tuple
    attention(q, q, q, mask_info=MaskInfo.from_segments(ids), softmax_dtype=jnp.float32, logits_soft_cap=3.0, causal=True)
    attention(q, q, q, dropout_rng=jax.random.key(0), deterministic=False, dropout_prob=0.5, bias=jnp.ones((6, 6)))
    choices = recorded(tmp_path)
    assert len(choices) == 2
    assert all(invocation(choice).key == choice["key"] for choice in choices)


def test_a_class_that_is_not_imported_is_not_imported_for_it(tmp_path):
    Executor(ConfigSelectorChain())(Toy(), problem())
    text = (report().save(tmp_path / "run.json")).read_text()
    (tmp_path / "run.json").write_text(text.replace("tests.ops.toy:Toy", "tests.ops.nowhere:Toy"))
    with pytest.raises(NotRecordable, match="is not imported"):
        invocation(load(tmp_path / "run.json")[0])
    (tmp_path / "run.json").write_text(text.replace('"class": "tests.ops.toy:Toy"', '"class": "subprocess:Popen"'))
    with pytest.raises(NotRecordable, match="not a class that belongs"):
        invocation(load(tmp_path / "run.json")[0])


def test_what_cannot_be_written_says_why_and_the_rest_is_kept(tmp_path):
    class Local(Kernel[ToyConfig, jax.Array]):
        op_id = "local"

        def run(self, x, *, cfg):
            return x

        def heuristic_cfg(self, inv):
            return ToyConfig()

    executor = Executor(ConfigSelectorChain())
    executor(Local(), jnp.ones(2))
    executor(Toy(), problem())
    sharding = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec("x"))
    split = Invocation(Toy(), (Problem(jax.ShapeDtypeStruct((2, 8, 4), jnp.float32, sharding=sharding)),))
    local, fine = report()
    others = [dataclasses.replace(fine, invocation=None), dataclasses.replace(fine, invocation=split)]
    choices = load(save([local, fine, *others], tmp_path / "run.json"))
    assert invocation(choices.pop(1)).key == fine.key
    for choice, why in zip(choices, ("defined inside a function", "were not kept", "split between devices"), strict=True):
        with pytest.raises(NotRecordable, match=why):
            invocation(choice)


@pytest.mark.parametrize("spoil", [lambda c: c["call"].pop("args"), lambda c: c["call"].update(kernel=3)])
def test_a_damaged_call_is_refused(tmp_path, spoil):
    Executor(ConfigSelectorChain())(Toy(), problem())
    choice = json.loads(json.dumps(recorded(tmp_path)[0]))
    spoil(choice)
    with pytest.raises(NotRecordable, match="cannot be read"):
        invocation(choice)


def test_tuning_again_replaces_what_is_known():
    shares = []
    disk = PersistentCache("toy")
    chain = ConfigSelectorChain(tuner=Tuner(1, 1, progress=lambda share, what: shares.append(share)), persistent=disk)
    Executor(chain)(Toy(), problem())
    inv = report()[0].invocation
    assert inv is not None
    levels = [str(chain.tune(inv).level), str(chain.tune(inv).level)]
    before = disk.record(inv.key)
    levels.append(str(chain.tune(inv, again=True).level))
    assert levels == ["autotune", "memory", "autotune"]
    assert disk.record(inv.key) != before
    assert shares == sorted(shares[: len(shares) // 2]) * 2
    assert 0 <= min(shares) <= max(shares) < 1


def test_a_thread_that_was_given_up_is_known():
    release = threading.Event()
    worker = Worker(jax.devices()[0])
    with pytest.raises(Exception, match="longer than"):
        worker.call(release.wait, 0.01)
    assert left_behind(0.01)
    release.set()
    assert not left_behind(5.0)


PROGRAM = """
import sys, time, jax
from ejkernel.ops.worker import OvertimeError, Worker

def slow():
    time.sleep(1.5)
    open(sys.argv[1], "w").close()

try:
    Worker(jax.devices()[0]).call(slow, 0.05)
except OvertimeError:
    pass
"""


def test_a_program_waits_for_a_candidate_that_it_gave_up(tmp_path):
    ended = tmp_path / "ended"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(ended)], timeout=120, check=False)
    assert done.returncode == 0
    assert ended.exists()
