"""`ejkernel cache`: looking at what was tuned, carrying it elsewhere, removing it."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest

from ejkernel import ops
from ejkernel.modules import GLAttentionConfig, gla_attention
from ejkernel.ops import PersistentCache


def stored(run, *arguments):
    return run("cache", "list", "--all", "--json", *arguments, code=0).json["entries"]


def test_an_empty_cache_says_how_to_fill_it(run):
    assert "ejkernel tune" in run("cache", "list", code=0).words
    assert stored(run) == []


def test_list_has_level_configuration_time_and_gain(run, entry):
    entry()
    assert "1 for other devices or versions (--all lists them)" in run("cache", "list", code=0).words
    shown = run("cache", "list", "--all", code=0)
    for word in ("gla_attention", "1x~64x2x16x16", "float32", "disk", "block_q=64", "2.00 ms", "2.00x"):
        assert word in shown.words


def test_list_by_operation(run, entry):
    entry("gla")
    entry("attention")
    entry("my_own_kernel")
    entry("recurrent_gla", 2)  # stored under the operation's other name
    for name in ("gla_attention", "gla", "recurrent_gla"):
        assert [one["operation"] for one in stored(run, "--op", name)] == ["gla_attention"] * 2
    assert [one["operation"] for one in stored(run, "--op", "my_own_kernel,attention")] == ["attention", "my_own_kernel"]
    assert "--op must be one of attention, " in run("cache", "list", "--op", "nothing", code=2).words


def test_show_has_losers_and_reasons(run, entry):
    entry()
    (one,) = stored(run)
    shown = run("cache", "show", one["id"][:4], code=0)
    for words in (
        "level disk",
        "block_q=64 2.00 ms 1.00x chosen",
        "block_q=16 4.00 ms 2.00x heuristic",
        "too large",
        "not used here",
    ):
        assert words in shown.words
    assert "`ejkernel cache list --all` shows the ids" in run("cache", "show", "zzzz", code=2).words


def test_a_recorded_run_is_listed_with_the_level_of_each_choice(run, tmp_path):
    q = jax.numpy.ones((1, 5, 1, 4))
    gla_attention(q, q, q)
    gla_attention(q, q, q, cfg=GLAttentionConfig("chunked", 8))
    with ops.overlay(gla=GLAttentionConfig("recurrent", 4)):
        gla_attention(q, q, q)
    file = ops.report().save(tmp_path / "run.json")
    entries = run("cache", "list", "--recorded", file, "--json", code=0).json["entries"]
    assert [one["level"] for one in entries] == ["heuristics", "explicit", "overlay"]
    assert all(one["usable_here"] for one in entries)
    shown = run("cache", "list", "--recorded", file, code=0)
    assert "chunked block_q=8" in shown.words
    shown = run("cache", "show", "--recorded", file, code=0)
    assert "level overlay" in shown.words
    assert [one["route"] for one in entries] == [chosen.route for chosen in ops.report()]
    assert f"route {entries[1]['route']}" in shown.words
    for command in ("list", "show"):
        refused = run("cache", command, "--recorded", file, "--cache-dir", tmp_path, code=2)
        assert "does not go together with --cache-dir" in refused.words


ODD: dict[str, Any] = {
    "no JSON": "{",
    "another key": {"key": "a key"},
    "a key of another kind": {"key": "[1]"},
    "an operation of another kind": {"key": '{"op":3}'},
    "arrays of another kind": {"key": '{"op":"attention","arrays":{"x":3}}'},
    "static values of another kind": {"key": '{"op":"attention","static":[1]}'},
    "an environment of another kind": {"key": '{"op":"attention","environment":{"device":[1]}}'},
    "a record of another kind": {"record": [1]},
    "a time of another kind": {"record": {"seconds": "fast"}},
    "a date of another kind": {"record": {"time": 3}},
    "candidates of another kind": {"record": {"candidates": [3]}},
    "a candidate without a time": {"record": {"candidates": [{"config": {}}]}},
}


@pytest.mark.filterwarnings("ignore::ejkernel.ops.ConfigWarning")
@pytest.mark.parametrize("odd", ODD)
def test_an_unreadable_entry_is_shown_as_such_and_ends_nothing(run, entry, odd):
    entry("attention", 1)
    good = {"format": 1, "key": '{"op":"attention"}', "config": {"block_q": 64}, "record": {}}
    file = PersistentCache("attention").folder / f"0dd0dd0dd0{'0' * 30}.json"
    file.write_text(ODD[odd] if isinstance(ODD[odd], str) else json.dumps(good | ODD[odd]))
    listed = {one["id"]: one["unreadable"] for one in stored(run)}
    assert listed.pop("0dd0dd0dd0")
    assert list(listed.values()) == [None]
    shown = run("cache", "list", "--all", code=0)
    assert "2 tuned calls, 1 of them unreadable" in shown.words
    assert "unreadable: " in run("cache", "show", "--all", code=0).words
    assert len(json.loads(run("cache", "export", code=0).out)["entries"]) == 1
    assert run("doctor", "--json").json["cache"]["unreadable"] == 1
    assert run("cache", "clear", "0dd0", "--yes", "--json", code=0).json["removed"] == ["0dd0dd0dd0"]
    assert not file.exists()


def test_a_recorded_choice_that_is_unreadable_is_shown_as_such(run, tmp_path):
    choice = {"key": "a key", "level": "disk", "config": {}, "record": {"seconds": "fast"}}
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "kind": "ejkernel choices", "choices": [choice]}))
    for command in ("list", "show"):
        assert "its key is not JSON" in run("cache", command, "--recorded", tmp_path / "run.json", code=0).words


def test_folders_that_are_no_operations_are_passed_over(run, entry):
    entry("attention")
    for name in (".hidden", "a b"):
        (PersistentCache("attention").folder.parent / name).mkdir()
    assert len(stored(run)) == 1
    run("cache", "export", code=0)


def test_a_folder_in_nobodys_home_is_said(run, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "~nosuchuser/x")
    assert "'~nosuchuser/x' is under a home that this machine does not have" in run("cache", "list", code=2).words
    assert "~nosuchuser/x' is under a home" in run("doctor", code=0).words


def test_nested_configurations_are_exported(run):
    PersistentCache("own").put('{"op":"own"}', {"tiles": {"rows": 4}})
    assert json.loads(run("cache", "export", code=0).out)["entries"][0]["config"] == {"tiles": {"rows": 4}}


def test_export_and_import_carry_everything(run, entry, tmp_path):
    keys = [entry("gla", 1), entry("attention", 2), entry("my_own_kernel", 3)]
    file, other = tmp_path / "deep" / "tuned.json", tmp_path / "other"
    assert "3 tuned calls written" in run("cache", "export", file, code=0).words
    assert run("cache", "import", file, "--cache-dir", other, "--json", code=0).json["imported"] == 3
    assert PersistentCache("attention", other).get(keys[1]) == {"block_q": 64}
    again = run("cache", "import", file, "--cache-dir", other, code=0)
    assert "0 tuned calls added" in again.words
    assert "3 were there already" in again.words


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_export_to_a_folder_is_refused(run, name):
    assert "cannot be written: Is a directory." in run("cache", "export", name, code=1).words


def test_export_to_standard_output_is_what_import_reads(run, entry, tmp_path):
    entry("attention")
    entry("gla")
    text = run("cache", "export", "--op", "attention", code=0).out
    assert [one["config"] for one in json.loads(text)["entries"]] == [{"block_q": 64}]
    found = run("cache", "import", "-", "--cache-dir", tmp_path / "other", "--json", code=0, input=text).json
    assert found["imported"] == 1


def test_the_newer_of_two_stays(run, entry, tmp_path):
    entry(time="2026-01-01T00:00:00+00:00")
    run("cache", "export", tmp_path / "old.json", code=0)
    key = entry(time="2026-02-01T00:00:00+00:00")
    run("cache", "import", tmp_path / "old.json", code=0)
    assert PersistentCache("gla").record(key)["time"].startswith("2026-02")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b'{"format": 99, "entries": []}',
        b'{"format": 1, "entries": [{"key": 3}]}',
        b'{"format": 1, "entries": [{"key": "{\\"op\\": \\"../up\\"}", "config": {}, "record": {}}]}',
    ],
)
def test_a_damaged_file_is_refused_and_nothing_of_any_is_added(run, entry, tmp_path, content):
    entry()
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    run("cache", "export", good, code=0)
    bad.write_bytes(content)
    shown = run("cache", "import", good, bad, "--cache-dir", tmp_path / "other", code=1)
    assert str(bad) in shown.err
    assert "ejkernel cache export" in shown.words
    assert not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_written_fails(run, entry, tmp_path):
    entry()
    run("cache", "export", tmp_path / "tuned.json", code=0)
    (tmp_path / "file").write_text("")
    assert (
        "cannot be written to"
        in run("cache", "import", tmp_path / "tuned.json", "--cache-dir", tmp_path / "file", code=1).words
    )


def test_a_file_that_is_not_there_is_wrong_usage(run):
    assert "cannot be read" in run("cache", "import", "no_such_file.json", code=2).words


def test_clear_asks_unless_told_not_to(run, entry):
    entry("attention", 1)
    entry("gla", 2)
    assert "say --yes" in run("cache", "clear", code=2).words
    assert "--op must be one of" in run("cache", "clear", "--op", "softmax", "--yes", code=2).words
    assert "--op must be one of" in run("cache", "export", "--op", "softmax", code=2).words
    assert len(stored(run)) == 2
    run("cache", "clear", "--op", "attention", "--yes", code=0)
    (left,) = stored(run)
    assert run("cache", "clear", left["id"], "--yes", "--json", code=0).json["removed"] == [left["id"]]
    assert stored(run) == []


def test_clear_keeps_what_is_not_of_the_cache(run, entry, tmp_path):
    """The folder may be one that others use too, such as a project's or that of all caches."""
    entry("attention", 1)
    foreign = tmp_path / "cache" / "src" / "package.json"
    foreign.parent.mkdir()
    foreign.write_text("{}")
    assert "1 tuned call removed" in run("cache", "clear", "--yes", code=0).words
    assert foreign.read_text() == "{}"


def test_clear_of_an_id_with_nothing_in_it_removes_nothing(run, entry):
    entry("attention", 1)
    assert "an id was given with nothing in it" in run("cache", "clear", "--yes", "", code=2).words
    assert "--op was given with nothing in it" in run("cache", "clear", "--yes", "--op", "", code=2).words
    assert len(stored(run)) == 1


def test_clear_stale_keeps_what_is_used_here(run, entry):
    from ejkernel._device import default_device
    from ejkernel.ops.key import environment

    entry()
    here = json.dumps({"op": "attention", "environment": environment(default_device())})
    PersistentCache("attention").put(here, {"block_q": 8}, {"seconds": 1.0})
    assert "1 tuned call removed" in run("cache", "clear", "--stale", "--yes", code=0).words
    assert [one["usable_here"] for one in stored(run)] == [True]


def test_a_damaged_entry_is_listed_as_such_with_a_warning(run, entry, tmp_path):
    key = entry()
    PersistentCache("gla").file(key).write_text("{")
    with pytest.warns(ops.ConfigWarning, match="ignored the stored configuration"):
        (one,) = stored(run)
    assert one["unreadable"].startswith("JSONDecodeError")
