"""How replies spell tokens: each by a name of its own."""

from support.paths import DEMO
from tinygpt.server.replies.token_names import TokenNames
from tinygpt.tokenizer.tokenizer import Tokenizer


def test_no_two_ids_of_a_padded_vocabulary_share_a_name():
    names = TokenNames(Tokenizer.from_folder(DEMO))
    assert len({names.name(i) for i in range(8200)}) == 8200
    assert names.name(8199) == "token_id:8199"
    assert names.bytes_of(8199) == b""
