"""What the shrink and the expand kernel share.

What they compute is said in ``reference``, what they read in ``tiles`` and ``slot_table``.

Tiles of one row multiply and sum without tensor cores, for there the weights' bytes are all that counts; taller tiles
use ``tl.dot``. Accumulation is in float32. K's partial sums lie side by side in v and the expand adds them in a fixed
order. v's columns: each slice's ranks begin at a multiple of ``SLICE_COLUMNS``, or, where that is 0, at the sum of the
ranks before it.

A shrink's programs are shared out evenly among the tiles in use, and those of a tile among its adapter's own ranks and
then K, so that neither room for more tiles nor the largest rank of others leaves them idle.

With ``PDL`` (Hopper's programmatic dependent launch) a kernel may start while the one before it still runs, and waits
where it first needs, or overwrites, what that one has to do with. One program at least must wait, or the kernel could
end before the one before. Tables, tiles and weights are read before: no kernel of the step writes them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weights_at(address, element_type: tl.constexpr):
    """A pointer from a table's address; ``SlotTables`` sees to the alignment."""
    return tl.multiple_of(address.to(tl.pointer_type(element_type)), 16)


@triton.jit
def load_tile(tiles_ptr, tile):
    """A tile's first row, how many rows it has (0: it is unused), and its slot."""
    first_row = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    return first_row, tl.load(tiles_ptr + tile * 4 + 1), tl.load(tiles_ptr + tile * 4 + 2).to(tl.int64)


@triton.jit
def tiles_in_use(tiles_ptr):
    """How many tiles share the programs; 1 where none is in use."""
    return tl.maximum(tl.load(tiles_ptr + 3), 1)


@triton.jit
def splits_of(rank_sum, tile_programs, split_k, BLOCK_R: tl.constexpr):
    """How many of a tile's programs share K, ``split_k`` at most: as many as its blocks of ranks leave."""
    blocks = tl.maximum((rank_sum + BLOCK_R - 1) // BLOCK_R, 1)
    return tl.minimum(tl.maximum(tile_programs // blocks, 1), split_k)
