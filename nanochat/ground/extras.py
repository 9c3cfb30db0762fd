"""Packages that only rooms import, and the extra of pyproject.toml that installs each."""

EXTRAS = {
    "prompt_toolkit": "chat",
    "jinja2": "families",
    "tokenizers": "families",
    "huggingface_hub": "hub",
    "yaml": "hub",
    "matplotlib": "report",
    "httpx2": "samplers",
    "fastapi": "serve",
    "httptools": "serve",
    "llguidance": "serve",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "uvloop": "serve",
    "google": "service",  # the package protobuf
    "modelscope": "modelscope",
    "ray": "ray",
    "swanlab": "track",
    "tensorboard": "track",
    "wandb": "track",
}


def advice(error: ImportError) -> str | None:
    """One line for a package of an extra that is not installed; None for any other error."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return None
    extra = EXTRAS[package]
    return f"{package} is not installed: run `bash setup_ascend.sh --extras {extra}` or `pip install -e '.[{extra}]'`"
