"""What tests know of the embedded demo, as its own files say it: another model may take its place."""

from support.paths import DEMO
from tinygpt.weights.families.gpt2 import model_config
from tinygpt.weights.files import read_json_object

CONFIG = model_config(read_json_object(DEMO / "config.json"))
VOCAB_SIZE = CONFIG.vocab_size
(EOS,) = CONFIG.eos_token_ids  # the last id, and the only special token
