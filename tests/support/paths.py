"""Folders of the checkout, and the ids of the embedded demo as its own files name them."""

from pathlib import Path

from tinygpt.weights.families.gpt2 import model_config
from tinygpt.weights.files import read_json_object

ROOT = Path(__file__).resolve().parents[2]
HOW_TO_RECORD = "after a deliberate change: python tests/record.py"
DEMO = ROOT / "weights" / "demo"
DATA = (
    ROOT.parent / "shared" / "data"
)  # too large for the repository: tests that want it are skipped without it
CONFIG = model_config(read_json_object(DEMO / "config.json"))
VOCAB_SIZE = CONFIG.vocab_size
(EOS,) = CONFIG.eos_token_ids  # the last id, and the only special token
