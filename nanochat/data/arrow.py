"""Rows of an .arrow, as objects of the wanted columns: what `save_to_disk` of the library `datasets` writes."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc

from nanochat.data.formats import damage_in_one_line, refuse_bomb, without_nulls
from nanochat.ground.text_files import Columns, DataFile

BLOCKS = 64  # a loader shuffles blocks, so a file has at least this many, if it has the rows
BLOCK_ROWS = 1024
FILE_MAGIC = b"ARROW1"  # Arrow has a format for streams, which `datasets` writes, and one for files


class ArrowFile(DataFile):
    """The rows of an Arrow table as dictionaries. The table stays on the disk, mapped."""

    has_nulls = True

    def __init__(self, path: Path, columns: Columns = None):
        self.path = path
        self._opened_as = self._identity()
        with damage_in_one_line(path, "Arrow file", pyarrow.ArrowException, OSError, ValueError):
            batches = []
            unpacked_bytes = 0
            source = pyarrow.memory_map(str(path))
            is_file = source.read(len(FILE_MAGIC)) == FILE_MAGIC
            source.seek(0)
            reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                # Offsets of a hostile file could lead out of its buffers, and batches may be packed.
                batch.validate(full=True)
                unpacked_bytes += batch.nbytes
                refuse_bomb(path, unpacked_bytes, self._opened_as[0])
                batches.append(batch)
            self.table = pyarrow.Table.from_batches(batches, reader.schema)
        names = self.table.column_names
        wanted = columns(names) if callable(columns) else columns
        if wanted is not None:
            self.table = self.table.select(wanted)
        rows = len(self.table)
        step = max(min(rows // BLOCKS, BLOCK_ROWS), 1)
        self.starts = np.array([*range(0, rows, step), rows], dtype=np.int64)

    def read(self, first: int, end: int) -> list[Any]:
        self._require_unchanged()
        with damage_in_one_line(self.path, "Arrow file", pyarrow.ArrowException, ValueError, OverflowError):
            rows = self.table.slice(first, end - first).to_pylist()
        self._require_unchanged()
        return [{name: without_nulls(value) for name, value in row.items()} for row in rows]
