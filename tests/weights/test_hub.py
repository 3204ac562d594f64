"""A Hub id from first download to offline use, against a Hub on the loopback interface."""

import contextlib
import io
import os
import sys
import warnings

import pytest
from safetensors.numpy import save_file

from support.apart import told
from support.hub_server import HubServer
from support.tiny_checkpoint import random_tensors, write_checkpoint, write_json
from support.torch_files import torch_bytes
from tinygpt.errors import CheckpointError
from tinygpt.weights.open import open_checkpoint

BIAS = random_tensors()["transformer.ln_f.bias"].tolist()
UNWANTED = ("tf_model.h5", "README.md", ".gitattributes", "onnx/model.safetensors", "training_args.bin")


def opened(home, endpoint, model, **environment):
    """What a fresh process says that opens `model` with its cache in `home`, and its stderr."""
    (line,), stderr = opened_all(home, endpoint, [model], **environment)
    return line, stderr


def opened_all(home, endpoint, models, **environment):
    """What it says of each of several, and its stderr: huggingface_hub reads its environment when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    kept = {name: value for name, value in kept.items() if not name.startswith("HF_")}
    env = kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **environment}
    return told(open_models, str(home.parent), env, models, patience=100)[0]


def open_models(tell, folder, environment, models):
    assert "huggingface_hub" not in sys.modules
    warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of each fork
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    answers = []
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        for model in models:
            try:
                checkpoint = open_checkpoint(model)
            except CheckpointError as error:
                answers.append({"error": str(error)})
            else:
                files = sorted(path.name for path in checkpoint.path.iterdir())
                answers.append({"files": files, "bias": checkpoint.tensor("ln_f.bias").tolist()})
    tell((answers, stderr.getvalue()))


def hub_folder(folder):
    """A checkpoint with tokenizer files and with what a Hub repository holds besides."""
    write_checkpoint(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": [2]})
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    for name in (*UNWANTED, "pytorch_model.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"never wanted")
    return folder


def bin_folder(folder):
    folder = hub_folder(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(torch_bytes(random_tensors()))
    return folder


def sharded_folder(folder):
    folder = hub_folder(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + len(name) % 2:05}-of-00002.safetensors" for name in random_tensors()}
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in random_tensors().items() if weight_map[n] == shard}, folder / shard)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


COMMON = ["config.json", "generation_config.json", "merges.txt", "vocab.json"]
FOLDERS = {
    "safetensors": (hub_folder, ["model.safetensors"]),
    "bin": (bin_folder, ["pytorch_model.bin"]),
    "shards": (
        sharded_folder,
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
    ),
}


@pytest.mark.parametrize("form", FOLDERS)
def test_only_what_is_needed_is_downloaded(tmp_path, form):
    make, weights = FOLDERS[form]
    home = tmp_path / "home"
    with HubServer({"owner/tiny": make(tmp_path / "repo")}) as hub:
        first, progress = opened(home, hub.url, "owner/tiny")
        assert first == {"files": sorted(COMMON + weights), "bias": BIAS}
        assert hub.downloaded() == first["files"]
        assert "Fetching" in progress
    assert opened(home, hub.url, "owner/tiny")[0] == first  # no network, nobody said so


def test_downloaded_once_then_cached_then_offline(tmp_path):
    home = tmp_path / "home"
    with HubServer({"owner/tiny": hub_folder(tmp_path / "repo")}) as hub:
        first, _ = opened(home, hub.url, "owner/tiny")
        hub.requests.clear()
        assert opened(home, hub.url, "owner/tiny")[0] == first
        assert hub.downloaded() == []
        hub.requests.clear()
        assert opened(home, hub.url, "owner/tiny", HF_HUB_OFFLINE="1")[0] == first
        assert hub.requests == []
    assert opened(home, hub.url, "owner/tiny", HF_HUB_OFFLINE="1")[0] == first


def test_a_local_folder_needs_no_hub(tmp_path):
    hub_folder(tmp_path / "owner")
    with HubServer({}) as hub:
        assert opened(tmp_path / "home", hub.url, "owner")[0]["bias"] == BIAS
        assert hub.requests == []


def test_what_cannot_be_had_is_a_sentence(tmp_path):
    home = tmp_path / "home"
    folders = {"owner/tiny": hub_folder(tmp_path / "repo"), "owner/none": tmp_path / "none"}
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "README.md").write_text("x")

    def errors(*models, **environment):
        return [line["error"] for line in opened_all(home, hub.url, models, **environment)[0]]

    with HubServer(folders, gated={"owner/tiny"}) as hub:
        unknown, gated, no_id, empty = errors("owner/tyni", "owner/tiny", "white space", "owner/none")
        assert "no such model on the Hub" in unknown
        assert "hf auth login" in unknown
        assert "asks for consent to its terms" in gated
        assert "nor a Hub id such as" in no_id
        assert "owner/none on the Hub has no config.json" in empty
        (offline,) = errors("owner/other", HF_HUB_OFFLINE="1")
        assert offline.startswith("'owner/other' is no local folder, and not wholly in the cache")
        assert "HF_HUB_OFFLINE forbids downloads" in offline
    (unreachable,) = errors("owner/other")
    assert "cannot be reached" in unreachable


def test_an_adapter_is_told_where_it_belongs(tmp_path):
    """Of its files only those are downloaded that say what it is."""
    folders = {"owner/lora": tmp_path / "lora", "owner/other": tmp_path / "other"}
    for folder, kind in zip(folders.values(), ("LORA", "LN_TUNING"), strict=True):
        folder.mkdir()
        write_json(folder / "adapter_config.json", {"peft_type": kind, "base_model_name_or_path": "gpt2"})
        (folder / "adapter_model.safetensors").write_bytes(b"never wanted")
    with HubServer(folders) as hub:
        lora, other = (line["error"] for line in opened_all(tmp_path / "home", hub.url, folders)[0])
        assert hub.downloaded() == ["adapter_config.json"]
    assert lora == (
        "owner/lora is an adapter of the type 'LORA', and no checkpoint: give the checkpoint that it was trained for, "
        "'gpt2', as the model, and its local folder as --lora."
    )
    assert other.endswith("as the model, and no adapter, as such ones are not implemented.")


def test_a_shard_that_is_a_pattern_is_refused_before_the_hub_sees_it(tmp_path):
    shards = ("*", "[a-z]*.md", "onnx/model.safetensors", ".")
    folders = {f"owner/tiny{i}": sharded_folder(tmp_path / f"repo{i}") for i in range(len(shards))}
    for shard, folder in zip(shards, folders.values(), strict=True):
        write_json(folder / "model.safetensors.index.json", {"weight_map": {"x": shard}})
    with HubServer(folders) as hub:
        for line in opened_all(tmp_path / "home", hub.url, [*folders])[0]:
            assert "no file name in its own folder" in line["error"]
        assert hub.downloaded() == sorted([*COMMON, "model.safetensors.index.json"])
