"""The datasets that have a name here: where each hub keeps them, at which revision, under which licence.

Nothing in these tables was tried from a connected machine yet; the evidence for an entry is above it.
Any other `org/name` of a hub works too (hub.py): its parquet files in order, a `text` column.
"""

import re
from dataclasses import dataclass, field

# ORG/NAME[/CONFIG] of any dataset of a hub; not what looks like the name of a file.
HUB_NAME = re.compile(
    r"(?!.*\.(?:txt|csv|tsv|json|jsonl|jsonl\.gz|parquet)$)"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<config>[A-Za-z0-9][\w.-]*))?"
)
Files = dict[str, str | None]  # path in a repo -> sha256, None where it is not known


@dataclass(frozen=True)
class Source:
    """Where one hub keeps a dataset."""

    repo: str
    revision: str  # a commit where one is known; a branch is resolved to a commit once, and recorded (hub.py)
    folder: str = ""  # a folder in the repo; empty: all of it
    train_shards: int = 8  # how many files to train on without --shards


@dataclass(frozen=True)
class Dataset:
    """Text to pretrain on: the parquet files of a folder in order, of which the last one is validation.

    Or the examples of a task: the files of each of its splits, at the same paths on every hub.
    """

    sources: dict[str, Source]  # by hub
    licence: str
    splits: dict[str, Files] = field(default_factory=dict)  # sha256 of the pinned revision on hf
    language: str = "en"  # decides the default tasks of a model that was pretrained on it


DATASETS = {
    # Repo: nanochat upstream and its forks agree; 6,543 shards of about 92 MB, 84 row groups of 1,024 documents each.
    # Revision: ten files of public projects name this one. Licence: of the source, nvidia/ClimbMix; its card says MIT.
    # ModelScope is not known to have the text (nv-community/ClimbMix is tokens).
    "climbmix": Dataset(
        {"hf": Source("karpathy/climbmix-400b-shuffle", "915333b4f8b8684f39aeaafea600fea6f43fb703")},
        licence="CC BY-NC 4.0",
    ),
    # hf: nanochat upstream until March 2026, 1,823 shards of about 100 MB. Licence: of the source,
    # HuggingFaceFW/fineweb-edu. ModelScope: scripts read this folder of the repo, and one downloads 000_00000.parquet
    # and so on from sample/350BT; at about 2 GB a shard.
    "fineweb-edu": Dataset(
        {
            "hf": Source("karpathy/fineweb-edu-100b-shuffle", "main"),
            "modelscope": Source("AI-ModelScope/fineweb-edu", "master", folder="sample/100BT", train_shards=2),
        },
        licence="ODC-By 1.0",
    ),
    # Folder 4_5 holds the highest scores, columns text, score, source: the dataset's commit pages and its readers
    # agree. Revision: pinned by several projects of one author. The card requires an e-mail before commercial use.
    # Several projects link the same repo on ModelScope.
    "fineweb-edu-chinese": Dataset(
        {
            "hf": Source("opencsg/Fineweb-Edu-Chinese-V2.1", "a5b574efa48beb3a8f6887ef0b093becf004328b", folder="4_5"),
            "modelscope": Source("opencsg/Fineweb-Edu-Chinese-V2.1", "master", folder="4_5"),
        },
        licence="Apache-2.0, commercial use by permission",
        language="zh",
    ),
}


def _split(prefix: str, sha256: str | None = None, count: int = 1) -> Files:
    """`data/test` -> data/test-00000-of-00001.parquet, as the `datasets` library names files."""
    return {f"{prefix}-{number:05d}-of-{count:05d}.parquet": sha256 for number in range(count)}


ARC = {
    "hf": Source("allenai/ai2_arc", "210d026faf9955653af8916fad021475a3f00453"),
    "modelscope": Source("allenai/ai2_arc", "master"),  # no file is named there
}

ZH_CATEGORIES = (
    "brainstorming", "creative-writing", "document-qa", "editing", "everyday", "information-seeking", "planning",
    "rewrite", "role-playing", "safe", "summary", "translate",
)  # fmt: skip

# Paths and revisions on hf: named alike by five or more public projects that pin them; a sha256: by two or more that
# check it. ModelScope: public projects link the repo; which of them also name a file is noted.
TASKS = {
    # 7,473 and 1,319 examples. A newer revision (740312a) holds the same bytes. ModelScope: main/test has this sha256.
    "gsm8k": Dataset(
        {
            "hf": Source("openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee"),
            "modelscope": Source("AI-ModelScope/gsm8k", "master"),
        },
        licence="MIT",
        splits={
            "train": _split("main/train", "ea82612ea9582142387730c793eb67d3b12849002bc0b7fa6f8efafa7351419d"),
            "test": _split("main/test", "ee7b8da9e381df27b9e3f7758a159ab2bdaa4dbaa910546cbbc47e0cb44e4f59"),
        },
    ),
    # 99,842, 1,531 and 14,042 examples (its card). ModelScope: a file of one subject is named there, of `all` none.
    "mmlu": Dataset(
        {
            "hf": Source("cais/mmlu", "c30699e8356da336a370243923dbaf21066bb9fe"),
            "modelscope": Source("cais/mmlu", "master"),
        },
        licence="MIT",
        splits={
            "auxiliary_train": _split("all/auxiliary_train"),
            "test": _split("all/test", "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7"),
        },
    ),
    # 2,251 and 2,376 examples.
    "arc_easy": Dataset(
        ARC,
        licence="CC BY-SA 4.0",
        splits={
            "train": _split("ARC-Easy/train", "b315db8a4be597dc7daa50a4e70d48dd7c990c32085629e6ccd8c926beaa80b5"),
            "test": _split("ARC-Easy/test", "4160597d618ae851c7eb04e281574f3f654776216ac6b6641588d64527b47177"),
        },
    ),
    # 1,119 and 1,172 examples.
    "arc_challenge": Dataset(
        ARC,
        licence="CC BY-SA 4.0",
        splits={
            "train": _split("ARC-Challenge/train", "e488c1587ffdcfc8443f916c53488a95cd471c5790e0746c6bfe4cecf20962cb"),
            "test": _split("ARC-Challenge/test", "62f03257e737aed263f55c6abf87c7bb0028a44a6bdd2a26eb1279eb42c1d1e9"),
        },
    ),
    # 164 examples. ModelScope has opencompass/humaneval, whose files nobody names: left out.
    "humaneval": Dataset(
        {"hf": Source("openai/openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544")},
        licence="MIT",
        splits={"test": _split("openai_humaneval/test")},
    ),
    # smol-smoltalk, the part of SmolTalk for small models: about 460,000 and 24,000 dialogues, 923 and 48 MB (the
    # hub's own listing). No copy on ModelScope was found.
    "smoltalk": Dataset(
        {"hf": Source("HuggingFaceTB/smol-smoltalk", "f73fe857d519ff6ac5af2ea67c4d3834da7b8bcc")},
        licence="Apache-2.0",
        splits={
            "train": _split("data/train", count=4),
            "test": _split("data/test", "be6773dcce145f3918ff14237b1f765affa427b0b13f6a02d397e665ac908b9a"),
        },
    ),
    # Chinese dialogues of three turns and tasks on a text, by category, without the mathematics and code of the whole
    # set (700,000 by its card, 1.2 GB). Revision: the hub's own listing and a project that pins it; its files are at
    # the top. ModelScope: a script downloads the same names from `master` there. Columns: three projects, that one
    # among them, read a list `conversations` of {role, content}; no record was seen here. No split is held out, so
    # one category is.
    "smoltalk_zh": Dataset(
        {
            "hf": Source("opencsg/smoltalk-chinese", "5edf5d0d7b06794755cf78b274a150a4efe1c9d4"),
            "modelscope": Source("opencsg/smoltalk-chinese", "master"),
        },
        licence="Apache-2.0, commercial use by permission",
        splits={
            "train": {f"{category}.parquet": None for category in ZH_CATEGORIES},
            "test": {"advice-seeking.parquet": None},
        },
        language="zh",
    ),
}
