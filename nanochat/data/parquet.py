"""Rows of a .parquet, as objects of the wanted columns. A block is a row group, or an equal share of a large one."""

import bisect
import functools
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from nanochat.data.formats import damage_in_one_line, refuse_bomb, without_nulls
from nanochat.ground.cli import UserError
from nanochat.ground.text_files import Columns, DataFile

MAX_GROUP_BYTES = 16 << 20  # a row group before it is split
BATCH_ROWS = 4  # rows that are decoded together
SHORT_BYTES = 32 << 10  # a row up to this size may be as often in a file as it likes,
MAX_REPEATED_BYTES = 512 << 20  # up to this size of a row group
CACHE_BYTES = 128 << 20  # blocks of one file, for rows in any order


class ParquetFile(DataFile):
    """The rows of a parquet file as dictionaries of the wanted columns."""

    has_nulls = True

    def __init__(self, path: Path, columns: Columns = None):
        self.path = path
        self._opened_as = self._identity()
        self.lock = threading.Lock()
        # Text that is not UTF-8, and dates and numbers that Python lacks, appear only when they become rows.
        self.damage_errors = (pyarrow.ArrowException, OSError, ValueError, OverflowError)
        self.rows: Iterator[Any] = iter(())  # rows of the present row group
        self.place = (-1, 0)  # that row group, and the row that comes next
        with damage_in_one_line(path, "parquet file", *self.damage_errors):
            # Buffered, not pre-buffered: this takes 12 MB instead of a whole column chunk (183 MB for one of 171 MB).
            self.file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
            names = self.file.schema_arrow.names
            self.columns = columns(names) if callable(columns) else columns and list(columns)
            self.is_flat = len(self.file.schema.names) == len(names)
            for column in self.columns or ():
                if column not in names:
                    raise UserError(f"{path} has no column {column!r}: its columns are {', '.join(names)}")
            groups = [self.file.metadata.row_group(group) for group in range(self.file.num_row_groups)]
        self.packed_bytes: list[int] = []
        for group in groups:
            chunks = [group.column(place) for place in range(group.num_columns)]
            self.packed_bytes.append(sum(chunk.total_compressed_size for chunk in chunks))
            values = max((chunk.num_values for chunk in chunks), default=0)
            refuse_bomb(path, max(group.total_byte_size, 8 * values), self.packed_bytes[-1])
        # The size of a row group is the size of the one wanted column if all columns are flat, else of all columns.
        group_bytes = [group.total_byte_size for group in groups]
        if self.columns is not None and len(self.columns) == 1 and self.is_flat:
            place = names.index(self.columns[0])
            group_bytes = [group.column(place).total_uncompressed_size for group in groups]
        # Blocks have at most 16 MiB. A file has 64 or more of them if its rows are enough for a good shuffle.
        self.group_ends = list(itertools.accumulate(group.num_rows for group in groups))
        starts = []
        for group, end, size in zip(groups, self.group_ends, group_bytes, strict=True):
            for_shuffling = min(-(-64 // len(groups)), group.num_rows // 8)
            shares = max(-(-size // MAX_GROUP_BYTES), for_shuffling, 1)
            step = max(-(-group.num_rows // shares), 1)
            starts += range(end - group.num_rows, end, step)
        self.starts = np.array([*starts, sum(group.num_rows for group in groups)], dtype=np.int64)
        cached_blocks = max(CACHE_BYTES * len(starts) // max(sum(group_bytes), 1), 1)  # that fill CACHE_BYTES
        self.cached_block = functools.lru_cache(cached_blocks)(self._block)

    def read(self, first: int, end: int) -> list[Any]:
        self._require_unchanged()
        group = bisect.bisect_right(self.group_ends, first)
        with self.lock, damage_in_one_line(self.path, "parquet file", *self.damage_errors):
            if self.place[0] != group or self.place[1] > first:  # a jump: start this row group again
                self.rows = self._rows_of(group)
                self.place = (group, self.group_ends[group] - self.file.metadata.row_group(group).num_rows)
            rows = list(itertools.islice(self.rows, first - self.place[1], end - self.place[1]))
            self.place = (group, end)
        self._require_unchanged()
        assert len(rows) == end - first
        return rows

    def _rows_of(self, group: int) -> Iterator[Any]:
        """The rows of a row group, a few at a time."""
        # A dictionary stores a value once, however many rows have it: 600 bytes hold 1,000 rows of 3 MB. So count the
        # decoded bytes, in steps so small that one step does not fill the memory. Short values may repeat, such as a
        # system prompt of 2 KB in each of 40,000 rows.
        decoded_bytes = 0
        decoded_rows = 0
        for batch in self.file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=self.columns):
            decoded_bytes += batch.nbytes
            decoded_rows += len(batch)
            if decoded_bytes > min(decoded_rows * SHORT_BYTES, MAX_REPEATED_BYTES):
                refuse_bomb(self.path, decoded_bytes, self.packed_bytes[group])
            rows = batch.to_pylist()
            for row in rows:
                yield row if self.is_flat else {name: without_nulls(value) for name, value in row.items()}

    def row(self, row: int) -> Any:
        block = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.cached_block(block)[row - int(self.starts[block])]

    def _block(self, block: int) -> list[Any]:
        return self.read(int(self.starts[block]), int(self.starts[block + 1]))
