"""bench --compare: what counts as a change, and that no test is dropped. On made-up records."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.bench.compare import SAME, Change, compare, read_records, to_markdown
from tinygpt.cli import main as cli
from tinygpt.errors import RequestError

BEYOND, NOISE, TOO_FEW = "beyond both spreads", "within noise", "too few runs"


def record(*samples: float, **fields) -> dict:
    about = {"model_filename": "demo", "model_type": "gpt2", "dtype": "int8", "n_threads": 2, "batch_size": 1}
    test = {"n_prompt": 0, "n_gen": 64, "n_depth": 128, "cpu_info": "A CPU", "samples_ts": list(samples)}
    return {**about, **test, **fields}


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], BEYOND),
        ([6, 7, 8, 9, 10], [1, 2, 3, 4, 5], BEYOND),
        ([1, 2, 3, 4, 6], [5, 7, 8, 9, 10], NOISE),
        ([1, 2, 3, 4, 5], [5, 6, 7, 8, 9], NOISE),  # as fast as one another
        ([1, 2, 3], [6, 7, 8], TOO_FEW),  # once in ten by chance
        ([1, 2, 3, 4], [6, 7, 8, 9], BEYOND),  # once in 35
        ([1], [9], TOO_FEW),
        ([1, 2, 3, 4, 5, 6], [7, 8], TOO_FEW),  # once in 14
    ],
)
def test_verdicts(old, new, verdict):
    assert Change((), old, new).verdict == verdict


def test_figures_of_a_change():
    change = Change((), [10.0, 12.0, 11.0], [22.0, 5.0, 30.0])
    assert (change.old_median, change.new_median, change.ratio) == (11.0, 22.0, 2.0)
    assert change.chance == pytest.approx(2 / 20)


RUNS = st.lists(st.floats(1, 1000), min_size=5, max_size=8)


@given(RUNS, RUNS)
def test_a_change_is_the_same_seen_from_both_sides(old, new):
    there, back = Change((), old, new), Change((), new, old)
    assert back.verdict == there.verdict
    assert back.ratio == pytest.approx(1 / there.ratio)


@given(RUNS)
def test_nothing_changes_beside_itself(runs):
    assert Change((), runs, runs).verdict == NOISE


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model_filename", "gpt2"),
        ("dtype", "int4"),
        ("n_threads", 1),
        ("batch_size", 8),
        ("n_prompt", 9),
        ("n_gen", 9),
        ("n_depth", 9),
    ],
)
def test_different_tests_are_listed_not_compared(field, other):
    old, new = record(1, 2), record(1, 2, **{field: other})
    found = compare([old], [new])
    assert found.changes == ()
    assert [dict(zip(SAME, key, strict=True))[field] for key in (*found.only_old, *found.only_new)] == [
        old[field],
        other,
    ]
    text = to_markdown(found)
    assert "No test is on both sides." in text
    assert text.count("- only in the old file: ") == text.count("- only in the new file: ") == 1


def test_several_records_of_one_test_count_by_their_medians():
    found = compare([record(1, 2, 9), record(3)], [record(4, 5, 6)])
    (change,) = found.changes
    assert (change.old, change.new) == ([2, 3], [5])
    assert change.verdict == "too few files"


def turns(*medians: float, first: int = 0) -> list[dict]:
    """A record for each median, from 3 runs; every other minute from `first` on."""
    return [
        record(0.9 * median, median, 1.1 * median, test_time=f"2026-01-02T03:{first + 2 * i:02}:00Z")
        for i, median in enumerate(medians)
    ]


@pytest.mark.parametrize(
    ("old", "new", "first", "verdict"),
    [
        ((10, 11, 10, 11), (12, 13, 12, 13), 1, "faster"),
        ((12, 13, 12, 13), (10, 11, 10, 11), 1, "slower"),
        ((10, 11, 10, 12.5), (12, 13, 12, 13), 1, NOISE),  # the machine moved as much
        ((10, 11, 10), (12, 13, 12), 1, "too few files"),
        ((10, 11, 10, 11), (12, 13, 12, 13), 20, "not in turns"),  # all of one, and then all of the other
        ((10, 11, 10, 11), (12, 13, 12, 13), 7, "not in turns"),
    ],
)
def test_only_files_in_turns_say_faster_or_slower(old, new, first, verdict):
    (change,) = compare(turns(*old), turns(*new, first=first)).changes
    assert change.verdict == verdict


@pytest.mark.parametrize(
    ("order", "verdict"),
    [
        ("ABABABAB", "faster"),
        ("ABBAABBA", "faster"),
        ("BAABABBA", "faster"),
        ("ABBBBAAA", "not in turns"),
        ("AAABABBB", "not in turns"),
        ("AABBAABB", "not in turns"),
        ("ABABABABB", "not in turns"),
    ],
)
def test_each_pair_of_neighbours_in_time_has_one_of_each_side(order, verdict):
    times = {side: [i for i, other in enumerate(order) if other == side] for side in "AB"}
    old, new = (
        [record(speed + i, test_time=f"2026-01-02T03:{i:02}:00Z") for i in reversed(times[side])]
        for side, speed in (("A", 100), ("B", 200))
    )
    for before, after, word in ((old, new, verdict), (new, old, verdict.replace("faster", "slower"))):
        (change,) = compare(before, after).changes
        assert change.verdict == word


@pytest.mark.parametrize("fields", [{}, {"test_time": "2026-01-02T03:04:05Z"}])
def test_times_that_say_nothing_of_an_order_are_no_turns(fields):
    old, new = ([record(speed, **fields) for _ in range(4)] for speed in (100, 200))
    assert compare(old, new).changes[0].verdict == "not in turns"


def test_two_sides_at_the_same_time_are_not_in_turns():
    old, new = (turns(*[speed] * 4) for speed in (100, 200))
    assert compare(old, new).changes[0].verdict == "not in turns"


def test_another_machine_tells_nothing_of_the_code():
    runs = (100, 101, 102, 103, 104)
    (change,) = compare([record(*runs)], [record(*(2 * r for r in runs), cpu_info="Another CPU")]).changes
    assert change.verdict == "other machine"


@pytest.mark.parametrize("sides", [(1.0, 1.3), (1.3, 1.0)])
@pytest.mark.parametrize(
    ("speed", "verdict"), [(1.25, "machine changed"), (1.4, BEYOND), (1 / 1.25, "machine changed")]
)
def test_a_machine_that_changed_as_much_is_said_to(sides, speed, verdict):
    runs = (100, 101, 102, 103, 104)
    before, after = ({"bandwidth_gbs": 40 * limit, "block_peak_gflops": 300} for limit in sides)
    (change,) = compare([record(*runs, **before)], [record(*(speed * r for r in runs), **after)]).changes
    assert change.machine_ratio == pytest.approx(1.3)
    assert change.verdict == verdict


def test_another_kv_cache_is_another_test():
    """Named where it is not the usual one of the weights, or llama-bench's."""
    runs = (100, 101, 102, 103, 104)
    kinds = [("int8", "bf16"), ("int8", "q8_0"), (None, "f16"), (None, "q8_0")]
    records = [record(*runs, dtype=dtype, type_k=cache) for dtype, cache in kinds]
    text = to_markdown(compare(records, records[1:2]))
    assert "| demo, int8, KV cache q8_0, threads 2, batch 1, tg64 @ d128 |" in text
    for named in ("int8", "gpt2", "gpt2, KV cache q8_0"):
        assert f"- only in the old file: demo, {named}, threads 2, batch 1, tg64 @ d128" in text


def test_markdown_of_a_comparison():
    old = [record(90, 100, 110, 95, 105), record(1, 2, n_gen=0, n_prompt=512, n_depth=0)]
    new = [record(190, 200, 220, 195, 205, cpu_info="Another CPU")]
    text = to_markdown(compare(old, new))
    row = next(line for line in text.splitlines() if line.startswith("| demo"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "demo, int8, threads 2, batch 1, tg64 @ d128",
        "100.0",
        "200.0",
        "+100.0%",
        "-10.0% +10.0%, -5.0% +10.0%",
        "other machine",
    ]
    assert "- Two files of different times also differ by what else the machine did" in text
    assert "--compare OLD NEW OLD NEW OLD NEW OLD NEW." in text
    assert "- only in the old file: demo, int8, threads 2, batch 1, pp512" in text
    assert "- the files are not from one machine: A CPU, Another CPU" in text
    assert "- other machine: " in text
    assert not any(f"- {word}" in text for word in ("faster", "beyond", "machine changed", "not in turns", "too few"))


def test_a_comparison_in_turns_explains_its_own_words():
    old, new = turns(10, 11, 10, 11), turns(12, 13, 12, 13, first=1)
    text = to_markdown(compare(old, new))
    assert "- faster, slower: in files measured in turns" in text
    assert "other machine" not in text
    assert "Two files of different times" not in text
    assert "- too few: mere chance" in to_markdown(compare(old[:2], new[:2]))


def test_records_of_a_comparison():
    found = compare([record(1, 2, 3, 4, 5), record(1, n_gen=2)], [record(2, 4, 6, 8, 10), record(1, n_gen=3)])
    both, *others = found.records
    assert (both["old_ts"], both["new_ts"], both["ratio"], both["verdict"]) == (3, 6, 2, "within noise")
    assert both["dtype"] == "int8"
    assert [both[f"old_{name}"] for name in ("low_ts", "high_ts", "samples")] == [1, 5, 5]
    assert [both[f"new_{name}"] for name in ("low_ts", "high_ts", "samples")] == [2, 10, 5]
    assert [(r["n_gen"], r["verdict"], r["old_ts"], r["new_ts"], r["ratio"]) for r in others] == [
        (2, "only in the old file", 1, None, None),
        (3, "only in the new file", None, 1, None),
    ]
    assert len({tuple(r) for r in found.records}) == 1, "CSV has one header"


def test_llama_benchs_own_records_compare(tmp_path):
    theirs = {"model_filename": "m.gguf", "model_type": "gpt2 Q4_K", "n_threads": 8, "cpu_info": "A CPU"}
    theirs |= {"n_prompt": 512, "n_gen": 0, "n_depth": 0, "samples_ts": [1.0, 2.0]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(theirs)}\n\n{json.dumps({**theirs, 'n_threads': 4})}\n")
    records = read_records(tmp_path / "a.jsonl")
    found = compare(records, records)
    assert len(found.changes) == 2
    assert "| m.gguf, gpt2 Q4_K, threads 8, pp512 |" in to_markdown(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no records"),
        ("[]", "holds no records"),
        ("| model |", "is no JSON or JSONL"),
        ("[1]", "holds no records"),
        ('{"n_prompt": 1, "n_gen": 0}', "holds no records"),
        ('{"n_prompt": 1, "n_gen": 0, "samples_ts": []}', "holds no records"),
        ('{"n_prompt": 1, "n_gen": 0, "samples_ts": [1, 0]}', "holds no records"),
        ('{"n_prompt": 1, "n_gen": 0, "samples_ts": "12"}', "holds no records"),
        ('{"n_prompt": 1, "samples_ts": [1]}', "holds no records"),
        ('{"n_threads": 1, "n_prompt": 1, "n_gen": 0, "samples_ts": [1]}', "holds no records"),
        ('{"model_filename": "m", "n_prompt": 1, "n_gen": 0, "samples_ts": [1]}', "holds no records"),
        (json.dumps(record(1, bandwidth_gbs="40")), "holds no records"),
        (json.dumps(record(1, head_peak_gflops=0)), "holds no records"),
        (json.dumps(record(1, n_threads="2")), "holds no records"),
        (json.dumps(record(1, dtype=["int8"])), "holds no records"),
        ("[" * 100_000, "is no JSON or JSONL"),
        ('{\n  "a": 1\n}', "holds no records"),  # JSON in several lines
        ("3", "holds no records"),
        ('[{"preset": "cpu-study", "samples_ns": [1]}]', "holds the records of a preset, .* without --preset"),
    ],
)
def test_a_file_that_is_no_bench_is_refused(tmp_path, text, message):
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(RequestError, match=message):
        read_records(file)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="is no JSON or JSONL"):
        read_records(tmp_path / "file")


def test_the_command(tmp_path, capsys):
    for name, samples in (("old", (1, 2, 3, 4, 5)), ("new", (6, 7, 8, 9, 10))):
        (tmp_path / name).write_text(json.dumps([record(*samples)]))
    files = [str(tmp_path / name) for name in ("old", "new")]
    assert cli.main(["bench", "--compare", *files]) == 0
    assert "| 3.000 | 8.000 | +166.7% |" in capsys.readouterr().out
    assert cli.main(["bench", "--json", "--compare", *files]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["verdict"] == BEYOND


def test_the_command_takes_pairs_in_turns(tmp_path, capsys):
    sides = turns(10, 11, 10, 11), turns(12, 13, 12, 13, first=1)
    files = []
    for i, pair in enumerate(zip(*sides, strict=True)):
        for name, one in zip(("old", "new"), pair, strict=True):
            files.append(tmp_path / f"{name}{i}.json")
            files[-1].write_text(json.dumps([one]))
    assert cli.main(["bench", "--compare", *map(str, files), "--output", str(tmp_path / "found.csv")]) == 0
    assert '"faster"' in (tmp_path / "found.csv").read_text(encoding="utf-8")


def test_files_without_a_common_test_fail(tmp_path, capsys):
    for name, threads in (("old", 1), ("new", 2)):
        (tmp_path / name).write_text(json.dumps([record(1, 2, n_threads=threads)]))
    assert cli.main(["bench", "--compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    out, err = capsys.readouterr()
    assert out.count("- only in the ") == 2
    assert "no test is on both sides of --compare: measure both with the same model, --dtype, --threads" in err
