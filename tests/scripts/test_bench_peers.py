"""scripts/bench_peers.py: ratios, limits and the table, and peers that cannot be had. No peer is installed here."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.peers import measure, prepare
from scripts.peers.cases import CASES, Case, bytes_read, floor
from scripts.peers.catalogue import AVX2, DTYPES, MACHINE, OURS, PEERS, Peer, held_to_avx2
from scripts.peers.checkpoints import make, make_random
from scripts.peers.engine import SteppingEngine
from scripts.peers.prepare import Place, Setup
from scripts.peers.processes import PeerError, Worker, make_form, provide_folder, run_logged
from scripts.peers.table import Agreement, Row, markdown
from tinygpt.kernels.cpu.simd.targets import choose
from tinygpt.weights.config import ModelConfig

SMALL_GPT2 = {"n_layer": 12, "n_embd": 768, "n_inner": None, "vocab_size": 50257}
DECODE_1, _, DECODE_32, PREFILL = CASES
LIMITS = {"bandwidth": 35e9, "float32": 230e9, "bfloat16": 460e9, "int8": 920e9, "int4": 920e9}


def row(**ms: list[float]) -> Row:
    return Row(DECODE_1, "int8", ms)


def test_ratio_is_the_best_peers_best_time_over_ours():
    measured = row(tinygpt=[5.0, 4.0], slow=[9.0, 10.0], fast=[20.0, 6.0])
    assert measured.best_peer == "fast"
    assert measured.ratio == 1.5


@pytest.mark.parametrize("ms", [{"tinygpt": [1.0]}, {"tinygpt": [1.0], "failed": []}, {"tinygpt": [], "peer": [1.0]}])
def test_no_ratio_without_two_sides(ms):
    assert row(**ms).ratio is None


# The figures known for GPT-2 124M: 124 M weights a token, 7.9 GFLOP for 32 sequences, 92 GFLOP for a prefill of 512.
@pytest.mark.parametrize(
    ("case", "dtype", "seconds", "limit"),
    [
        (DECODE_1, "float32", 498e6 / 35e9, "bandwidth"),
        (DECODE_1, "int8", 126e6 / 35e9, "bandwidth"),
        (DECODE_1, "int4", 95e6 / 35e9, "bandwidth"),
        (DECODE_32, "float32", 8e9 / 230e9, "tile peak"),
        (DECODE_32, "int8", 8e9 / 920e9, "tile peak"),
        (PREFILL, "float32", 92e9 / 230e9, "tile peak"),
        (PREFILL, "bfloat16", 92e9 / 460e9, "tile peak"),
    ],
)
def test_floor_is_what_the_machine_allows(case, dtype, seconds, limit):
    found = floor(case, SMALL_GPT2, dtype, LIMITS)
    assert found.limit == limit
    assert found.ms == pytest.approx(1e3 * seconds, rel=0.03)


def test_every_cached_position_of_every_sequence_is_read():
    at_0, at_1000 = (bytes_read(Case("", 8, prompt, 2), ModelConfig(), "bfloat16") for prompt in (0, 1000))
    assert at_1000 - at_0 == 8 * 1000 * 2 * 12 * 768 * 2
    at_1000_in_int8 = bytes_read(Case("", 8, 1000, 2), ModelConfig(), "bfloat16", "int8")
    assert at_1000_in_int8 - at_0 == 8 * 1001 * 2 * 12 * (768 + 12 * 4) - 8 * 2 * 12 * 768 * 2  # from position 1 on


def test_share_of_the_limit():
    measured = row(tinygpt=[4.0, 5.0])
    measured.floor = floor(DECODE_1, SMALL_GPT2, "int8", LIMITS)
    assert measured.share == measured.floor.ms / 4.0


def test_table_names_the_absent_and_marks_the_best():
    measured = row(tinygpt=[4.0, 6.0, 5.0], peer=[8.0], other=[9.0])
    measured.absent = ["broken"]
    *_, line = markdown([measured], ["tinygpt", "peer", "other", "broken", "unrelated"]).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    times = ["4.00 (5.00)", "**8.00 (8.00)**", "9.00 (9.00)"]
    assert cells == ["decode, batch 1", "int8", *times, "absent", "-", "**2.00**", "-"]


def test_agreement():
    agreement = Agreement.of([1.0, 2.5, 0.0], [1.0, 2.0, 3.0])
    assert not agreement.top_1
    assert agreement.max_difference == 3.0
    assert Agreement.of([0.0, 1.0], [0.0, 2.0]).top_1


def test_steps_are_timed_without_the_prompt_pass():
    class Counting(SteppingEngine):
        def start(self, ids):
            self.steps = 0

        def step(self):
            self.steps += 1

    engine = Counting()
    assert engine.step_ms([[1, 2]], 10) > 0
    assert engine.steps == 9


def test_every_peer_has_its_module_and_dtypes():
    for peer in (*PEERS, OURS, MACHINE):
        source = Path(prepare.__file__).with_name(f"{peer.module}.py").read_text()
        assert "class Engine" in source
        assert re.search(r"^def make\(", source, re.M) is not None or not peer.makes_files
        assert set(peer.forms) <= set(DTYPES)


def test_peers_held_to_avx2_are_told_or_built_so_or_left_out():
    held = {peer.name: peer for peer in held_to_avx2(PEERS)}
    assert set(held) == {peer.name for peer in PEERS} - {"onnxruntime"}
    built = held["llama.cpp"]
    assert "-DGGML_NATIVE=OFF -DGGML_AVX512=OFF" in built.build_environment["CMAKE_ARGS"]
    assert "GGML_NATIVE=ON" not in built.build_environment["CMAKE_ARGS"]
    original = next(peer for peer in PEERS if peer.name == "llama.cpp")
    assert built.module + built.build != original.module + original.build  # it does not take the other one's place
    assert set(held["transformers"].forms) == {"float32"}  # the other would take half an hour
    assert held["ctranslate2"].requirements
    assert not held["ctranslate2"].build
    assert (
        choose(lambda name: f"+{name}" in AVX2["NUMBA_CPU_FEATURES"].split(","), AVX2["NUMBA_CPU_NAME"]).name == "AVX2"
    )


def test_peer_that_cannot_be_installed_is_absent_with_the_reason(tmp_path, monkeypatch):
    def provide(peer, work):
        if peer.name == "gone":
            raise PeerError("no wheel for this Python")
        return Path(sys.executable)

    monkeypatch.setattr(prepare, "provide_python", provide)
    gone = Peer("gone", "gone", ("gone==1",), {"float32": "F32", "int8": "Q8_0"})
    setup = prepare.prepare(tmp_path, None, "tiny", [gone], ["int8", "int4"])
    assert setup.absent == {("gone", "int8"): "no wheel for this Python"}
    assert set(setup.places) == {(name, dtype) for name in ("tinygpt", "machine") for dtype in ("int8", "int4")}


def test_peer_that_cannot_make_its_form_leaves_nothing_that_looks_done(tmp_path):
    def fill(folder: Path) -> None:
        make_form(Path(sys.executable), "no_such_module", "checkpoint", folder, "int8")

    with pytest.raises(PeerError, match="no_such_module"):
        provide_folder(tmp_path / "form", fill)
    assert not (tmp_path / "form").exists()


def test_a_form_is_made_once(tmp_path):
    made = []
    for _ in range(2):
        assert provide_folder(tmp_path / "form", made.append) == tmp_path / "form"
    assert len(made) == 1


def test_failed_command_is_told_by_its_last_line(tmp_path):
    program = "import sys; print('before'); sys.exit('disk full')"
    with pytest.raises(PeerError, match="disk full"):
        run_logged([sys.executable, "-c", program], tmp_path / "log", None)


# `table` stands in for an engine: it can be imported and has no Engine, so its process ends at once.
DEAD = Peer("dead", "table", (), {"int8": "int8"})


def test_worker_that_dies_says_why(tmp_path):
    worker = Worker(Path(sys.executable), DEAD, tmp_path, "int8", 1, tmp_path / "log")
    with pytest.raises(PeerError, match="has no attribute 'Engine'"):
        worker.call("prefill_ms", ids=[[1]])
    worker.close()


def test_engine_that_fails_is_absent_from_then_on(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "PAUSE", 0)
    place = Place(DEAD, Path(sys.executable), tmp_path)
    setup = Setup(tmp_path, {"vocab_size": 10}, {("dead", "int8"): place})
    with measure.Engines(setup, "int8", 1, tmp_path / "logs") as engines:
        assert engines.measure(DECODE_1, 1).ms == {"dead": []}
        assert engines.measure(DECODE_1, 1).ms == {}
    assert "has no attribute 'Engine'" in setup.absent["dead", "int8"]


def test_our_worker_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "PAUSE", 0)
    checkpoint = provide_folder(tmp_path / "checkpoint", lambda to: make_random("tiny", to))
    setup = Setup(
        checkpoint, {"vocab_size": 50257}, {("tinygpt", "float32"): Place(OURS, Path(sys.executable), checkpoint)}
    )
    with measure.Engines(setup, "float32", 1, tmp_path / "logs") as engines:
        rows = [engines.measure(case, 2) for case in (Case("decode", 2, 300, 4), Case("prefill", 1, 8, 1))]
    assert not setup.absent
    for measured in rows:
        assert len(measured.ms["tinygpt"]) == 2
        assert min(measured.ms["tinygpt"]) > 0


def test_the_kv_cache_is_of_the_dtype_asked_for_where_an_engine_has_a_choice(tmp_path):
    checkpoint = provide_folder(tmp_path / "checkpoint", lambda to: make_random("tiny", to))

    def logits(peer: Peer, *kv_cache_dtype: str) -> list[float]:
        places = {("tinygpt", "float32"): Place(peer, Path(sys.executable), checkpoint)}
        setup = Setup(checkpoint, {"vocab_size": 50257}, places)
        with measure.Engines(setup, "float32", 1, tmp_path / "logs", *kv_cache_dtype) as engines:
            [(_, found)] = engines.last_logits()
        return found

    own, int8 = logits(OURS), logits(OURS, "int8")
    assert own != int8
    assert own == pytest.approx(int8, abs=0.1)
    assert logits(replace(OURS, has_caches=False), "int8") == own


class CutOff:
    """Stands in for `Engines`: measures one case, and is interrupted at the next."""

    def __init__(self, *_):
        self.limits, self._cases = [], 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def last_logits(self):
        return []

    def measure(self, case: Case, count: int) -> Row:
        self._cases += 1
        if self._cases == 2:
            raise KeyboardInterrupt
        return Row(case, "int8", {"tinygpt": [1.0] * count})


def test_a_run_that_is_cut_off_keeps_what_it_has_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(prepare.__file__).parents[1]))
    import bench_peers

    kept = tmp_path / "results.json"
    monkeypatch.setattr(bench_peers, "prepare", lambda *_: Setup(tmp_path, {"n_positions": 1024}))
    monkeypatch.setattr(bench_peers, "Engines", CutOff)
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--dtypes", "int8", "--repeats", "3", "--json", str(kept)])
    with pytest.raises(KeyboardInterrupt):
        bench_peers.main()
    assert [(row["case"], row["ms"]) for row in json.loads(kept.read_text())["rows"]] == [
        (DECODE_1.name, {"tinygpt": [1.0, 1.0, 1.0]})
    ]


def test_plain_form_holds_the_same_tensors(tmp_path):
    for name in ("random", "plain"):
        (tmp_path / name).mkdir()
    make_random("tiny", tmp_path / "random")
    make(tmp_path / "random", tmp_path / "plain", "float32")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("random", "plain"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
