"""The free list of the paged KV cache: which blocks are whose is the sequences' matter, which are free is ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` positions each, ids 0 .. num_blocks-1.

    Last freed, first allocated, so that a small load touches little memory. The ids say nothing about order or
    adjacency. Allocating more than is free or freeing what is not allocated raises ``ValueError``: a fault of ours.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a block pool needs at least one block and position, not {num_blocks} x {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._allocated = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        if count < 0 or not self.can_allocate(count):
            raise ValueError(f"cannot allocate {count} blocks: {self.num_free} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._allocated[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not (0 <= block < self.num_blocks and self._allocated[block]):
                raise ValueError(f"block {block} is not allocated")
            self._allocated[block] = 0
            self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that every block is either free or in exactly one of ``tables`` (all live block tables)."""
        owned = [block for table in tables for block in table]
        assert len(owned) == len(set(owned)), "a block is in two block tables"
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert not set(owned) & set(self._free), "a block in use is free"
        assert len(owned) + len(self._free) == self.num_blocks, "blocks are lost"
        assert all(self._allocated[block] for block in owned), "a block in use is not marked as allocated"
        assert sum(self._allocated) == len(owned), "a free block is marked as allocated"
