"""The phases of a step, and how many items each has: as the kernels in kernels/cpu/layers have them."""

from dataclasses import dataclass

from tinygpt.bench.work import BYTES, CACHE_BYTES, CACHES, TILES
from tinygpt.config import ModelConfig
from tinygpt.kernels.cpu.layers.attention import ENOUGH_ITEMS
from tinygpt.kernels.cpu.layers.epilogue import ROW_BLOCK
from tinygpt.kernels.cpu.packing.pack import panel_count
from tinygpt.kernels.cpu.runtime.team import ROWS_PER_ITEM
from tinygpt.kernels.cpu.simd.tiles import PANEL, TILE_ROWS


@dataclass(frozen=True)
class Load:
    """What a step computes: new tokens of each of so many sequences, which attend to `context` positions each."""

    sequences: int = 1
    tokens: int = 1
    context: int = 256

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens


@dataclass(frozen=True)
class Phase:
    """Items of a kernel, all alike."""

    name: str
    items: int
    bytes: float  # that an item reads from memory
    operations: float
    tiles: str = ""  # that multiply
    rows: int = 0  # that it goes through one by one


def phases_of(config: ModelConfig, dtype: str, load: Load) -> list[Phase]:
    """Of one step, in order. ValueError for a model that is not like GPT-2."""
    if config.structure:
        raise ValueError(f"{', '.join(config.structure)}: only models like GPT-2 are predicted")
    n, c, f, heads = load.rows, config.n_embd, config.inner_size, config.n_head
    (in_block, in_head), (tiles, head_tiles) = BYTES[dtype], TILES[dtype]
    in_cache = CACHE_BYTES[CACHES[dtype]]
    tokens = min(n, ROWS_PER_ITEM)
    rows = Phase("rows", -(-n // ROWS_PER_ITEM), 0, 0, rows=tokens)
    layer = [
        rows,  # ln_1
        _product("c_attn", n, 3 * c, c, in_block, tiles),
        Phase("write_kv", heads, 0, 0, rows=max(n // heads, 1)),
        _attention(config, load, in_cache),
        *([] if dtype == "float32" else [rows]),  # attended values are converted
        _product("attn_proj", n, c, c, in_block, tiles),
        rows,  # ln_2
        _product("c_fc", n, f, c, in_block, tiles),
        _product("mlp_proj", n, c, f, in_block, tiles),
    ]
    wanted = load.sequences
    scored = Phase("ln_f", -(-wanted // ROWS_PER_ITEM), 0, 0, rows=min(wanted, ROWS_PER_ITEM))
    logits = _product("head", wanted, config.vocab_size, c, in_head, head_tiles)
    chosen = Phase("choose_greatest", 1, 0, 0)  # nothing is, unless a call takes several steps
    return [rows, *layer * config.n_layer, scored, logits, chosen]


def _product(name: str, rows: int, n: int, k: int, weight_bytes: float, tiles: str) -> Phase:
    """An item is a panel and a block of rows; a panel comes from memory once, and for other blocks from a cache."""
    blocks = -(-rows // ROW_BLOCK)
    height = min(rows, ROW_BLOCK)
    return Phase(name, panel_count(n) * blocks, weight_bytes * PANEL * k / blocks, 2 * height * PANEL * k, tiles)


def _attention(config: ModelConfig, load: Load, cache_bytes: int) -> Phase:
    """An item is a tile of queries and a few heads: see `attend`."""
    count, share = tiles_of_queries(load), heads_together(config, load)
    products = 2 * load.context * config.head_size * share  # of keys, and of values
    operations = 2 * products * min(load.tokens, TILE_ROWS)
    return Phase("attend", -(-config.n_head // share) * count, cache_bytes * products, operations, "float32")


def tiles_of_queries(load: Load) -> int:
    return load.sequences * -(-load.tokens // TILE_ROWS)


def heads_together(config: ModelConfig, load: Load) -> int:
    """How many heads an item of `attend` has."""
    count = tiles_of_queries(load)
    return max(min(TILE_ROWS * count // load.rows, config.n_head * count // ENOUGH_ITEMS), 1)
