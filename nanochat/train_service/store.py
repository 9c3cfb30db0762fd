"""What the service must not lose: one SQLite database, and the folders of weights that it names.

    service.db                                        models, requests, outcomes, checkpoints
    service.count                                     the number of its transactions, to notice one that is lost
    service.reserve                                   room for a deletion on a full disk
    models/<model>/<kind>/<name>.<request>/step_<n>/  weights; a folder is written once, and never changed

One transaction records a request before the client gets its promise, another one its outcome before the client gets its
result. A request runs at most once to an outcome: what has one is repeated only to rebuild a model in memory, from its
last snapshot on. The reason for a log instead of the state after every step: a batch has kilobytes, but the state of a
fully trained model gigabytes. A log also keeps the gradients since the last step. The cost is that a restart repeats up
to `snapshot_steps` steps: with the same bits on a CPU, up to rounding on an accelerator.
"""

import contextlib
import hashlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nanochat import model_folder
from nanochat.ground import storage
from nanochat.ground.cli import UserError

KEPT_RESULTS = 5_000  # finished requests of a model, or samples of an owner, whose results can still be fetched,
KEPT_BYTES = 1 << 26  # and how large these are together
RESERVE_BYTES = 1 << 20  # a file of this size makes room for a deletion on a full disk
EPHEMERAL = "ephemeral-"  # begins the names of unnamed sampler weights
DONE = "done"  # the state of a request that succeeded; of a failed one it is `TrainedModel.after_failure`
# The key is in front: the rows are stored in its order, without an index that could disagree with them.
TABLES = {
    "base": "name | sha256",
    "models": "id | session, owner, facts, covered, snapshot",  # the folder of the state after request `covered`
    "requests": "model, number | kind, content",  # those since the snapshot
    "runs": "model, number | state, pinned",  # how these requests ended; pinned: the folder that a load reads
    "outcomes": "id | owner, bucket, place, result",
    "checkpoints": "model, kind, name | folder, saved",
    "folders": "path | owner, bytes",
}
NAMES = {"folders": "path", "checkpoints": "folder", "models": "snapshot", "runs": "pinned"}  # columns with a folder
COLUMNS = {table: text.replace(" | ", ", ").split(", ") for table, text in TABLES.items()}


class Damaged(UserError):
    """What is on the disk is not what was written."""


class Store:
    """The database. Its lock guards the service too, except running requests."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "service.db"
        self.reserve = folder / "service.reserve"
        self.lock = threading.RLock()
        self.kept: dict[str, dict[str, int]] = {}  # by bucket: the outcomes and their bytes, the oldest first
        self.stale: list[str] = []  # outcomes that leave with the next transaction
        self.reading = ""  # the folder that a request loads: no row names it before the request's outcome
        if not self.path.exists() and any((folder / "models").glob("*")):
            raise UserError(f"{self.path} is missing, but models are there: restore it from a backup. {self._last()}")
        try:
            self.db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self.db.text_factory = lambda content: content.decode(errors="replace")  # the sum sees what is damaged
            for setting in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
                self.db.execute(f"PRAGMA {setting}")
            # Not `quick_check`, which does not see a key that is out of order.
            problem = self.db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            for table, text in TABLES.items():
                key = text.partition(" | ")[0]
                columns = ", ".join([*COLUMNS[table], "sum", f"PRIMARY KEY ({key})"])
                self.db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns}) WITHOUT ROWID")
            self._require_all_transactions()
            for id_, bucket, size in self.db.execute(
                "SELECT id, bucket, LENGTH(result) FROM outcomes ORDER BY place"
            ).fetchall():
                self.kept.setdefault(str(bucket), {})[str(id_)] = size or 0
        except sqlite3.Error as error:
            hint = f"restore {folder} from a backup. {self._last()}"
            if "full" in str(error):  # the first start
                hint = "make room on its disk"
            raise Damaged(f"{self.path} cannot be used ({str(error)[:200]}): {hint}".replace("\n", " ")) from None

    def _require_all_transactions(self) -> None:
        """Raises DatabaseError: when there were more transactions than the database has.

        SQLite reads its log of the last ones up to the first byte that is wrong, and takes that for the end.
        """
        self.counted = self.db.execute("PRAGMA user_version").fetchone()[0]
        self.counter = os.open(self.folder / "service.count", os.O_RDWR | os.O_CREAT, 0o600)
        text = os.pread(self.counter, 20, 0)
        expected = int(text) if text.isdigit() else 0
        if expected > self.counted:
            missing = f"it lacks the last {expected - self.counted:,} transactions that service.count has counted"
            raise sqlite3.DatabaseError(missing)

    def _last(self) -> str:
        """A line that names the newest snapshot that is whole."""
        steps = sorted(self.folder.glob("models/*/state/*/step_*"), key=lambda path: -path.stat().st_mtime)
        for step in steps:
            if model_folder.is_whole(step):
                return f"The last good snapshot is {step}"
        return "No snapshot is whole"

    def close(self) -> None:
        self.db.close()
        os.close(self.counter)

    # ------------------------------------------------------------------ rows

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """After the block all its changes are on the disk. Raises OSError: when they are not, and none is made."""
        with self.lock:
            try:
                self.db.execute("BEGIN IMMEDIATE")
                yield
                for id_ in self.stale:
                    self.delete("outcomes", id=id_)
                self.db.execute(f"PRAGMA user_version = {self.counted + 1}")
                self._commit()
            except BaseException as error:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise OSError(0, str(error)) from error
                raise
            self.stale = []
            self.counted += 1
            with contextlib.suppress(OSError):  # it is only counted
                os.pwrite(self.counter, b"%020d" % self.counted, 0)

    def _commit(self) -> None:
        self.db.execute("COMMIT")

    def put(self, table: str, **fields: Any) -> None:
        """Add a row, or replace the one with the same key."""
        values = [fields[column] for column in COLUMNS[table]]
        marks = ", ".join("?" * (len(values) + 1))
        self.db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", (*values, _sum(values)))

    def get(self, table: str, **key: Any) -> dict[str, Any] | None:
        """A row; None: there is none. Raises Damaged."""
        for row in self.rows(table, **key):
            if isinstance(row, Damaged):
                raise row
            return row
        return None

    def rows(self, table: str, **key: Any) -> "Iterator[dict[str, Any] | Damaged]":
        """The rows with these values, in the order of their keys; what is damaged as the error that names it."""
        where = " AND ".join(f"{column} = ?" for column in key) or "1"
        try:
            with self.lock:
                found = self.db.execute(f"SELECT * FROM {table} WHERE {where}", tuple(key.values())).fetchall()
        except sqlite3.Error as error:
            raise Damaged(f"{self.path} cannot be read ({error})") from None
        columns = COLUMNS[table]
        for *values, its_sum in found:
            if _sum(values) == its_sum:
                yield dict(zip(columns, values, strict=True))
            else:
                names = TABLES[table].partition(" | ")[0].count(",") + 1
                key_text = " ".join(str(value)[:100] for value in values[:names])
                yield Damaged(f"{self.path} is damaged ({table}: {key_text})")

    def delete(self, table: str, **key: Any) -> None:
        where = " AND ".join(f"{column} = ?" for column in key)
        self.db.execute(f"DELETE FROM {table} WHERE {where}", tuple(key.values()))

    def delete_up_to(self, table: str, model: str, number: int) -> None:
        self.db.execute(f"DELETE FROM {table} WHERE model = ? AND number <= ?", (model, number))

    # ------------------------------------------------------------------ what the service asks

    def outline(self, model: str) -> list[tuple[int, int, str]]:
        """The number, the size and the state of a model's requests, unchecked: running one reads it."""
        query = (
            "SELECT number, LENGTH(content), COALESCE(state, '') FROM requests LEFT JOIN runs USING (model, number) "
            "WHERE model = ? ORDER BY number"
        )
        with self.lock:
            return self.db.execute(query, (model,)).fetchall()

    def request(self, model: str, number: int) -> dict[str, Any]:
        """A request and its run, if it had one. Raises Damaged."""
        found = self.get("requests", model=model, number=number)
        if found is None:
            raise Damaged(f"{self.path} is damaged (it lacks request {number} of {model})")
        return found | (self.get("runs", model=model, number=number) or {"state": "", "pinned": ""})

    def settle(self, request_id: str, owner: str, bucket: str, result: bytes) -> None:
        """Keep an outcome, and let the oldest ones of its bucket go; in a transaction."""
        self.put("outcomes", id=request_id, owner=owner, bucket=bucket, place=self.counted, result=result)
        kept = self.kept.setdefault(bucket, {})
        kept[request_id] = len(result)
        while len(kept) > 1 and (len(kept) > KEPT_RESULTS or sum(kept.values()) > KEPT_BYTES):
            oldest = next(iter(kept))
            kept.pop(oldest)
            self.stale.append(oldest)

    def used_bytes(self, owner: str) -> int:
        with self.lock:
            return int(self.db.execute("SELECT TOTAL(bytes) FROM folders WHERE owner = ?", (owner,)).fetchone()[0])

    def unused(self) -> list[Path]:
        """Forget the folders that nothing names any more; in a transaction. The caller removes them afterwards."""
        named = " UNION ".join(f"SELECT {NAMES[table]} FROM {table}" for table in ("checkpoints", "models", "runs"))
        query = f"SELECT path FROM folders WHERE path NOT IN ({named}) AND path != ?"
        found = [path for (path,) in self.db.execute(query, (self.reading,))]
        for path in found:
            self.delete("folders", path=path)
        return [self.folder / path for path in found]

    def forget(self, change: Callable[[], None]) -> None:
        """Make a change in a transaction, and remove the weights that nothing names after it.

        Raises OSError: when it cannot be written. On a full disk the reserve has room for it.
        """
        try:
            with self.transaction():
                change()
                unused = self.unused()
        except OSError:
            if not self.reserve.exists():
                raise
            self.reserve.unlink()
            self.forget(change)
            return
        for path in unused:
            remove(path)
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        if not self.reserve.exists():
            try:
                storage.write_file(self.reserve, [bytes(RESERVE_BYTES)])
            except OSError:  # later, when there is room
                self.reserve.unlink(missing_ok=True)

    def clean_up(self) -> None:
        """Remove the folders that a kill has left without a name. With damaged rows nothing is removed."""
        named = set()
        for table, column in NAMES.items():
            for row in self.rows(table):
                if isinstance(row, Damaged):
                    return
                named.add(row[column])
        for path in self.folder.glob("models/*/*/*"):
            if str(path.relative_to(self.folder)) not in named:
                remove(path)
        self._keep_reserve()


def remove(path: Path) -> None:
    """Remove a folder of weights, and the folders above it that are empty then."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
        path.parent.parent.rmdir()


def _sum(values: Sequence[Any]) -> str:
    """The checksum of a row: 64 bits of its sha256."""
    digest = hashlib.sha256()
    for value in values:
        content = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()[:16]
