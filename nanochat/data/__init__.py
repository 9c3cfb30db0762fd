"""Text and records beyond the core: downloads, other formats of files, records of tasks."""

PLUGS = {
    "hubs": {
        "hf": "nanochat.data.hub:Hub",
        "modelscope": "nanochat.data.hub:Hub",
    },
    "file formats": {
        ".parquet": "nanochat.data.parquet:ParquetFile",
        ".jsonl.gz": "nanochat.data.formats:GzipFile",
        ".csv": "nanochat.data.formats:CsvFile",
        ".tsv": "nanochat.data.formats:CsvFile",
        ".json": "nanochat.data.formats:JsonFile",
    },
    "corpora": {
        "pydoc": "nanochat.data.python_docs:PydocCorpus",
    },
}
